"""Opens images, with or without labels: MNIST's idx files, a folder of image files, records with their paths, or generated shapes.

Also saves image grids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everyformer.data import synthetic
from everyformer.data.datasets import dataset_files, dataset_name
from everyformer.data.files import existing_path, list_files, memory_map, split_from_name, uncompressed_name
from everyformer.data.labelled import Labelled, class_files, hold_out, make_labelled, splits_fingerprint
from everyformer.data.labelled_records import Columns, Examples, find_file, labelled_tables, open_table, read_labelled
from everyformer.data.records import is_records

Files = dict[str, list[tuple[Path, Any]]]  # image files and their labels, by split
GRAY = ("1", "L", "I;16", "I", "LA")
EXTENSIONS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def has_images(path: Path) -> bool:
    """Returns whether `path` is a folder that holds images, or an image."""
    if path.is_file():
        return is_image(path)
    return any(is_image(one) or "idx3" in one.name for one in list_files(path))


def is_image(path: Path) -> bool:
    """Returns whether the file's name is that of an image."""
    return path.suffix.lower() in EXTENSIONS


@dataclass(frozen=True)
class ImageSize:
    """How images get their size. They are cropped to their central square and resized."""

    all: int | None = None  # pixels of a side of all images
    mixed: int | None = None  # of images that are not squares of one size; None: those that differ are refused


def open_labelled_images(
    data: str | None, valid: float, columns: Columns = Columns(), size: ImageSize = ImageSize()
) -> Labelled:
    """Opens images with their labels, as bytes of shape N, C, Y, X."""

    def files_by_split(path: Path) -> Files:
        if not path.is_file():
            tables = labelled_tables(path, "images", columns)
            return _files_of_records(tables, columns, path) if tables else class_files(path)
        if not is_records(path):
            raise ValueError(
                f"{path} is a file; give the folder with the images, or a table with their paths and labels"
            )
        return _files_of_records({"train": [open_table(path, "images", columns)]}, columns, path.parent)

    name, examples, notes = _open(data, files_by_split, size, columns.numbers)
    examples = {split: (_resize(images, size.all, name), labels) for split, (images, labels) in examples.items()}
    labelled = make_labelled(name, examples, valid, columns.numbers)
    return replace(labelled, notes=(*notes, *labelled.notes))


def _files_of_records(tables: Any, columns: Columns, folder: Path) -> Files:
    """Returns image files and labels of records with paths, which are relative to the folder."""
    found = read_labelled(tables, "images", columns, partial(find_file, folder))
    return {split: list(zip(paths, labels, strict=True)) for split, (paths, labels) in found.examples.items()}


@dataclass(frozen=True)
class Images:
    """Images without classes by split, as bytes of shape N, C, Y, X."""

    name: str
    splits: dict[str, NDArray[np.uint8]]
    fingerprint: str


def open_unlabelled_images(data: str | None, valid: float, size: int | None = None) -> Images:
    """Opens images without their classes; of a folder, all images in it. With `size` they become squares of so many pixels."""
    name, examples, _ = _open(data, _images_by_split, ImageSize(size))
    splits = {split: _resize(images, size, name) for split, (images, _) in examples.items()}
    if len(splits["train"]) < 2:
        raise ValueError(f"{name} has {len(splits['train'])} training image; give at least 2")
    if "valid" not in splits:
        train, held_out = hold_out(len(splits["train"]), valid)
        splits["train"], splits["valid"] = splits["train"][train], splits["train"][held_out]
    no_labels = np.empty(0, np.int64)
    return Images(name, splits, splits_fingerprint({split: (images, no_labels) for split, images in splits.items()}))


