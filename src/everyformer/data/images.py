"""Images with classes: MNIST's idx files, or a folder of images with one subfolder per class; else generated shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from everyformer.data import made
from everyformer.data.files import existing, files_in, mapped, plain_name
from everyformer.data.labelled import Labelled, Part, class_files, labelled, mark
from everyformer.data.named import find, name_of

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def has_images(path: Path) -> bool:
    """Is this a folder of images?"""
    return path.is_dir() and any(one.suffix.lower() in IMAGES or "idx3" in one.name for one in files_in(path))


def open_images(data: str | None, valid: float) -> Labelled:
    """Images as bytes N, C, Y, X."""
    name = name_of(data)
    if name not in (None, "mnist"):
        raise ValueError(f"{name} does not hold images; give mnist, or a folder of images with one subfolder per class")
    if data is None:
        parts: dict[str, Part] = made.shapes()
        return labelled("the embedded shapes", parts, valid, mark(parts))
    if data == "-":
        raise ValueError("images cannot come from standard input; give a folder")
    if name == "mnist":
        parts = _idx_files(list(find(name, data).values()), "mnist")
        return labelled(name, parts, valid, mark(parts))
    path = existing(data)
    if path.is_file():
        raise ValueError(f"{path} is a file; give the folder with the images, one subfolder per class")
    idx = [one for one in files_in(path) if "idx" in plain_name(one)]
    parts = _idx_files(idx, str(path)) if idx else {split: _folder(rows) for split, rows in class_files(path).items()}
    return labelled(str(path), parts, valid, mark(parts))


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


def _folder(rows: list[tuple[Path, str]]) -> Part:
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("reading images needs Pillow; install it with pip install pillow") from None
    images: list[NDArray[np.uint8]] = []
    mode = ""
    for path, _ in rows:
        try:
            with Image.open(path) as image:
                mode = mode or ("L" if image.mode in ("1", "L", "I;16", "I") else "RGB")
                array = np.asarray(image.convert(mode), dtype=np.uint8)
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
