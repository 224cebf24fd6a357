"""Images: MNIST's idx files, or a folder of images; else generated shapes. With classes, one subfolder each, or without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everyformer.data import made
from everyformer.data.files import existing, files_in, mapped, plain_name, split_of
from everyformer.data.labelled import Labelled, Part, class_files, hold_out, labelled, mark
from everyformer.data.named import find, name_of

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def has_images(path: Path) -> bool:
    """Is this a folder of images?"""
    return path.is_dir() and any(one.suffix.lower() in IMAGES or "idx3" in one.name for one in files_in(path))


def open_images(data: str | None, valid: float) -> Labelled:
    """Images as bytes N, C, Y, X, with their classes."""
    name, parts = _open(data, class_files, None)
    return labelled(name, parts, valid)


@dataclass(frozen=True)
class Pictures:
    """Images as bytes N, C, Y, X by split, without classes."""

    name: str
    splits: dict[str, NDArray[np.uint8]]
    fingerprint: str


def open_pictures(data: str | None, valid: float, size: int | None = None) -> Pictures:
    """Images from the same places; of a folder all that there are. With a size they become squares of so many points."""
    name, parts = _open(data, _by_split, size)
    splits = {split: _resized(images, size, name) for split, (images, _) in parts.items()}
    if len(splits["train"]) < 2:
        raise ValueError(f"{name} has {len(splits['train'])} picture to learn from; give at least 2")
    if "valid" not in splits:
        kept, held = hold_out(len(splits["train"]), valid)
        splits["train"], splits["valid"] = splits["train"][kept], splits["train"][held]
    none = np.empty(0, np.int64)
    return Pictures(name, splits, mark({split: (images, none) for split, images in splits.items()}))


def _open(
    data: str | None, by_split: Callable[[Path], dict[str, list[tuple[Path, str]]]], size: int | None
) -> tuple[str, dict[str, Part]]:
    """A name, and images with their labels by split; `by_split` tells which files of a folder belong to which."""
    name = name_of(data)
    if name not in (None, "mnist"):
        raise ValueError(f"{name} does not hold images; give mnist, or a folder of images")
    if data is None:
        return "the embedded shapes", made.shapes()
    if data == "-":
        raise ValueError("images cannot come from standard input; give a folder")
    if name == "mnist":
        return name, _idx_files(list(find(name, data).values()), "mnist")
    path = existing(data)
    if path.is_file():
        raise ValueError(f"{path} is a file; give the folder with the images")
    idx = [one for one in files_in(path) if "idx" in plain_name(one)]
    if idx:
        return str(path), _idx_files(idx, str(path))
    return str(path), {split: _folder(rows, size) for split, rows in by_split(path).items()}


def _by_split(path: Path) -> dict[str, list[tuple[Path, str]]]:
    """The images of a folder and of those in it; those below train/, valid/ or test/ are of that split."""
    found: dict[str, list[tuple[Path, str]]] = {}
    for file in files_in(path):
        parts = file.relative_to(path).parts
        split = split_of(Path(parts[0])) if len(parts) > 1 else None
        if file.suffix.lower() in IMAGES:
            found.setdefault(split or "train", []).append((file, ""))
    if "train" not in found:
        raise ValueError(f"{path} has no images to learn from; give a folder with {', '.join(IMAGES)} files")
    return found


def shrunk(image_NCYX: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    """Images with one point for each square of `factor` x `factor`: their mean."""
    *_, rows, columns = image_NCYX.shape
    sums = image_NCYX.reshape(*image_NCYX.shape[:2], rows // factor, factor, columns // factor, factor).sum(
        (3, 5), dtype=np.uint32
    )
    return ((sums + factor**2 // 2) // factor**2).astype(np.uint8)


def _resized(image_NCYX: NDArray[np.uint8], size: int | None, name: str) -> NDArray[np.uint8]:
    *_, rows, columns = image_NCYX.shape
    if size is None or (rows, columns) == (size, size):
        return image_NCYX
    if rows != columns or rows % size:
        raise ValueError(
            f"the images of {name} have {columns} x {rows} points and are only made smaller by whole steps; give a size that "
            f"divides {rows}"
        )
    return shrunk(image_NCYX, rows // size)


def save_sheet(rows: Sequence[NDArray[np.uint8]], path: Path, points: int = 84) -> None:
    """Rows of images N, C, Y, X as one picture, each image about as large as `points`, with its own points as squares."""
    image = pillow()
    _, channels, height, width = rows[0].shape
    zoom, gap = max(1, points // max(height, width)), 4
    tall, wide = height * zoom + gap, width * zoom + gap
    sheet = np.full((len(rows) * tall + gap, max(map(len, rows)) * wide + gap, channels), 255, dtype=np.uint8)
    for y, row in enumerate(rows):
        for x, one_CYX in enumerate(row):
            large = one_CYX.transpose(1, 2, 0).repeat(zoom, 0).repeat(zoom, 1)
            top, left = gap + y * tall, gap + x * wide
            sheet[top : top + height * zoom, left : left + width * zoom] = large
    image.fromarray(sheet[..., 0] if channels == 1 else sheet).save(path)


def pillow() -> Any:
    """Pillow's module of images."""
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("image files need Pillow; install it with pip install 'everyformer[image]'") from None
    return Image