def _open(
    data: str | None, files_by_split: Callable[[Path], Files], size: ImageSize, numbers: bool = False
) -> tuple[str, dict[str, Examples], tuple[str, ...]]:
    """Returns a name, images with labels by split, and notes; `files_by_split` returns the files of a path with their labels."""
    name = dataset_name(data)
    if name not in (None, "mnist"):
        raise ValueError(f"{name} does not hold images; give mnist, or a folder of images")
    if data is None:
        return "the embedded shapes", synthetic.shapes(numbers=numbers), ()
    if data == "-":
        raise ValueError("images cannot be read from standard input; give a folder")
    if name == "mnist":
        return name, _read_idx_files(list(dataset_files(name, data).values()), "mnist"), ()
    path = existing_path(data)
    idx = [file for file in list_files(path) if "idx" in uncompressed_name(file)] if path.is_dir() else []
    if idx:
        return str(path), _read_idx_files(idx, str(path)), ()
    return str(path), *_read_images(files_by_split(path), size, str(path))


def _images_by_split(path: Path) -> Files:
    """Returns the images of a folder and its subfolders; those below train/, valid/ or test/ belong to that split."""
    if path.is_file():
        raise ValueError(f"{path} is a file; give the folder with the images")
    files: Files = {}
    for file in list_files(path):
        parts = file.relative_to(path).parts
        split = split_from_name(Path(parts[0])) if len(parts) > 1 else None
        if is_image(file):
            files.setdefault(split or "train", []).append((file, ""))
    if "train" not in files:
        raise ValueError(f"{path} has no training images; give a folder with {', '.join(EXTENSIONS)} files")
    return files


