"""Images are read from idx files and from folders of image files."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
from PIL import Image

from everyformer.data.images import ImageSize, open_labelled_images
from everyformer.data.labelled_records import Columns


def idx(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx_files(folder, images=12, labels=12):
    image_NYX = np.arange(images * 20, dtype=np.uint8).reshape(images, 4, 5)
    for split in ("train", "t10k"):
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(image_NYX)))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(idx(np.arange(labels, dtype=np.uint8) % 3))
    return image_NYX


def test_idx_files_are_read(tmp_path):
    image_NYX = idx_files(tmp_path)
    opened = open_labelled_images(str(tmp_path), 0.25)
    test, label_N = opened.splits["test"]
    assert np.array_equal(test, image_NYX[:, None])
    assert label_N.tolist() == [n % 3 for n in range(12)]
    assert opened.classes == ("0", "1", "2")
    assert (len(opened.splits["train"][1]), len(opened.splits["valid"][1])) == (9, 3)


@pytest.mark.parametrize("mode, channels", [("L", 1), ("RGB", 3), ("1", 1)])
def test_a_folder_of_images_is_read(tmp_path, mode, channels):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(4):
            colour = 255 if name == "dog" else 0
            image = Image.new(mode, (6, 4), colour if mode != "RGB" else (colour, number, 7))
            image.save(tmp_path / name / f"{number}.png")
    opened = open_labelled_images(str(tmp_path), 0.25)
    images, label_N = opened.splits["train"]
    image_NCYX = np.asarray(images)
    assert image_NCYX.shape == (6, channels, 4, 6)
    assert opened.classes == ("cat", "dog")
    assert np.array_equal(image_NCYX[:, 0].mean((1, 2)), label_N * 255)


def test_invalid_images_raise(tmp_path):
    for name, size in {"cat": (6, 4), "dog": (6, 5)}.items():
        (tmp_path / name).mkdir()
        Image.new("L", size).save(tmp_path / name / "1.png")
    with pytest.raises(ValueError, match=r"dog/1\.png has 6 x 5 pixels, but the images before it have 6 x 4; resize"):
        open_labelled_images(str(tmp_path), 0.1)
    (tmp_path / "dog" / "1.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"dog/1\.png cannot be read as an image"):
        open_labelled_images(str(tmp_path), 0.1)


def test_invalid_idx_files_raise(tmp_path):
    idx_files(tmp_path, labels=11)
    with pytest.raises(ValueError, match=r"12 images, 11 labels for .*; give as many"):
        open_labelled_images(str(tmp_path), 0.1)
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="train-labels-idx1-ubyte is not a complete idx file"):
        open_labelled_images(str(tmp_path), 0.1)


@pytest.mark.parametrize("sizes, what", [([(6, 4), (9, 9)], "different sizes"), ([(6, 4), (6, 4)], "6 x 4 pixels")])
def test_images_that_are_not_squares_of_one_size_are_cropped_and_resized(tmp_path, sizes, what):
    for name, size in zip(("cat", "dog"), sizes, strict=True):
        (tmp_path / name).mkdir()
        for number in range(3):
            Image.new("L" if name == "cat" else "RGB", size, 100).save(tmp_path / name / f"{number}.png")
    opened = open_labelled_images(str(tmp_path), 0.25, size=ImageSize(mixed=8))
    assert {images.shape[1:] for images, _ in opened.splits.values()} == {(3, 8, 8)}  # RGB, because one of them is
    assert f"have {what}: they are cropped to squares and resized to 8 x 8 pixels (task.size" in opened.notes[0]
    assert open_labelled_images(str(tmp_path), 0.25, size=ImageSize(5)).splits["train"][0].shape[2:] == (5, 5)


def test_records_name_images_and_their_numbers(tmp_path):
    for number in range(6):
        Image.new("L", (4, 4), 10 * number).save(tmp_path / f"{number}.png")
    rows = ["file_name,label", *(f"{number}.png,{number / 2}" for number in range(6))]
    (tmp_path / "train.csv").write_text("\n".join(rows))
    for data in (tmp_path, tmp_path / "train.csv"):
        opened = open_labelled_images(str(data), 0.25, Columns(numbers=True))
        for images, label_N in opened.splits.values():
            assert np.asarray(images)[:, 0, 0, 0].tolist() == (20 * label_N).tolist()
    (tmp_path / "train.csv").write_text("file_name,label\n9.png,1\n1.png,2\n")
    with pytest.raises(ValueError, match=r"'file_name' on line 2 of .* is '9\.png', but there is no file"):
        open_labelled_images(str(tmp_path), 0.25)
