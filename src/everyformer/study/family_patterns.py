"""The attention patterns of the family in one picture: which keys (across) each query (down) attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from everyformer.attention.context import Probe
from everyformer.attention.pattern import (
    Block,
    Causal,
    Full,
    Hashed,
    Local,
    Local2d,
    Pattern,
    Prefix,
    Stride,
    Summary,
    Window,
)
from everyformer.attention.projection import Shared
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.output_head import Language
from everyformer.network.residual import PreNorm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

N = 32  # positions
COLUMNS = 6
PAST, FUTURE, NOTHING = (0.145, 0.388, 0.729), (0.945, 0.576, 0.184), (0.945, 0.953, 0.961)


@dataclass(frozen=True)
class Panel:
    """The pattern of a member: from 0 to 1, how much each query attends to each key."""

    name: str
    what: str
    value_QK: Tensor


def panels() -> list[Panel]:
    """The patterns of twelve models, small enough to see their cells."""
    causal = Causal()
    patterns: list[tuple[str, str, Pattern]] = [
        ("bert, vit", "every token", Full()),
        ("gpt2", "the past", causal),
        ("transformer-xl", "segment and memory", causal & Local(8, 8)),
        ("sparse-transformer", "strided", causal & (Window(6) | Stride(6))),
        ("sparse-transformer", "fixed", causal & (Block(8) | Summary(8, 1))),
        ("image-transformer", "1-D blocks", causal & Local(8, 4)),
        ("image-transformer", "2-D blocks", causal & Local2d(8, 2, 4, 1, 2)),
        ("your own", "dilated, global tokens", causal & (Stride(3) & Window(16) | Prefix(2))),
    ]
    found = [Panel(name, what, pattern.mask(N)[0].float()) for name, what, pattern in patterns]
    found.insert(3, Panel("adaptive-span", "a learned distance", _spans()))
    more = [("reformer", "the same bucket", _hashed()), ("graph-classifier", "along edges", _graph())]
    found[-1:-1] = [Panel(*one) for one in [*more, ("lstm", "a fading past", _fading())]]
    return found


def _hashed() -> Tensor:
    """The keys that a query finds in its bucket, in an attention with random weights and a text of few letters."""
    attention = Attention(Shared(1), Hashed(rounds=2, buckets=8, window=6))
    model = Model(width=16, embed=Tokens(8), body=Stack(1, (Layer((attention,)),), PreNorm()), outputs=(Language(),))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        network, probe = model.build(), Probe()
        network(torch.randint(0, 8, (1, N)), probe=probe)
    return (probe.weights[0][0, 0] > 0).float()


def _spans() -> Tensor:
    """A soft mask of adaptive spans: 1 up to a distance of 6, falling to 0 at 14."""
    distance_QK = torch.arange(N)[:, None] - torch.arange(N)
    return ((14 - distance_QK) / 8).clamp(0, 1) * (distance_QK >= 0)


def _fading() -> Tensor:
    """The weights of an LSTM whose forget gates are all 0.88: it is attention too (Levy et al. 2018)."""
    distance_QK = torch.arange(N)[:, None] - torch.arange(N)
    return 0.88 ** distance_QK.clamp(min=0) * (distance_QK >= 0)


def _graph() -> Tensor:
    """A random graph in which neighbours attend to each other and to themselves."""
    edge_NN = torch.rand(N, N, generator=torch.Generator().manual_seed(0)) < 0.06
    return (edge_NN | edge_NN.T | torch.eye(N, dtype=torch.bool)).float()


def draw(found: list[Panel]) -> Figure:
    """Draw panels in rows of six: blue is the past, orange the future."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = -(-len(found) // COLUMNS)
    layout = ConstrainedLayoutEngine(w_pad=0.05, wspace=0.06)
    figure = Figure((9.4, 2.0 * rows), dpi=100, facecolor="white", layout=layout)
    for plot, panel in zip(figure.subplots(rows, COLUMNS, squeeze=False).flat, found, strict=False):
        future_QK = torch.ones(N, N).triu(1) * panel.value_QK
        image_QKC = torch.ones(N, N, 3) * torch.tensor(NOTHING)
        for weight_QK, color in ((panel.value_QK, PAST), (future_QK, FUTURE)):
            image_QKC = image_QKC + weight_QK[..., None] * (torch.tensor(color) - image_QKC)
        plot.imshow(image_QKC.numpy(), interpolation="nearest", extent=(0, N, N, 0))
        plot.set_title(panel.name, fontsize=9, fontweight="bold", pad=4)
        plot.set_xlabel(panel.what, fontsize=9, labelpad=4)
        plot.set_xticks([])
        plot.set_yticks([])
        plot.set_xticks(range(N + 1), minor=True)
        plot.set_yticks(range(N + 1), minor=True)
        plot.grid(which="minor", color="white", linewidth=0.4)
        plot.tick_params(which="both", length=0)
        for spine in plot.spines.values():
            spine.set_color("#c5ccd3")
    return figure