def downsample(image_NCYX: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    """Replaces each square of `factor` x `factor` pixels by its mean."""
    *_, rows, columns = image_NCYX.shape
    sums = image_NCYX.reshape(*image_NCYX.shape[:2], rows // factor, factor, columns // factor, factor).sum(
        (3, 5), dtype=np.uint32
    )
    return ((sums + factor**2 // 2) // factor**2).astype(np.uint8)


def _resize(image_NCYX: NDArray[np.uint8], size: int | None, name: str) -> NDArray[np.uint8]:
    *_, rows, columns = image_NCYX.shape
    if size is None or (rows, columns) == (size, size):
        return image_NCYX
    if rows != columns or rows % size:
        raise ValueError(
            f"the images of {name} have {columns} x {rows} pixels and can only be reduced by an integer factor; give a size that "
            f"divides {rows}"
        )
    return downsample(image_NCYX, rows // size)


def save_image_grid(rows: Sequence[NDArray[np.uint8]], path: Path, target: int = 84) -> None:
    """Saves rows of images N, C, Y, X as one image. Each is enlarged by an integer factor, to at most `target` pixels a side."""
    image = import_pillow()
    _, channels, height, width = rows[0].shape
    zoom, gap = max(1, target // max(height, width)), 4
    tall, wide = height * zoom + gap, width * zoom + gap
    grid = np.full((len(rows) * tall + gap, max(map(len, rows)) * wide + gap, channels), 255, dtype=np.uint8)
    for y, row in enumerate(rows):
        for x, one_CYX in enumerate(row):
            enlarged = one_CYX.transpose(1, 2, 0).repeat(zoom, 0).repeat(zoom, 1)
            top, left = gap + y * tall, gap + x * wide
            grid[top : top + height * zoom, left : left + width * zoom] = enlarged
    image.fromarray(grid[..., 0] if channels == 1 else grid).save(path)


def import_pillow() -> Any:
    """Imports PIL.Image. Raises ValueError, with the command that installs it, if Pillow is missing."""
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("image files need Pillow; install it with pip install 'everyformer[image]'") from None
    return Image


def _read_idx_files(files: list[Path], name: str) -> dict[str, Examples]:
    """Returns images and labels by split, from files with "images" or "labels" in their names."""
    arrays: dict[str, dict[str, NDArray[np.uint8]]] = {}
    for path in files:
        split = "train" if "train" in path.name else "test"
        kind = "images" if "images" in path.name else "labels"
        arrays.setdefault(split, {})[kind] = _read_idx(path)
    examples: dict[str, Examples] = {}
    for split, pair in arrays.items():
        if set(pair) != {"images", "labels"} or len(pair["images"]) != len(pair["labels"]):
            sizes = ", ".join(f"{len(array)} {kind}" for kind, array in sorted(pair.items()))
            raise ValueError(f"{name} has {sizes} for {split}; give as many labels as images, in two idx files")
        image_NYX = pair["images"]
        examples[split] = image_NYX[:, None], pair["labels"].tolist()
    if "train" not in examples:
        raise ValueError(f"{name} has no training files; give idx files with train in their names")
    return examples


def _read_idx(path: Path) -> NDArray[np.uint8]:
    """Reads LeCun's idx format: two zero bytes, the type (8: bytes), the number of axes, their sizes, and the data."""
    raw = memory_map(path)
    axes = int(raw[3]) if len(raw) > 4 else 0
    sizes = np.frombuffer(raw[4 : 4 + 4 * axes].tobytes(), ">i4").tolist() if len(raw) >= 4 + 4 * axes else []
    fits = axes and tuple(raw[:3]) == (0, 0, 8) and len(raw) == 4 + 4 * axes + int(np.prod(sizes))
    if not fits:
        raise ValueError(f"{path} is not a complete idx file of bytes; get it again")
    return np.array(raw[4 + 4 * axes :]).reshape(sizes)


def _read_images(files: Files, size: ImageSize, name: str) -> tuple[dict[str, Examples], tuple[str, ...]]:
    """Reads image files, all in one size and color mode: grayscale if all are, else RGB. Returns examples by split, and notes."""
    image, modes, sizes = import_pillow(), set[str](), dict[tuple[int, int], Path]()
    train_first = sorted(files, key=lambda split: split != "train")
    for path in (path for split in train_first for path, _ in files[split]):
        with _opened(image, path) as opened:
            modes.add(opened.mode)
            sizes.setdefault(opened.size, path)
    side, notes = size.all, tuple[str, ...]()
    if side is None and (len(sizes) > 1 or (size.mixed and any(x != y for x, y in sizes))):
        (first, _), (other, path) = [*sizes.items(), *sizes.items()][:2]
        if size.mixed is None:
            raise ValueError(
                f"{path} has {other[0]} x {other[1]} pixels, but the images before it have {first[0]} x {first[1]}; resize all images "
                "to one size, or set task.size"
            )
        side = size.mixed
        what = "different sizes" if len(sizes) > 1 else f"{first[0]} x {first[1]} pixels"
        notes = (
            f"the images of {name} have {what}: they are cropped to squares and resized to {side} x {side} pixels (task.size sets "
            "another size)",
        )
    mode = "L" if modes <= set(GRAY) else "RGB"
    return {
        split: (np.stack([read_image(path, mode, side) for path, _ in rows]), [label for _, label in rows])
        for split, rows in files.items()
    }, notes


def read_image(path: Path, mode: str, size: int | None) -> NDArray[np.uint8]:
    """Returns an image file as bytes C, Y, X, in the color mode L (grayscale) or RGB, and if `size` is given as a square."""
    with _opened(import_pillow(), path) as opened:
        try:
            array = np.asarray(_center_crop(opened.convert(mode), size), dtype=np.uint8)
        except (OSError, SyntaxError, ValueError) as error:
            raise _unreadable(path, error) from None
    return array[None] if mode == "L" else array.transpose(2, 0, 1)


def _opened(image: Any, path: Path) -> Any:
    try:
        return image.open(path)
    except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} cannot be read as an image ({error}); repair it or remove it")


def _center_crop(image: Any, size: int | None) -> Any:
    """Crops an image to its central square and resizes that to `size` x `size` pixels."""
    if size is None:
        return image
    side = min(image.size)
    left, top = ((length - side) // 2 for length in image.size)
    return image.resize((size, size), box=(left, top, left + side, top + side))
