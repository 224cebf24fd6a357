"""Images with a class or a number, and how training images are augmented."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from everyformer.data.images import read_image
from everyformer.data.labelled import Labelled
from everyformer.network.embed import Patches
from everyformer.network.model import Model
from everyformer.task.classify_data import LabelledData, saved_classes
from everyformer.task.classify_objective import ClassifyInference, ClassifyObjective, ImageClassifierInference

if TYPE_CHECKING:
    from everyformer.task.classify import ExampleTask

CROP = 8  # a random crop moves an image by at most its size over this


class LabelledImageData(LabelledData):
    """Images, normalized to mean 0 and std 1 of the training images in each channel."""

    kind = "images"
    inputs = "image_BCYX"

    def __init__(self, task: ExampleTask, labelled: Labelled, folder: Path | None):
        super().__init__(task, labelled, folder)
        if labelled.splits:
            image_NCYX = labelled.splits["train"][0]
            assert isinstance(image_NCYX, np.ndarray)
            _, self.channels, self.height, width = image_NCYX.shape
            if self.height != width:
                raise ValueError(
                    f"the images of {self.name} have {width} x {self.height} pixels; crop or pad them to squares"
                )
            mean_C, std_C = _statistics(image_NCYX)
        else:  # it is opened for prediction alone
            saved = saved_classes(folder)
            self.channels, self.height, mean_C, std_C = (
                saved[name] for name in ("channels", "size", "pixel", "pixel_std")
            )
        self.mean_C11 = torch.tensor(mean_C, dtype=torch.float32)[:, None, None]
        self.std_C11 = torch.tensor(std_C, dtype=torch.float32)[:, None, None]
        # Mirrored digits and letters are others, and so may be the number of an image: only photographs are augmented by default.
        photographs = self.channels == 3 and self.target.task == "classify"
        augment = ("both" if photographs else "none") if task.augment == "auto" else task.augment
        self.flip = augment in ("flip", "both")
        self.shift = task.shift or (max(1, self.height // CROP) if augment in ("crop", "both") else 0)
        if self.shift >= self.height:
            raise ValueError(f"task.shift={self.shift} moves images of {self.height} pixels out of view; give less")
        if task.augment == "auto" and photographs:
            self.notes += (
                f"training images are shifted by up to {self.shift} pixels and flipped at random (task.augment=none leaves that out)",
            )

    def parts(self, head: int) -> tuple[ClassifyObjective, ClassifyInference]:
        objective = ClassifyObjective(self, head)
        return objective, ImageClassifierInference(self, objective)

    def input_settings(self) -> dict[str, Any]:
        return {"image": self.height, "channels": self.channels}

    def check_model(self, model: Model) -> None:
        embed = model.embed
        if not isinstance(embed, Patches) or embed.channels != self.channels:
            raise ValueError(
                f"{self.name} has images of {self.channels} channels, but the model's inputs are {embed}; choose vit, with "
                f"model.channels={self.channels}"
            )
        side, rest = divmod(self.height, embed.size)
        tokens, limit = side**2 + model.class_token, model.limit()
        if rest or tokens != (limit or tokens):
            raise ValueError(
                f"the images of {self.name} have {self.height} x {self.height} pixels, which patches of {embed.size} x {embed.size} "
                f"do not divide into the {limit or 'whole'} tokens of the model; set model.image={self.height}, and model.patch to "
                f"a divisor of {self.height}"
            )

    def tensors(self, split: str, row_B: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        image_BCYX = self.collate(self.examples_of(split, row_B))["image_BCYX"]
        if generator is not None and self.shift:
            image_BCYX = _random_shift(image_BCYX, self.shift, generator)
        if generator is not None and self.flip:
            flipped_B = torch.rand(len(image_BCYX), generator=generator) < 0.5
            image_BCYX = torch.where(flipped_B[:, None, None, None], image_BCYX.flip(-1), image_BCYX)
        return {"image_BCYX": image_BCYX, "label_B": self.label[split][row_B]}

    def encode(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Returns image files, or arrays of bytes Y, X or Y, X, C or C, Y, X, as bytes C, Y, X of the run's size."""
        return [self._encode(one, number) for number, one in enumerate(inputs, 1)]

    def _encode(self, one: Any, number: int) -> NDArray[np.uint8]:
        if isinstance(one, str | Path):
            return read_image(Path(one).expanduser(), "L" if self.channels == 1 else "RGB", self.height)
        array = np.asarray(one)
        if array.ndim == 2:
            array = array[None]
        elif array.ndim == 3 and array.shape[0] != self.channels:
            array = array.transpose(2, 0, 1)
        wanted = (self.channels, self.height, self.height)
        if array.shape != wanted or array.dtype != np.uint8:
            raise ValueError(
                f"input {number} is an array of {array.dtype} of the shape {np.shape(one)}; give an image file, or uint8 of the shape "
                f"{wanted}"
            )
        return array

    def collate(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        image_BCYX = torch.from_numpy(np.asarray(rows)).float()
        return {"image_BCYX": (image_BCYX - self.mean_C11) / self.std_C11}

    def saved(self) -> dict[str, Any]:
        pixel = {"pixel": self.mean_C11.flatten().tolist(), "pixel_std": self.std_C11.flatten().tolist()}
        return super().saved() | {"channels": self.channels, "size": self.height} | pixel


def _statistics(image_NCYX: NDArray[np.uint8]) -> tuple[Any, Any]:
    """Returns the mean and the standard deviation of each channel, in pieces, so that no float copy of all images is needed."""
    pieces = [image_NCYX[start : start + 4096].astype(np.float64) for start in range(0, len(image_NCYX), 4096)]
    pixels = image_NCYX.size / image_NCYX.shape[1]
    mean_C = sum(piece.sum((0, 2, 3)) for piece in pieces) / pixels
    square_C = sum((piece**2).sum((0, 2, 3)) for piece in pieces) / pixels
    return mean_C, np.sqrt(np.maximum(square_C - mean_C**2, 1e-6))


def _random_shift(image_BCYX: Tensor, largest: int, generator: torch.Generator) -> Tensor:
    """Returns each image shifted by up to `largest` pixels in each direction; its edges are replicated."""
    size = image_BCYX.shape[2]
    offset_B2 = torch.randint(0, 2 * largest + 1, (len(image_BCYX), 2), generator=generator).tolist()
    padded_BCYX = F.pad(image_BCYX, (largest,) * 4, mode="replicate")
    return torch.stack(
        [image[:, y : y + size, x : x + size] for image, (y, x) in zip(padded_BCYX, offset_B2, strict=True)]
    )
