"""Draws docs/pictures/patterns.png: which keys (across) each query (down) attends to, in twelve models of the family.

python docs/pictures/patterns.py            # needs matplotlib
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from everyformer import (
    Attention,
    Block,
    Causal,
    Full,
    Hashed,
    Language,
    Layer,
    Local,
    Local2d,
    Model,
    Prefix,
    PreNorm,
    Probe,
    Shared,
    Stack,
    Stride,
    Summary,
    Tokens,
    Window,
)

N = 32  # positions


def hashed() -> Tensor:
    """The keys that a query finds in its bucket, in an attention with random weights and a text of few letters."""
    attention = Attention(Shared(1), Hashed(rounds=2, buckets=8, window=6))
    model = Model(width=16, embed=Tokens(8), body=Stack(1, (Layer((attention,)),), PreNorm()), outputs=(Language(),))
    torch.manual_seed(3)
    network, probe = model.build(), Probe()
    network(torch.randint(0, 8, (1, N)), probe=probe)
    return probe.weights[0][0, 0] > 0


def spans() -> Tensor:
    """A soft mask of adaptive spans: 1 up to a distance of 6, falling to 0 at 14."""
    distance = torch.arange(N)[:, None] - torch.arange(N)
    return ((14 - distance) / 8).clamp(0, 1) * (distance >= 0)


def fading() -> Tensor:
    """The weights of an LSTM whose forget gates are all 0.88: it is attention too (Levy et al. 2018)."""
    distance = torch.arange(N)[:, None] - torch.arange(N)
    return 0.88 ** distance.clamp(min=0) * (distance >= 0)


def graph() -> Tensor:
    """A random graph in which neighbours attend to each other and to themselves."""
    torch.manual_seed(0)
    edges = torch.rand(N, N) < 0.06
    return edges | edges.T | torch.eye(N, dtype=torch.bool)


causal = Causal()
PANELS: list[tuple[str, str, Tensor]] = [
    ("bert, vit", "every token", Full().mask(N)[0]),
    ("gpt2", "the past", causal.mask(N)[0]),
    ("transformer-xl", "segment and memory", (causal & Local(8, 8)).mask(N)[0]),
    ("adaptive-span", "a learned distance", spans()),
    ("sparse-transformer", "strided", (causal & (Window(6) | Stride(6))).mask(N)[0]),
    ("sparse-transformer", "fixed", (causal & (Block(8) | Summary(8, 1))).mask(N)[0]),
    ("image-transformer", "1-D blocks", (causal & Local(8, 4)).mask(N)[0]),
    ("image-transformer", "2-D blocks", (causal & Local2d(8, 2, 4, 1, 2)).mask(N)[0]),
    ("reformer", "the same bucket", hashed()),
    ("graph-classifier", "along edges", graph()),
    ("lstm", "a fading past", fading()),
    ("your own", "dilated, global tokens", (causal & (Stride(3) & Window(16) | Prefix(2))).mask(N)[0]),
]


def main() -> None:
    figure, axes = plt.subplots(2, 6, figsize=(9.4, 4.0), dpi=100, facecolor="white", layout="constrained")
    for axis, (name, what, allowed_QK) in zip(axes.flat, PANELS, strict=True):
        value_QK = allowed_QK.float()
        future_QK = torch.ones(N, N).triu(1) * value_QK
        image = torch.ones(N, N, 3) * torch.tensor([0.945, 0.953, 0.961])
        for weight_QK, color in ((value_QK, (0.145, 0.388, 0.729)), (future_QK, (0.945, 0.576, 0.184))):
            image = image + weight_QK[..., None] * (torch.tensor(color) - image)
        axis.imshow(image.numpy(), interpolation="nearest", extent=(0, N, N, 0))
        axis.set_title(name, fontsize=9, fontweight="bold", pad=4)
        axis.set_xlabel(what, fontsize=9, labelpad=4)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.set_xticks(range(N + 1), minor=True)
        axis.set_yticks(range(N + 1), minor=True)
        axis.grid(which="minor", color="white", linewidth=0.4)
        axis.tick_params(which="both", length=0)
        for spine in axis.spines.values():
            spine.set_color("#c5ccd3")
    figure.get_layout_engine().set(w_pad=0.05, wspace=0.06)
    figure.savefig(Path(__file__).with_name("patterns.png"))


if __name__ == "__main__":
    main()
