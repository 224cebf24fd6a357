"""Measures training: steps of GPT-2, of Bloem's byte model, and of members at long contexts, beside other libraries.

    for speed in bench(["gpt2"], torch.device("cuda")): print(speed)

A way is a library with how its steps run: as they are, compiled, or with CUDA graphs. Ours are the steps of `everyformer train` without
dropout (run.compile=no, yes, graphs). A GPU
computes at the published sizes in bfloat16, a CPU at small ones in float32. The operations of a step are those of the model, not of
what is computed again:

    tokens (6 N + 12 L T D)    N weights in products, L layers, T positions, width D; attention over all pairs, causal or not

for dense attention only. The weights in products are all but the tables of positions, and of tokens unless the output is tied to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import nn

from everyformer.network.embed import Tokens
from everyformer.network.model import Model
from everyformer.network.output_head import Language
from everyformer.network.size import NoInit
from everyformer.study.bench_peers import PEERS, PeerSteps, Shape
from everyformer.study.bench_steps import Steps, Tick, Way, measure, train_steps
from everyformer.train.recipe import Recipe
from everyformer.value import nearest

OURS = {"everyformer": "no", "everyformer-compiled": "yes", "everyformer-graphs": "graphs"}  # run.compile
RAMP = 32  # positions of the soft end of a span
Settings = Callable[[Shape], tuple[str, ...]]


@dataclass(frozen=True)
class Row:
    """A model to train: its member with settings, and its sizes on a GPU and on a CPU."""

    member: str
    cuda: Shape
    cpu: Shape
    settings: Settings
    dense: bool = False  # dense attention, of which the operations are counted, and which the peers have too
    ways: tuple[str, ...] = ("everyformer",)  # on a GPU, unless others are asked for

    def shape(self, device: torch.device) -> Shape:
        return self.cuda if device.type == "cuda" else self.cpu


@dataclass(frozen=True)
class Speed:
    """One way of training one row."""

    row: str
    way: str
    steps: Steps
    shape: Shape
    operations: int | None  # of a step; None: not counted

    @property
    def rate(self) -> float:
        """Tokens per second; 0 for a way that failed."""
        return self.shape.tokens / self.steps.median if self.steps.median else 0.0

    @property
    def teraflops(self) -> float | None:
        """Operations of the model per second, in 10^12."""
        return self.operations / self.steps.median / 1e12 if self.operations and self.steps.median else None


def sizes(shape: Shape) -> tuple[str, ...]:
    return f"model.width={shape.width}", f"model.layers={shape.layers}", f"model.heads={shape.heads}"


def _fixed(shape: Shape) -> tuple[str, ...]:
    stride = _stride(shape)  # 128 with 32 columns at 16,384 positions, as published for enwik8
    return (*sizes(shape), f"model.stride={stride}", f"model.columns={stride // 4}")


def _strided(shape: Shape) -> tuple[str, ...]:
    stride = _stride(shape)
    pattern = f"by_head(causal & window({stride}), causal & stride({stride}))"
    return (*sizes(shape), f"model.stride={stride}", f'model.patterns=["{pattern}"]')


def _reformer(shape: Shape) -> tuple[str, ...]:
    chunk = 2 * _stride(shape)  # 256, as published, with two buckets for each
    return (
        *sizes(shape),
        f"model.axial_columns={_stride(shape)}",
        f"model.pattern=hashed(4, {2 * shape.length // chunk}, {chunk})",
    )


def _span(shape: Shape, *more: str) -> tuple[str, ...]:
    span = max(2 * RAMP, shape.length // 64)  # 256 of 16,384 positions, the soft end included
    initial = (span - RAMP) / shape.length
    return (*sizes(shape), f"model.span={shape.length}", f"model.ramp={RAMP}", f"model.initial_span={initial}", *more)


def _stride(shape: Shape) -> int:
    """A power of two near the root of the length: 128 at 16,384 positions."""
    return 1 << (shape.length.bit_length() - 1) // 2


GPT2, SMALL = Shape(768, 12, 12, 1024, 50257, 32), Shape(256, 4, 4, 256, 8192, 2)
BYTES, FEW_BYTES = Shape(256, 12, 8, 256, 256, 32), Shape(256, 12, 8, 256, 256, 2)
LONG, SHORT = Shape(512, 6, 8, 16_384, 256, 4), Shape(64, 2, 4, 2048, 256, 1)
ROWS: dict[str, Row] = {
    "gpt2": Row(
        "gpt2",
        GPT2,
        SMALL,
        sizes,
        True,
        ("everyformer", "everyformer-compiled", "plain", "plain-compiled", "transformers", "transformers-compiled"),
    ),
    "bytes": Row("byte-language", BYTES, FEW_BYTES, sizes, True, (*OURS, "plain", "plain-graphs", "transformers")),
    "long-dense": Row("gpt2", LONG, SHORT, sizes, True),
    "long-fixed": Row("sparse-transformer", LONG, SHORT, _fixed),
    "long-strided": Row("sparse-transformer", LONG, SHORT, _strided),
    "long-reformer": Row("reformer", LONG, SHORT, _reformer),
    "long-span": Row("adaptive-span", LONG, SHORT, _span),
    "long-dynamic-span": Row("adaptive-span", LONG, SHORT, lambda shape: _span(shape, "model.dynamic=true")),
}
CPU_WAYS = ("everyformer", "plain", "transformers")
WAYS = tuple(f"{one}{mode}" for one in CPU_WAYS for mode in ("", "-compiled", "-graphs"))


def choose_rows(names: Sequence[str]) -> list[str]:
    """Returns the names of rows; `long` stands for all that begin so. Raises ValueError for an unknown name."""
    chosen: list[str] = []
    for name in names:
        found = [row for row in ROWS if row == name or row.startswith(f"{name}-")]
        if not found:
            raise ValueError(f"no row is named {name!r}; {nearest(name, [*ROWS, 'long'])}")
        chosen += found
    return list(dict.fromkeys(chosen or ROWS))


def choose_ways(name: str, asked: Sequence[str] | None, device: torch.device) -> list[str]:
    """Returns the ways to train a row that exist here: those that are asked for, or the usual ones."""
    for way in asked or ():
        if way not in WAYS:
            raise ValueError(f"there is no way {way!r} to train; {nearest(way, WAYS)}")
        if device.type != "cuda" and way.endswith("graphs"):
            raise ValueError(f"the way {way} needs a GPU with CUDA; leave it out, or give --device cuda")
    row = ROWS[name]
    usual = row.ways if device.type == "cuda" else [way for way in CPU_WAYS if way in OURS or row.dense]
    return [way for way in asked or usual if way in OURS or (row.dense and way.partition("-")[0] in PEERS)]


def bench(
    rows: Sequence[str], device: torch.device, *, ways: Sequence[str] | None = None, steps: int = 20
) -> Iterator[list[Speed]]:
    """Yields the speeds of all ways of a row, row by row; on a GPU way by way, as soon as each is known."""
    plan = [(name, choose_ways(name, ways, device)) for name in choose_rows(rows)]
    with TemporaryDirectory() as folder:
        for name, chosen in plan:
            steps_of = {way: way_of(name, way, device, Path(folder)) for way in chosen}
            groups = [[way] for way in chosen] if device.type == "cuda" else [chosen]
            for group in groups:
                found = measure({way: steps_of[way] for way in group}, device, steps)
                yield [_speed(name, way, found[way], device) for way in found]


def _speed(name: str, way: str, steps: Steps, device: torch.device) -> Speed:
    row = ROWS[name]
    shape = row.shape(device)
    return Speed(name, way, steps, shape, operations(_value(name, shape), shape) if row.dense else None)


class OurSteps:
    """The way of this library: the loop of `everyformer train`."""

    def __init__(self, recipe: Recipe, device: torch.device):
        self.recipe, self.device = recipe, device
        self.compiles = recipe.run.compile != "no"

    def __call__(self, tick: Tick) -> None:
        torch.manual_seed(0)
        if self.compiles:
            torch._dynamo.reset()
        train_steps(self.recipe, self.device, tick)


def way_of(name: str, way: str, device: torch.device, folder: Path) -> Way:
    """Returns the way of a name. The token ids of a vocabulary that bytes do not have are written to the folder."""
    shape = ROWS[name].shape(device)
    if way in OURS:
        return OurSteps(recipe_of(name, OURS[way], device, folder), device)
    peer, _, mode = way.partition("-")
    return PeerSteps(peer, mode or "eager", shape, device)


def recipe_of(name: str, compile_mode: str, device: torch.device, folder: Path) -> Recipe:
    """Returns the recipe of a row."""
    row, shape = ROWS[name], ROWS[name].shape(device)
    run = (
        f"run.batch={shape.batch}", f"task.context={shape.length}", f"run.compile={compile_mode}", "model.dropout=0", "run.seed=0",
        f"run.precision={'bf16' if device.type == 'cuda' else 'fp32'}", f"run.device={device.type}", "run.evaluate=0",
    )  # fmt: skip
    data = None if shape.vocabulary == 256 else token_ids(shape, folder)
    return Recipe.of(row.member, *run, *row.settings(shape), data=data)


def token_ids(shape: Shape, folder: Path) -> Path:
    """Returns a file of random token ids."""
    file = folder / f"ids_{shape.vocabulary}_{shape.length}.npy"
    if not file.exists():
        ids = np.random.default_rng(0).integers(shape.vocabulary, size=64 * shape.length, dtype=np.uint32)
        ids[0] = shape.vocabulary - 1  # the largest id decides the size of the vocabulary
        np.save(file, ids)
    return file


@cache
def _value(name: str, shape: Shape) -> Model:
    settings = {"context": shape.length, "vocabulary": shape.vocabulary}
    value = Recipe.of(ROWS[name].member, *ROWS[name].settings(shape)).value(settings)
    assert isinstance(value, Model)
    return value


def operations(value: Model, shape: Shape) -> int:
    """Returns the operations of a training step of a model with dense attention (see above)."""
    attention = 12 * shape.layers * shape.length * shape.width
    return shape.tokens * (6 * weights_in_products(value) + attention)


def weights_in_products(value: Model) -> int:
    """Returns the number of weights that each token is multiplied with."""
    with torch.device("meta"), NoInit():
        network = value.build()
    tables = [p for module in network.modules() if isinstance(module, nn.Embedding) for p in module.parameters()]
    head = value.outputs[0]
    tied = isinstance(head, Language) and head.tied
    table = value.embed.vocabulary * value.width if tied and isinstance(value.embed, Tokens) else 0
    return sum(p.numel() for p in network.parameters()) - sum(p.numel() for p in tables) + table
