"""Named sets: found where they may be kept, in all their forms, verified, fetched, and refused with the remedy."""

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

from everyformer.data import graphs, named
from everyformer.data.named import Form
from everyformer.data.reviews import reviews
from everyformer.data.text import open_text

FILES = {"a.txt": b"first file\n", "b.txt": b"second file\n"}


def sums(files):
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """A named set of two files, and a cache folder of its own."""
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(named.NAMED, "toy", (Form(sums(FILES), "https://home/", ".gz"),))
    return tmp_path


def put(folder, pack=lambda content: content, suffix=""):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in FILES.items():
        (folder / f"{name}{suffix}").write_bytes(pack(content))


def zipped(content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("inside", content)
    return file.getvalue()


@pytest.mark.parametrize("place", ["data/toy", "cache/toy", "anywhere/toy"])
@pytest.mark.parametrize(
    "pack, suffix", [(bytes, ""), (gzip.compress, ".gz"), (lzma.compress, ".xz"), (zipped, ".zip")]
)
def test_a_set_is_found_in_its_places_and_packings(toy, monkeypatch, place, pack, suffix):
    put(toy / place, pack, suffix)
    monkeypatch.setenv("EVERYFORMER_DATA", str(toy / "data"))
    data = str(toy / place) if place.startswith("anywhere") else "toy"
    assert named.name_of(data) == "toy"
    found = named.find("toy", data)
    assert {name: path.read_bytes() for name, path in found.items()} == FILES


def test_a_changed_file_is_refused(toy):
    put(toy / "cache" / "toy")
    (toy / "cache" / "toy" / "b.txt").write_bytes(b"changed")
    with pytest.raises(ValueError, match=r"b\.txt is not b\.txt of toy: its sha256 is .*get it again, or rename"):
        named.find("toy")


def test_without_a_network_the_error_says_what_to_do(toy):
    with pytest.raises(
        ValueError, match=r"toy is not in .*https://home/a\.txt\.gz cannot be fetched.*EVERYFORMER_DATA"
    ):
        named.find("toy")


def home(answers):
    def urlopen(address, timeout):
        if address not in answers:
            raise urllib.error.URLError("not found")
        return io.BytesIO(answers[address])

    return urlopen


def test_a_set_is_fetched_once(toy, monkeypatch):
    answers = {f"https://home/{name}.gz": gzip.compress(content) for name, content in FILES.items()}
    monkeypatch.setattr("urllib.request.urlopen", home(answers))
    assert {name: path.read_bytes() for name, path in named.find("toy").items()} == FILES
    monkeypatch.setattr("urllib.request.urlopen", home({}))
    assert {name: path.read_bytes() for name, path in named.find("toy").items()} == FILES


@pytest.mark.parametrize(
    "content",
    [gzip.compress(b"an error page"), b"not even packed", gzip.compress(FILES["a.txt"])[:-6]],
    ids=["other", "plain", "cut"],
)
def test_a_bad_answer_is_refused_and_not_kept(toy, monkeypatch, content):
    monkeypatch.setattr("urllib.request.urlopen", home({"https://home/a.txt.gz": content}))
    with pytest.raises(ValueError, match=r"https://home/a\.txt\.gz is not a\.txt of toy|cannot unpack"):
        named.find("toy")
    assert list((toy / "cache" / "toy").iterdir()) == []


def test_files_that_may_be_missing_are_not_asked_for(toy, monkeypatch):
    monkeypatch.setitem(named.NAMED, "toy", (Form(sums(FILES), extra=frozenset({"b.txt"})),))
    put(toy / "toy")
    (toy / "toy" / "b.txt").unlink()
    assert list(named.find("toy", str(toy / "toy"))) == ["a.txt"]


def test_a_file_of_that_name_is_the_users_own(tmp_path, monkeypatch):
    """A folder called imdb without IMDb's files is not IMDb."""
    (tmp_path / "imdb").mkdir()
    (tmp_path / "imdb" / "notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert named.name_of("imdb") is None
    assert named.name_of("mnist") == "mnist"
    assert named.name_of(None) is named.name_of("-") is named.name_of("unknown") is None


def test_every_set_has_a_home_and_full_checksums():
    for forms in named.NAMED.values():
        assert any(form.home and form.home.startswith("http") for form in forms)
        assert all(len(bytes.fromhex(one)) == 32 for form in forms for one in form.sums.values())


def test_enwik8_has_its_usual_splits(tmp_path, monkeypatch):
    path = tmp_path / "enwik8"
    with path.open("wb") as file:
        file.truncate(100_000_000)
        file.seek(90_000_000)
        file.write(b"v")
        file.seek(95_000_000)
        file.write(b"t")
    monkeypatch.setitem(named.NAMED, "enwik8", (Form({"enwik8": hashlib.sha256(path.read_bytes()).hexdigest()}),))
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
    one = reviews({"aclImdb_v1.tar.gz": tmp_path / "aclImdb_v1.tar.gz"})
    other = reviews({f"imdb_{split}.jsonl": tmp_path / f"imdb_{split}.jsonl" for split in ("train", "test")})
    assert one == other
    assert sorted(one["train"]) == [("bad\nfilm", "neg"), ("fine", "pos"), ("ü", "pos")]
    assert one["test"] == [("ugh", "neg")]


@pytest.fixture
def scipy(monkeypatch):
    """A stand-in with scipy's name, so that pickles of its matrices can be made without it."""
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


def test_planetoids_files_are_joined_into_one_graph(tmp_path, scipy):
    """Five nodes; the test nodes 3 and 4 are listed as 4, 3, so their rows are in that order."""
    feature = np.eye(5, 1433)
    label = np.eye(7)[[0, 1, 2, 3, 4]]
    content = {
        "x": scipy(feature[:2]), "y": label[:2], "allx": scipy(feature[:3]), "ally": label[:3],
        "tx": scipy(feature[[4, 3]]), "ty": label[[4, 3]], "graph": {0: [1, 1, 0], 1: [0, 4], 2: [3], 3: [2], 4: [1]},
    }  # fmt: skip
    for name, value in content.items():
        (tmp_path / f"ind.cora.{name}").write_bytes(pickle.dumps(value, protocol=4))
    (tmp_path / "ind.cora.test.index").write_text("4\n3\n")
    tree = graphs.planetoid({path.name: path for path in tmp_path.iterdir()})
    assert tree["features"] == [[0], [1], [2], [3], [4]]
    assert tree["labels"] == [0, 1, 2, 3, 4]
    assert tree["edges"] == [[0, 1], [1, 4], [2, 3]]
    assert (tree["train"], tree["test"]) == ([0, 1], [3, 4])


def test_a_pickle_that_does_more_than_hold_data_is_refused(tmp_path):
    (tmp_path / "ind.cora.test.index").write_text("0")
    (tmp_path / "ind.cora.allx").write_bytes(pickle.dumps(print))
    with pytest.raises(pickle.UnpicklingError, match=r"it names .*print"):
        graphs.planetoid({path.name: path for path in tmp_path.iterdir()})
