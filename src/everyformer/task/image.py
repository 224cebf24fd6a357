"""Image: the next channel of a picture, one after the other. Paper: Parmar et al. 2018.

The order of generation is that of the model's grid. The number that counts is bits per dimension, the mean of -log2 p over all
channels of all pixels; with fewer levels than 256 it is another, smaller number. A picture that has begun is completed from
its upper rows; with `shrink` the model's encoder is shown the picture made smaller (super-resolution).
"""

from __future__ import annotations

import json
import math
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from everyformer.data.files import read_json
from everyformer.data.images import Images, downsample, import_pillow, open_unlabelled_images, save_image_grid
from everyformer.infer.paint import Scan, paint
from everyformer.network.embed import Features, Tokens
from everyformer.network.grid import Grid
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Language, Logistics
from everyformer.task.work import Batch, Task, Work, check_split, epoch_rows, which
from everyformer.value import Share, Size, Value

LONGEST = 1 << 16  # steps of a picture
EVALUATED = 1 << 16  # steps at a time
ACROSS = 8  # pictures beside each other where each has several below


class Image(Task, Value, frozen=True):
    """Paint pictures."""

    levels: Annotated[int, Meta(ge=2, le=256)] = 256  # values of a channel: fewer are learned sooner
    size: Size | None = None  # crop the pictures to squares of so many points
    shrink: Size = 1  # show the model the picture made smaller by this factor: 2 or 4 for super-resolution
    valid: Share = 0.1  # the share of the training pictures kept for validation, where there is no split for it

    def open(self, data: str | None, context: int | None, folder: Path | None = None) -> Work:
        return PictureWork(self, data, folder)

    def reopen(self, data: str | None, context: int | None, folder: Path) -> Work:
        return self.open(data, context, folder)  # what is completed or enlarged, read when it is asked for


