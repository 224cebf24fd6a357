"""Named data sets are found in each location and compression format, verified, and downloaded."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import pickle
import sys
import tarfile
import types
import urllib.error
import zipfile

import numpy as np
import pytest

from everyformer.data import datasets, graphs
from everyformer.data.datasets import FileSet
from everyformer.data.imdb import read_reviews
from everyformer.data.text import open_text

FILES = {"a.txt": b"first file\n", "b.txt": b"second file\n"}


def sums(files):
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """Registers a data set of two files, and gives the test its own cache folder."""
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(datasets.DATASETS, "toy", (FileSet(sums(FILES), "https://home/", ".gz"),))
    return tmp_path


def put(folder, compress=lambda content: content, suffix=""):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in FILES.items():
        (folder / f"{name}{suffix}").write_bytes(compress(content))


def zipped(content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("inside", content)
    return file.getvalue()


@pytest.mark.parametrize("location", ["data/toy", "cache/toy", "anywhere/toy"])
@pytest.mark.parametrize(
    "compress, suffix", [(bytes, ""), (gzip.compress, ".gz"), (lzma.compress, ".xz"), (zipped, ".zip")]
)
def test_a_data_set_is_found_in_each_location_and_compression(toy, monkeypatch, location, compress, suffix):
    put(toy / location, compress, suffix)
    monkeypatch.setenv("EVERYFORMER_DATA", str(toy / "data"))
    data = str(toy / location) if location.startswith("anywhere") else "toy"
    assert datasets.dataset_name(data) == "toy"
    paths = datasets.dataset_files("toy", data)
    assert {name: path.read_bytes() for name, path in paths.items()} == FILES


def test_a_changed_file_raises(toy):
    put(toy / "cache" / "toy")
    (toy / "cache" / "toy" / "b.txt").write_bytes(b"changed")
    with pytest.raises(ValueError, match=r"b\.txt is not b\.txt of toy: its sha256 is .*get it again, or rename"):
        datasets.dataset_files("toy")


def test_a_failed_download_raises_with_the_remedy(toy):
    with pytest.raises(
        ValueError, match=r"toy is not in .*https://home/a\.txt\.gz cannot be downloaded.*EVERYFORMER_DATA"
    ):
        datasets.dataset_files("toy")


def server(responses):
    def urlopen(url, timeout):
        if url not in responses:
            raise urllib.error.URLError("not found")
        return io.BytesIO(responses[url])

    return urlopen


def test_a_data_set_is_downloaded_once(toy, monkeypatch):
    responses = {f"https://home/{name}.gz": gzip.compress(content) for name, content in FILES.items()}
    monkeypatch.setattr("urllib.request.urlopen", server(responses))
    assert {name: path.read_bytes() for name, path in datasets.dataset_files("toy").items()} == FILES
    monkeypatch.setattr("urllib.request.urlopen", server({}))
    assert {name: path.read_bytes() for name, path in datasets.dataset_files("toy").items()} == FILES


@pytest.mark.parametrize(
    "content",
    [gzip.compress(b"an error page"), b"not compressed", gzip.compress(FILES["a.txt"])[:-6]],
    ids=["other content", "not compressed", "truncated"],
)
def test_an_invalid_download_raises_and_is_removed(toy, monkeypatch, content):
    monkeypatch.setattr("urllib.request.urlopen", server({"https://home/a.txt.gz": content}))
    with pytest.raises(ValueError, match=r"https://home/a\.txt\.gz is not a\.txt of toy|cannot decompress"):
        datasets.dataset_files("toy")
    assert list((toy / "cache" / "toy").iterdir()) == []


def test_optional_files_may_be_missing(toy, monkeypatch):
    monkeypatch.setitem(datasets.DATASETS, "toy", (FileSet(sums(FILES), optional=frozenset({"b.txt"})),))
    put(toy / "toy")
    (toy / "toy" / "b.txt").unlink()
    assert list(datasets.dataset_files("toy", str(toy / "toy"))) == ["a.txt"]


def test_a_path_with_the_name_of_a_data_set_but_other_files_is_user_data(tmp_path, monkeypatch):
    """A folder called imdb without IMDb's files is not IMDb."""
    (tmp_path / "imdb").mkdir()
    (tmp_path / "imdb" / "notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert datasets.dataset_name("imdb") is None
    assert datasets.dataset_name("mnist") == "mnist"
    assert datasets.dataset_name(None) is datasets.dataset_name("-") is datasets.dataset_name("unknown") is None


def test_every_data_set_has_a_url_and_complete_checksums():
    for versions in datasets.DATASETS.values():
        assert any(files.url and files.url.startswith("http") for files in versions)
        assert all(len(bytes.fromhex(one)) == 32 for files in versions for one in files.sha256.values())


def test_enwik8_has_its_usual_splits(tmp_path, monkeypatch):
    path = tmp_path / "enwik8"
    with path.open("wb") as file:
        file.truncate(100_000_000)
        file.seek(90_000_000)
        file.write(b"v")
        file.seek(95_000_000)
        file.write(b"t")
    monkeypatch.setitem(
        datasets.DATASETS, "enwik8", (FileSet({"enwik8": hashlib.sha256(path.read_bytes()).hexdigest()}),)
    )
    text = open_text(str(path))
    assert {split: len(raw) for split, raw in text.splits.items()} == {
        "train": 90_000_000,
        "valid": 5_000_000,
        "test": 5_000_000,
    }
    assert (text.splits["valid"][0], text.splits["test"][0]) == (ord("v"), ord("t"))


def test_reviews_are_the_same_from_the_archive_and_from_json(tmp_path):
    texts = {
        ("train", "neg", 2): "bad<br />film",
        ("train", "pos", 10): "fine",
        ("test", "neg", 0): "ugh",
        ("train", "pos", 9): "ü",
    }
    with tarfile.open(tmp_path / "aclImdb_v1.tar.gz", "w:gz") as archive:
        others = {"aclImdb/train/unsup/0_0.txt": "no class", "aclImdb/README": "read me"}
        both = {
            f"aclImdb/{split}/{label}/{number}_7.txt": text for (split, label, number), text in texts.items()
        } | others
        for name, text in both.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    for split in ("train", "test"):
        rows = sorted(key for key in texts if key[0] == split)
        lines = [json.dumps({"text": texts[key], "label": int(key[1] == "pos"), "id": key[2]}) for key in rows]
        (tmp_path / f"imdb_{split}.jsonl").write_text("\n".join(lines))
    one = read_reviews({"aclImdb_v1.tar.gz": tmp_path / "aclImdb_v1.tar.gz"})
    other = read_reviews({f"imdb_{split}.jsonl": tmp_path / f"imdb_{split}.jsonl" for split in ("train", "test")})
    assert one == other
    assert sorted(one["train"]) == [("bad\nfilm", "neg"), ("fine", "pos"), ("ü", "pos")]
    assert one["test"] == [("ugh", "neg")]


@pytest.fixture
def scipy(monkeypatch):
    """A module with scipy's name, so that the test can pickle csr matrices without scipy."""
    module = types.ModuleType("scipy.sparse.csr")

    class csr_matrix:
        def __init__(self, dense):
            dense = np.asarray(dense)
            self.indices = np.concatenate([np.flatnonzero(row) for row in dense]).astype(np.int32)
            self.indptr = np.cumsum([0, *(int(np.count_nonzero(row)) for row in dense)]).astype(np.int32)

    csr_matrix.__module__, csr_matrix.__qualname__ = "scipy.sparse.csr", "csr_matrix"
    module.csr_matrix = csr_matrix
    for name in ("scipy", "scipy.sparse"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "scipy.sparse.csr", module)
    return csr_matrix


def test_planetoid_files_are_joined_into_one_graph(tmp_path, scipy):
    """The test nodes 3 and 4 of five nodes are listed as 4, 3, so their rows are in that order."""
    feature = np.eye(5, 1433)
    label = np.eye(7)[[0, 1, 2, 3, 4]]
    content = {
        "x": scipy(feature[:2]), "y": label[:2], "allx": scipy(feature[:3]), "ally": label[:3],
        "tx": scipy(feature[[4, 3]]), "ty": label[[4, 3]], "graph": {0: [1, 1, 0], 1: [0, 4], 2: [3], 3: [2], 4: [1]},
    }  # fmt: skip
    for name, value in content.items():
        (tmp_path / f"ind.cora.{name}").write_bytes(pickle.dumps(value, protocol=4))
    (tmp_path / "ind.cora.test.index").write_text("4\n3\n")
    tree = graphs.read_planetoid({path.name: path for path in tmp_path.iterdir()})
    assert tree["features"] == [[0], [1], [2], [3], [4]]
    assert tree["labels"] == [0, 1, 2, 3, 4]
    assert tree["edges"] == [[0, 1], [1, 4], [2, 3]]
    assert (tree["train"], tree["test"]) == ([0, 1], [3, 4])


def test_a_pickle_that_refers_to_code_raises(tmp_path):
    (tmp_path / "ind.cora.test.index").write_text("0")
    (tmp_path / "ind.cora.allx").write_bytes(pickle.dumps(print))
    with pytest.raises(pickle.UnpicklingError, match=r"the pickle refers to .*print"):
        graphs.read_planetoid({path.name: path for path in tmp_path.iterdir()})