def _idx_files(files: list[Path], name: str) -> dict[str, Part]:
    """Images and labels by split, from files with "images" or "labels" in their names."""
    found: dict[str, dict[str, NDArray[np.uint8]]] = {}
    for path in files:
        split = "train" if "train" in path.name else "test"
        kind = "images" if "images" in path.name else "labels"
        found.setdefault(split, {})[kind] = _idx(path)
    parts: dict[str, Part] = {}
    for split, pair in found.items():
        if set(pair) != {"images", "labels"} or len(pair["images"]) != len(pair["labels"]):
            sizes = ", ".join(f"{len(array)} {kind}" for kind, array in sorted(pair.items()))
            raise ValueError(f"{name} has {sizes} for {split}; give as many labels as images, in two idx files")
        image_NYX = pair["images"]
        parts[split] = image_NYX[:, None], pair["labels"].tolist()
    if "train" not in parts:
        raise ValueError(f"{name} has no idx files for training; give files with train in their names")
    return parts


def _idx(path: Path) -> NDArray[np.uint8]:
    """LeCun's format: two zeros, the type (8: bytes), the number of axes, their sizes, and the numbers."""
    raw = mapped(path)
    axes = int(raw[3]) if len(raw) > 4 else 0
    sizes = np.frombuffer(raw[4 : 4 + 4 * axes].tobytes(), ">i4").tolist() if len(raw) >= 4 + 4 * axes else []
    fits = axes and tuple(raw[:3]) == (0, 0, 8) and len(raw) == 4 + 4 * axes + int(np.prod(sizes))
    if not fits:
        raise ValueError(f"{path} is not a whole idx file of bytes; get it again")
    return np.array(raw[4 + 4 * axes :]).reshape(sizes)


def _folder(rows: list[tuple[Path, str]], size: int | None) -> Part:
    image, images, mode = pillow(), list[NDArray[np.uint8]](), ""
    for path, _ in rows:
        try:
            with image.open(path) as opened:
                mode = mode or ("L" if opened.mode in ("1", "L", "I;16", "I") else "RGB")
                array = np.asarray(_square(opened.convert(mode), size), dtype=np.uint8)
        except OSError as error:
            raise ValueError(f"{path} cannot be read as an image ({error}); mend it or take it out") from None
        image_CYX = array[None] if mode == "L" else array.transpose(2, 0, 1)
        if images and image_CYX.shape != images[0].shape:
            raise ValueError(
                f"{path} has {image_CYX.shape[2]} x {image_CYX.shape[1]} points, others {images[0].shape[2]} x "
                f"{images[0].shape[1]}; resize all images to one size"
            )
        images.append(image_CYX)
    return np.stack(images), [name for _, name in rows]


def _square(image: Any, size: int | None) -> Any:
    """The middle of an image as a square of `size` points."""
    if size is None:
        return image
    side = min(image.size)
    left, top = ((length - side) // 2 for length in image.size)
    return image.resize((size, size), box=(left, top, left + side, top + side))