class PictureWork(Work):
    metric = "bits_per_dimension"
    writes = paints = True
    hint = "--out samples.png"
    head = 0
    mixture: Logistics | None = None  # what the head tells, where it is not a level
    scan: Scan
    small: Scan  # of the picture that the encoder reads

    def __init__(self, task: Image, data: str | None, folder: Path | None):
        self.task, self.data, self.name = task, data, data or "the embedded shapes"
        # A run knows the shape of its pictures: to paint new ones it need not read them.
        self.asked: dict[str, Any] = {"data": data, "size": task.size}
        known = (None if folder is None else read_json(folder / "pictures.json")) or {}
        fits = {name: known.get(name) for name in self.asked} == self.asked
        self.shape = tuple(known["shape"] if known and fits else self.pictures.splits["train"].shape[1:])
        self.channels, self.rows, self.columns = self.shape
        if self.values > LONGEST:
            raise ValueError(
                f"the pictures of {self.name} have {self.columns} x {self.rows} points, which is {self.values:,} steps; "
                "make them smaller with task.size=32"
            )
        for name, length in (("rows", self.rows), ("columns", self.columns)):
            if length % task.shrink:
                raise ValueError(
                    f"task.shrink={task.shrink} does not divide the {length} {name} of {self.name}; give a divisor, or "
                    "another task.size"
                )

    @cached_property
    def pictures(self) -> Images:
        return open_unlabelled_images(self.data, self.task.valid, self.task.size)

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        return self.pictures.fingerprint

    @property
    def values(self) -> int:
        """Channels of all pixels of a picture."""
        return self.rows * self.columns * self.channels

    def changes(self) -> dict[str, Any]:
        sizes = {"rows": self.rows, "columns": self.columns, "channels": self.channels, "downsample": self.task.shrink}
        tokens = {"vocabulary": self.channels * self.task.levels + 1, "context": self.values}
        return sizes | tokens | {"levels": self.task.levels}

    def fit(self, value: Model | EncoderDecoder) -> None:
        shrink, paired = self.task.shrink, isinstance(value, EncoderDecoder)
        if paired != (shrink > 1):
            raise ValueError(
                f"task.shrink={shrink} and a model {'with' if paired else 'without'} an encoder do not go together: an encoder "
                "reads the picture made smaller by 2 or more; choose image-transformer and set task.shrink alone"
            )
        decoder = value.decoder if isinstance(value, EncoderDecoder) else value
        self.mixture = next((head for head in decoder.outputs if isinstance(head, Logistics)), None)
        joint = self.mixture is not None
        self.head = which(decoder, Logistics if joint else Language, "image")
        across = self.columns if joint else self.columns * self.channels
        plain = Grid(self.rows, across)
        grid = decoder.position if isinstance(decoder.position, Grid) else plain
        self.scan = Scan(self.channels, self.task.levels, grid, joint)
        self.small = Scan(self.channels, self.task.levels, Grid(self.rows // shrink, across // shrink), joint)
        if (grid.rows, grid.columns) != (plain.rows, plain.columns):
            raise ValueError(
                f"the pictures of {self.name} are {plain.rows} rows of {across} steps, the model's {grid.rows} of "
                f"{grid.columns}; leave model.rows, model.columns and model.channels to the data"
            )
        for side, scan in self._sides(value):
            self._check(side, scan)
        head: Any = decoder.outputs[self.head]
        if joint and (head.channels, head.levels) != (self.channels, self.task.levels):
            raise ValueError(
                f"the model tells {head.channels} channels of {head.levels} levels, the pictures have {self.channels} of "
                f"{self.task.levels}; leave model.channels and model.levels to the data"
            )
        if not joint and head.vocabulary is not None and head.vocabulary < self.task.levels:
            raise ValueError(
                f"the model tells {head.vocabulary} levels, the pictures have {self.task.levels}; set task.levels alone"
            )

    def _sides(self, value: Model | EncoderDecoder) -> list[tuple[Model, Scan]]:
        if isinstance(value, EncoderDecoder):
            return [(value.encoder, self.small), (value.decoder, self.scan)]
        return [(value, self.scan)]

    def _check(self, side: Model, scan: Scan) -> None:
        limit = side.limit()
        if limit is not None and limit < scan.length:
            raise ValueError(
                f"a picture of {self.name} is {scan.length} steps, but the model knows {limit} positions; give it more"
            )
        if not scan.joint:
            tokens, embed = self.channels * self.task.levels + 1, side.embed
            if not isinstance(embed, Tokens) or embed.vocabulary < tokens:
                raise ValueError(
                    f"{self.channels} channels of {self.task.levels} levels and a start are {tokens} tokens, but the model's inputs "
                    f"are {embed}; set task.levels alone, or give it Tokens({tokens})"
                )
        elif not isinstance(side.embed, Features) or side.embed.inputs != self.channels:
            raise ValueError(
                f"a mixture of logistics reads pixels of {self.channels} channels, but the model's inputs are {side.embed}; "
                f"give it Features({self.channels})"
            )

    def examples(self) -> int:
        return len(self.pictures.splits["train"])

    def batch(self, step: int, size: int, seed: int) -> Batch:
        return self._batch("train", epoch_rows(self.examples(), step * size, size, seed))

    def _batch(self, split: str, row_B: Tensor) -> Batch:
        image_BCYX = self.pictures.splits[split][row_B.numpy()]
        step_BPN = self.scan.unfold(self._levels(image_BCYX))
        found = {"step_BPN": step_BPN, "given": self.scan.begin(step_BPN[:, :-1])}
        return Batch(found | ({"source": self._source(image_BCYX)} if self.task.shrink > 1 else {}))

    def _levels(self, image_BCYX: NDArray[np.uint8]) -> Tensor:
        return torch.from_numpy(image_BCYX).long() * self.task.levels // 256

    def _source(self, image_BCYX: NDArray[np.uint8]) -> Tensor:
        """What the encoder reads."""
        return self.small.read(self.small.unfold(self._levels(downsample(image_BCYX, self.task.shrink))), 0)

    def count(self, batch: Batch) -> int:
        return batch["step_BPN"].numel()

    def _nats(self, network: Any, batch: Batch, kernel: str) -> tuple[Any, Tensor]:
        """The output, and the sum of -log p over all channels."""
        inputs = (batch["source"], batch["given"]) if self.task.shrink > 1 else (batch["given"],)
        output = network(*inputs, kernel=kernel)
        answer, step_BPN = output.logits_of(self.head).float(), batch["step_BPN"]
        if self.mixture is not None:
            return output, -self.mixture.log_share(answer, step_BPN).sum()
        return output, F.cross_entropy(answer.flatten(0, 1), step_BPN.flatten(), reduction="sum")

    def loss(self, network: Network | PairNetwork, batch: Batch, kernel: str) -> Tensor:
        output, total = self._nats(network, batch, kernel)
        return total + sum(output.aux.values()) * self.count(batch)

    @torch.no_grad()
    def evaluate(self, network: Network | PairNetwork, split: str, limit: int | None, kernel: str) -> dict[str, Any]:
        check_split(split, self.pictures.splits, self.name)
        whole, device, total = len(self.pictures.splits[split]), next(network.parameters()).device, 0.0
        count = whole if limit is None else min(limit, whole)
        row_N = torch.arange(count) * whole // count  # spread over the split
        for row_B in row_N.split(max(1, EVALUATED // self.scan.length)):
            total += float(self._nats(network, self._batch(split, row_B).to(device), kernel)[1])
        mean = total / (count * self.values)
        return {
            "bits_per_dimension": mean / math.log(2),
            "loss": mean,
            "split": split,
            "pictures": count,
            "dimensions": count * self.values,
            "levels": self.task.levels,
        }

    def paint(
        self, network: Network | PairNetwork, file: Path, pictures: int = 16, given: float = 0.0, **choices: Any
    ) -> str:
        """A sheet of new pictures; or, where something is given of them, rows of what is given, what was made of it, and the truth."""
        if file.suffix != ".png" or not file.parent.is_dir():
            raise ValueError(f"cannot write pictures to {file}; give a .png file in a folder that exists")
        if pictures < 1 or not 0 <= given < 1:
            raise ValueError(
                f"{pictures} pictures of which {given} is given: give 1 or more, and a share of 0 or more, below 1"
            )
        import_pillow()
        height, shrink = (self.scan.grid.block or (1, 1))[0], self.task.shrink
        rows = int(given * self.rows) // height * height  # whole blocks: what comes before in the order of generation
        if given and not rows:
            raise ValueError(f"--given {given} is less than one block of {height} rows of {self.rows}; give more")
        if shrink == 1 and rows == 0:
            nothing = np.zeros((pictures, self.channels, self.rows, self.columns), dtype=np.uint8)
            made_BCYX, across = self._made(network, nothing, 0, **choices), math.ceil(math.sqrt(pictures))
            save_image_grid([made_BCYX[start : start + across] for start in range(0, pictures, across)], file)
            return f"{pictures} pictures: {file}"
        truth_BCYX = self.pictures.splits["valid"][:pictures]
        made_BCYX = self._made(network, truth_BCYX, rows, **choices)
        three = (self._seen(truth_BCYX, rows), made_BCYX, self._bytes(self._levels(truth_BCYX)))
        starts = range(0, len(truth_BCYX), ACROSS)
        save_image_grid([kind[start : start + ACROSS] for start in starts for kind in three], file)
        what = [f"{rows} of {self.rows} rows"] * (rows > 0) + [f"a picture {shrink} times smaller"] * (shrink > 1)
        return f"{len(truth_BCYX)} pictures (given {' and '.join(what)}, painted, true): {file}"

    def _made(
        self, network: Network | PairNetwork, truth_BCYX: NDArray[np.uint8], rows: int, **choices: Any
    ) -> NDArray[np.uint8]:
        """What is painted on from the first rows of pictures, and from them made smaller where there is an encoder."""
        device, source = next(network.parameters()).device, None
        given_BPN = self.scan.unfold(self._levels(truth_BCYX))[:, : rows * self.scan.grid.columns].to(device)
        if isinstance(network, PairNetwork):
            with torch.no_grad():
                source = network.encode(self._source(truth_BCYX).to(device))
            network = network.decoder
        return self._bytes(
            self.scan.fold(paint(network, self.scan, given_BPN, head=self.head, encoder_output=source, **choices))
        )

    def _seen(self, truth_BCYX: NDArray[np.uint8], rows: int) -> NDArray[np.uint8]:
        """What the model is shown of pictures: them made smaller, or grey; above it the rows that are given."""
        seen_BCYX = np.full_like(truth_BCYX, 128)
        if self.task.shrink > 1:
            seen_BCYX = downsample(truth_BCYX, self.task.shrink).repeat(self.task.shrink, 2).repeat(self.task.shrink, 3)
        seen_BCYX[:, :, :rows] = truth_BCYX[:, :, :rows]
        return self._bytes(self._levels(seen_BCYX))

    def _bytes(self, level_BCYX: Tensor) -> NDArray[np.uint8]:
        """Levels spread over 0 to 255."""
        return (level_BCYX * 255 // (self.task.levels - 1)).to(torch.uint8).cpu().numpy()

    def save(self, folder: Path) -> None:
        (folder / "pictures.json").write_text(json.dumps(self.asked | {"shape": self.shape}) + "\n")
