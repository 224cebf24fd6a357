"""Images in a row: the class of an image whose pixels are read one by one, row by row, in ten grays (sequential MNIST: Le et al. 2015).

    pixels("mnist").examples("test", seed=0, indices=[0], length=196)        # images of 14 x 14 pixels: [("    .#@~ ...=", "7")]

The length is the number of pixels of an image, a square; larger images are reduced by an integer factor. Training draws images at
random; those of the other splits come in their order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from everyformer.data.images import downsample, open_labelled_images
from everyformer.data.labelled import Labelled
from everyformer.data.problems import SPLITS, Pieces, Problem

GRAYS = " .:-~+*#%@"  # from black to white
CLASSES = "0123456789abcdefghijklmnopqrstuvwxyz"
HELD_OUT = 0.1  # share of the training images, if there is no validation split


def pixels(data: str | None) -> PixelProblem:
    """Opens images as `--task classify` does: mnist, a folder of images, or None for the embedded shapes."""
    labelled = open_labelled_images(data, HELD_OUT)
    classes, (_, _, rows, columns) = len(labelled.classes), np.asarray(labelled.splits["train"][0]).shape
    if classes > len(CLASSES) or rows != columns:
        raise ValueError(
            f"{labelled.name} has {classes} classes and images of {columns} x {rows} pixels; give at most {len(CLASSES)} classes, and "
            "square images"
        )
    about = f"the classes {', '.join(map(str, labelled.classes))} of images that are read pixel by pixel"
    return PixelProblem(
        labelled.name, about, None, CLASSES[:classes], GRAYS, rows**2, (rows**2,), 1, answer_length=1, fixed=True,
        splits=tuple(split for split in SPLITS if split in labelled.splits), labelled=labelled,
    )  # fmt: skip


@dataclass(frozen=True)
class PixelProblem(Problem):
    """The class of an image."""

    labelled: Labelled | None = None

    @property
    def side(self) -> int:
        return math.isqrt(self.length)

    def check(self, length: int) -> None:
        side = math.isqrt(length)
        if side**2 != length or self.side % side:
            sizes = ", ".join(str(one**2) for one in range(4, self.side + 1) if self.side % one == 0)
            raise ValueError(f"the images of {self.name} cannot have {length} pixels; give one of the lengths {sizes}")

    def example(self, random: RandomState, split: str, numbers: tuple[int, ...], length: int) -> Pieces:
        assert self.labelled is not None
        images, label_N = self.labelled.splits[split]
        random.seed(numbers)
        row = random.randint(len(images)) if split == "train" else numbers[1] % len(images)
        image_YX = downsample(np.asarray(images[row : row + 1]), self.side // math.isqrt(length)).mean((0, 1))
        return _as_text(image_YX) + "=", CLASSES[int(label_N[row])]


def _as_text(image_YX: NDArray[np.float64]) -> str:
    return "".join(GRAYS[int(gray)] for gray in image_YX.flatten() * len(GRAYS) // 256)
