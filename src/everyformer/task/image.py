"""Image generation: predict the next channel of an image. Paper: Parmar et al. 2018.

The order of generation is that of the model's grid. The metric is bits per dimension, the mean of -log2 p over all channels of
all pixels; with fewer than 256 levels it is a smaller number and not comparable. An image can be completed from its upper rows;
with `shrink` the model's encoder reads a smaller version of the image (super-resolution).
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

from everyformer.data.files import fingerprint, read_json
from everyformer.data.images import Images, downsample, import_pillow, open_unlabelled_images, save_image_grid
from everyformer.infer.estimate import Estimate, Progress
from everyformer.infer.generate_images import ImageSequence, generate_images
from everyformer.network.embed import Features, Tokens
from everyformer.network.grid import Grid
from everyformer.network.linear_cross_entropy import cross_entropy
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Language, Logistics
from everyformer.task.batch import Batch, epoch_rows
from everyformer.task.check import check_split, head_index
from everyformer.task.probe_input import ImageCells, ProbeInput, check_index, refuse_text
from everyformer.task.task import FittedTask, Inference, Objective, Task, TaskData
from everyformer.value import Share, Size, Value

MAX_STEPS = 1 << 16  # of an image
EVALUATION_STEPS = 1 << 16  # in one call
COLUMNS = 8  # images in a row of a sheet that shows several versions of each


class Image(Task, Value, frozen=True):
    """Generate images."""

    levels: Annotated[int, Meta(ge=2, le=256)] = 256  # values of a channel; fewer are learned faster
    size: Size | None = None  # crop the images to squares of this many pixels
    shrink: Size = 1  # the encoder reads the image smaller by this factor: 2 or 4 for super-resolution; 1: no encoder
    valid: Share = 0.1  # share of the training images held out for validation, if the data have no such split

    def open(self, data: str | None, folder: Path | None = None) -> ImageData:
        return ImageData(self, data, folder)

    def open_for_inference(self, data: str | None, folder: Path) -> ImageData:
        return self.open(data, folder)  # the images are read only to be completed or enlarged


class ImageData(TaskData):
    """Images as sequences of steps."""

    layout: ImageSequence
    small_layout: ImageSequence  # of the smaller image that the encoder reads

    def __init__(self, task: Image, data: str | None, folder: Path | None):
        self.task, self.data, self.name = task, data, data or "the embedded shapes"
        # A run's folder has the shape of its images, so that new images can be generated without reading the data.
        self.key: dict[str, Any] = {"data": data, "size": task.size}
        saved = (None if folder is None else read_json(folder / "images.json")) or {}
        fits = {name: saved.get(name) for name in self.key} == self.key
        self.shape = tuple(saved["shape"] if saved and fits else self.images.splits["train"].shape[1:])
        self.channels, self.rows, self.columns = self.shape
        if self.dimensions > MAX_STEPS:
            raise ValueError(
                f"the images of {self.name} have {self.columns} x {self.rows} pixels, which is {self.dimensions:,} steps; "
                "make them smaller with task.size=32"
            )
        for name, length in (("rows", self.rows), ("columns", self.columns)):
            if length % task.shrink:
                raise ValueError(
                    f"task.shrink={task.shrink} does not divide the {length} {name} of {self.name}; give a divisor, or "
                    "another task.size"
                )

    @cached_property
    def images(self) -> Images:
        return open_unlabelled_images(self.data, self.task.valid, self.task.size)

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        return self.images.fingerprint

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        return {split: fingerprint(image_NCYX) for split, image_NCYX in self.images.splits.items()}

    @property
    def dimensions(self) -> int:
        """The number of channels of all pixels of an image."""
        return self.rows * self.columns * self.channels

    def member_settings(self) -> dict[str, Any]:
        sizes = {"rows": self.rows, "columns": self.columns, "channels": self.channels, "downsample": self.task.shrink}
        tokens = {"vocabulary": self.channels * self.task.levels + 1, "context": self.dimensions}
        return sizes | tokens | {"levels": self.task.levels}

    def fit(self, model: Model | EncoderDecoder) -> FittedTask:
        shrink, has_encoder = self.task.shrink, isinstance(model, EncoderDecoder)
        if has_encoder != (shrink > 1):
            raise ValueError(
                f"task.shrink={shrink} does not fit a model {'with' if has_encoder else 'without'} an encoder: an encoder "
                "reads the image made smaller by 2 or more; choose image-transformer and set task.shrink alone"
            )
        decoder = model.decoder if isinstance(model, EncoderDecoder) else model
        mixture = next((head for head in decoder.outputs if isinstance(head, Logistics)), None)
        joint = mixture is not None
        index = head_index(decoder, Logistics if joint else Language, "image")
        columns = self.columns if joint else self.columns * self.channels
        raster = Grid(self.rows, columns)
        grid = decoder.position if isinstance(decoder.position, Grid) else raster
        self.layout = ImageSequence(self.channels, self.task.levels, grid, joint)
        small = Grid(self.rows // shrink, columns // shrink)
        self.small_layout = ImageSequence(self.channels, self.task.levels, small, joint)
        if (grid.rows, grid.columns) != (raster.rows, raster.columns):
            raise ValueError(
                f"the images of {self.name} are {raster.rows} rows of {columns} steps, the model's {grid.rows} of "
                f"{grid.columns}; leave model.rows, model.columns and model.channels to the data"
            )
        sides = [(model, self.layout)]
        if isinstance(model, EncoderDecoder):
            sides = [(model.encoder, self.small_layout), (model.decoder, self.layout)]
        for side, layout in sides:
            self._check_inputs(side, layout)
        self._check_head(decoder.outputs[index], joint)
        objective = ImageObjective(self, index, mixture)
        return FittedTask(self, objective, ImageInference(self, index))

    def _check_head(self, head: Any, joint: bool) -> None:
        if joint and (head.channels, head.levels) != (self.channels, self.task.levels):
            raise ValueError(
                f"the model predicts {head.channels} channels of {head.levels} levels, the images have {self.channels} of "
                f"{self.task.levels}; leave model.channels and model.levels to the data"
            )
        if not joint and head.vocabulary is not None and head.vocabulary < self.task.levels:
            raise ValueError(
                f"the model predicts {head.vocabulary} levels, the images have {self.task.levels}; set task.levels alone"
            )

    def _check_inputs(self, side: Any, layout: ImageSequence) -> None:
        limit = side.limit()
        if limit is not None and limit < layout.length:
            raise ValueError(
                f"an image of {self.name} has {layout.length} steps, but the model has {limit} positions; give it more"
            )
        if not layout.joint:
            tokens, embed = self.channels * self.task.levels + 1, side.embed
            if not isinstance(embed, Tokens) or embed.vocabulary < tokens:
                raise ValueError(
                    f"{self.channels} channels of {self.task.levels} levels and a start token are {tokens} tokens, but the model's "
                    f"inputs are {embed}; set task.levels alone, or give it Tokens({tokens})"
                )
        elif not isinstance(side.embed, Features) or side.embed.inputs != self.channels:
            raise ValueError(
                f"a mixture of logistics reads pixels of {self.channels} channels, but the model's inputs are {side.embed}; "
                f"give it Features({self.channels})"
            )

    def examples(self) -> int:
        return len(self.images.splits["train"])

    def batch(self, step: int, size: int, seed: int) -> Batch:
        return self.batch_of("train", epoch_rows(self.examples(), step * size, size, seed))

    def batch_of(self, split: str, row_B: Tensor) -> Batch:
        image_BCYX = self.images.splits[split][row_B.numpy()]
        step_BPN = self.layout.flatten(self.quantize(image_BCYX))
        tensors = {"step_BPN": step_BPN, "input": self.layout.encode_from_start(step_BPN[:, :-1])}
        return Batch(tensors | ({"source": self.encoder_input(image_BCYX)} if self.task.shrink > 1 else {}))

    def arguments(self, batch: Batch) -> tuple[Tensor, ...]:
        """Returns the network's inputs."""
        return (batch["source"], batch["input"]) if self.task.shrink > 1 else (batch["input"],)

    def quantize(self, image_BCYX: NDArray[np.uint8]) -> Tensor:
        """Returns the levels of bytes."""
        return torch.from_numpy(image_BCYX).long() * self.task.levels // 256

    def to_bytes(self, level_BCYX: Tensor) -> NDArray[np.uint8]:
        """Returns levels spread over 0 to 255."""
        return (level_BCYX * 255 // (self.task.levels - 1)).to(torch.uint8).cpu().numpy()

    def encoder_input(self, image_BCYX: NDArray[np.uint8]) -> Tensor:
        """Returns the smaller images as the encoder reads them."""
        small_BCYX = downsample(image_BCYX, self.task.shrink)
        return self.small_layout.encode(self.small_layout.flatten(self.quantize(small_BCYX)), 0)

    def count(self, batch: Batch) -> int:
        return batch["step_BPN"].numel()

    def save(self, folder: Path) -> None:
        (folder / "images.json").write_text(json.dumps(self.key | {"shape": self.shape}) + "\n")


class ImageObjective(Objective):
    """-log p of every channel. `mixture` is the output head if it is a mixture of logistics."""

    metric = "bits_per_dimension"

    def __init__(self, data: ImageData, head: int, mixture: Logistics | None):
        self.data, self.head, self.mixture = data, head, mixture

    def forward(self, network: Any, batch: Batch, kernel: str) -> tuple[Any, Tensor]:
        """Returns the network's output, and the sum of -log p over the channels of each image."""
        output = network(*self.data.arguments(batch), kernel=kernel)
        logits, step_BPN = output.logits_of(self.head).float(), batch["step_BPN"]
        if self.mixture is not None:
            return output, -self.mixture.log_share(logits, step_BPN).flatten(1).sum(1)
        loss_N = F.cross_entropy(logits.flatten(0, 1), step_BPN.flatten(), reduction="none")
        return output, loss_N.view(len(step_BPN), -1).sum(1)

    def loss(self, network: Network | PairNetwork, batch: Batch, kernel: str) -> Tensor:
        if self.mixture is not None:
            output, total_B = self.forward(network, batch, kernel)
            total = total_B.sum()
        else:
            output = network(*self.data.arguments(batch), kernel=kernel, probe=self.probe())
            total = cross_entropy(output.logits_of(self.head), batch["step_BPN"])
        return total + sum(output.aux.values()) * self.data.count(batch)

    @property
    def targets_per_example(self) -> float:  # type: ignore[override]
        return self.data.dimensions

    @torch.no_grad()
    def evaluate(
        self,
        network: Network | PairNetwork,
        split: str,
        limit: int | None,
        kernel: str,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        data, device, estimate = self.data, next(network.parameters()).device, Estimate(progress)
        check_split(split, data.images.splits, data.name)
        available = len(data.images.splits[split])
        count = available if limit is None else min(limit, available)
        estimate.expect(count * data.dimensions)
        row_N = torch.arange(count) * available // count  # spread over the split
        for row_B in row_N.split(max(1, EVALUATION_STEPS // data.layout.length)):
            _, total_B = self.forward(network, data.batch_of(split, row_B).to(device), kernel)
            estimate.add(total_B, data.dimensions)
        return {
            "bits_per_dimension": estimate.mean / math.log(2),
            "low": estimate.low / math.log(2),
            "high": estimate.high / math.log(2),
            "loss": estimate.mean,
            "split": split,
            "images": count,
            "targets": estimate.scored,
            "targets_in_split": available * data.dimensions,
            "levels": data.task.levels,
        }


class ImageInference(Inference):
    can_generate = generates_images = True
    example = "--out samples.png"

    def __init__(self, data: ImageData, head: int):
        self.data, self.head = data, head

    def _probe_input(self, network: Network | PairNetwork, text: str | None, example: int | None) -> ProbeInput:
        """A validation image. Position p reads step p - 1; the position of interest predicts the middle of the image."""
        refuse_text(text, "images")
        data = self.data
        row = check_index(example or 0, len(data.images.splits["valid"]), f"validation images of {data.name}")
        inputs = data.arguments(data.batch_of("valid", torch.tensor([row])).to(next(network.parameters()).device))
        row_P, column_P = data.layout.grid.cells(torch.arange(data.layout.length))
        cell_P2 = torch.stack((row_P, column_P if data.layout.joint else column_P // data.channels), dim=1)
        middle = (cell_P2 == torch.tensor([data.rows // 2, data.columns // 2])).all(1).nonzero()[0].item()
        read_P2 = torch.cat((torch.full((1, 2), -1), cell_P2[:-1]))
        pixel_CYX = torch.from_numpy(data.images.splits["valid"][row]).float() / 255
        labels = ["start" if y < 0 else f"{y},{x}" for y, x in read_P2.tolist()]
        image = ImageCells(pixel_CYX, read_P2, 1, int(middle))
        return ProbeInput(inputs, labels, image=image)

    def generate_images(
        self, network: Network | PairNetwork, file: Path, images: int = 16, given: float = 0.0, **sampling: Any
    ) -> str:
        """Write a sheet of new images; if a part of each is given, rows of the given part, the completed and the true image."""
        data = self.data
        if file.suffix != ".png" or not file.parent.is_dir():
            raise ValueError(f"cannot write images to {file}; give a .png file in a folder that exists")
        if images < 1 or not 0 <= given < 1:
            raise ValueError(
                f"images is {images} and given is {given}: give 1 image or more, and a share of 0 or more, below 1"
            )
        import_pillow()
        height, shrink = (data.layout.grid.block or (1, 1))[0], data.task.shrink
        rows = int(given * data.rows) // height * height  # whole blocks: they come first in the order of generation
        if given and not rows:
            raise ValueError(f"--given {given} is less than one block of {height} rows of {data.rows}; give more")
        if shrink == 1 and rows == 0:
            empty = np.zeros((images, data.channels, data.rows, data.columns), dtype=np.uint8)
            made_BCYX, across = self._complete(network, empty, 0, **sampling), math.ceil(math.sqrt(images))
            save_image_grid([made_BCYX[start : start + across] for start in range(0, images, across)], file)
            return f"{images} images: {file}"
        true_BCYX = data.images.splits["valid"][:images]
        made_BCYX = self._complete(network, true_BCYX, rows, **sampling)
        versions = (self._given_part(true_BCYX, rows), made_BCYX, data.to_bytes(data.quantize(true_BCYX)))
        starts = range(0, len(true_BCYX), COLUMNS)
        save_image_grid([version[start : start + COLUMNS] for start in starts for version in versions], file)
        parts = [f"{rows} of {data.rows} rows"] * (rows > 0) + [f"an image {shrink} times smaller"] * (shrink > 1)
        return f"{len(true_BCYX)} images (given {' and '.join(parts)}, generated, true): {file}"

    def _complete(
        self, network: Network | PairNetwork, true_BCYX: NDArray[np.uint8], rows: int, **sampling: Any
    ) -> NDArray[np.uint8]:
        """Returns images generated from the first rows of the true ones, and from the smaller images if there is an encoder."""
        data, device, encoder_output = self.data, next(network.parameters()).device, None
        prefix_BPN = data.layout.flatten(data.quantize(true_BCYX))[:, : rows * data.layout.grid.columns].to(device)
        if isinstance(network, PairNetwork):
            with torch.no_grad():
                encoder_output = network.encode(data.encoder_input(true_BCYX).to(device))
            network = network.decoder
        step_BPN = generate_images(
            network, data.layout, prefix_BPN, head=self.head, encoder_output=encoder_output, **sampling
        )
        return data.to_bytes(data.layout.unflatten(step_BPN))

    def _given_part(self, true_BCYX: NDArray[np.uint8], rows: int) -> NDArray[np.uint8]:
        """Returns what the model reads of the images: the smaller image, or grey, and above it the given rows."""
        data = self.data
        given_BCYX = np.full_like(true_BCYX, 128)
        if data.task.shrink > 1:
            given_BCYX = downsample(true_BCYX, data.task.shrink).repeat(data.task.shrink, 2).repeat(data.task.shrink, 3)
        given_BCYX[:, :, :rows] = true_BCYX[:, :, :rows]
        return data.to_bytes(data.quantize(given_BCYX))
