"""Named data sets: where they are looked for, the sha256 of their files, and where they are downloaded from.

A data set is looked for in $EVERYFORMER_DATA/<name>, then in <cache folder>/<name>; otherwise it is downloaded into the latter. A
path to such a folder or file may be given instead. Files may be compressed (.gz, .xz, .zip); the sha256 is that of the content.

    enwik8    the first 10^8 bytes of Wikipedia's dump of 2006-03-03: Hutter prize; splits of 90, 5 and 5 million bytes
    imdb      25,000 + 25,000 film reviews: Maas et al. 2011; the original archive or JSON lines
    multi30k  29,000 English-German captions and test sets: Elliott et al. 2016, task 1
    mnist     60,000 + 10,000 digits: LeCun et al. 1998
    cora      2,708 papers and their citations, with Planetoid's split: Yang et al. 2016; its eight files or one JSON file
    gpt2_bpe  the tokenizer of GPT-2: Radford et al. 2019
"""

from __future__ import annotations

import os
import shutil
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from everyformer.data.files import COMPRESSED, atomic_write, cache_folder, checksum, decompress, uncompressed_name


@dataclass(frozen=True)
class FileSet:
    """The files of one version of a data set: the sha256 of their content, and the URL they are downloaded from."""

    sha256: dict[str, str]
    url: str | None = None
    suffix: str = ""  # of the files at the URL
    optional: frozenset[str] = frozenset()  # files that may be missing

    def paths(self, location: Path) -> dict[str, Path] | None:
        """Returns the files in a folder, or the single file itself. Returns None if a required one is missing."""
        paths: dict[str, Path] = {}
        for name in self.sha256:
            candidates = [location / f"{name}{suffix}" for suffix in ("", *COMPRESSED)]
            if len(self.sha256) == 1 and location.is_file() and uncompressed_name(location) == name:
                candidates = [location]
            path = next((candidate for candidate in candidates if candidate.is_file()), None)
            if path is not None:
                paths[name] = path
            elif name not in self.optional:
                return None
        return paths


_MULTI30K = {
    "train.en": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
    "train.de": "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
    "val.en": "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
    "val.de": "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
    "test_2016_flickr.en": "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
    "test_2016_flickr.de": "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
}
_MULTI30K_LATER_TESTS = {
    "test_2017_flickr.en": "ce1450ddc5ab0834502579d77a170849952e15a2938b34cc503bdc25ebb4fb98",
    "test_2017_flickr.de": "c3078bc3b36808bf9d20eb2347ed6137016179ef59ec0d2b9b8ecc3fb2880081",
    "test_2017_mscoco.en": "43051fdfa86fd5395182e718a94ca67b1b227b9f7c79596ff0f6b813216981d2",
    "test_2017_mscoco.de": "58277df3c75f92f7145a11b910b553d1cf82c439249d4dc237c899609eafac22",
    "test_2018_flickr.en": "4e585c2dd525911a6ea7730e9d0b516239af3f1b1ffae6a2130223cfb639f25e",
    "test_2018_flickr.de": "39fcc8b3331d76fb42d648d019c6898b0d5e58baac87bc2a0bb93f44ec8db207",
}

GPT2_FILES = "gpt2_bpe"  # the files of a tokenizer, not a data set to train on
DATASETS: dict[str, tuple[FileSet, ...]] = {
    "enwik8": (
        FileSet(
            {"enwik8": "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"},
            "http://mattmahoney.net/dc/",
            ".zip",
        ),
    ),
    "imdb": (
        FileSet(
            {"aclImdb_v1.tar.gz": "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe"},
            "https://ai.stanford.edu/~amaas/data/sentiment/",
        ),
        FileSet(
            {
                "imdb_train.jsonl": "ab94eac717b84e5f3dd5b7e92100e9fe5be5e15865b573b925130b0f6d914774",
                "imdb_test.jsonl": "7cb61bfb8eaa8abbf0d97c652dc0441a118436aa0df70099450d9d2b89b6e6ca",
            }
        ),
    ),
    "multi30k": (
        FileSet(
            _MULTI30K | _MULTI30K_LATER_TESTS,
            "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/",
            ".gz",
            frozenset(_MULTI30K_LATER_TESTS),
        ),
    ),
    "mnist": (
        FileSet(
            {
                "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            },
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            ".gz",
        ),
    ),
    "cora": (
        FileSet({"cora.json": "6d12b91ee7efdd7f0993dc3dc8853717b89b4aecc68d34c9aaf933b8253160db"}),
        FileSet(
            {
                "ind.cora.x": "23cfa55d91c6f624233f5eb7b6e3f141f1bd2b2ae39608a63cf5d084bb27baab",
                "ind.cora.y": "94465c14eb53e04ca262198dcbb2521ee8af60fb3f3d546cd6ca24a511b0e7d1",
                "ind.cora.tx": "b9afbaa4a400df991f6f02ef677e1e44da55ffc04801fd02f9e673987829226a",
                "ind.cora.ty": "41f5ac76596a1699cc33f53084a2419e92961c42bb75f36fc38e616d348532ad",
                "ind.cora.allx": "9419ba2f26f5c35243db64aba110e0f35a04851609e0dc5433450676ca6b8543",
                "ind.cora.ally": "2b998f5cc7fedc86e7f97ca2498f47a1ffc1462c29e2d578b23bf3f62b6e7d71",
                "ind.cora.graph": "58f13302f39dde8852dad6fe6d15b89b077b6d7f837626bce671ef80344b383d",
                "ind.cora.test.index": "297ce89af2b51a6a194181c7dbe1796c6a1cf9cd9349a88383b1b1e227867875",
            },
            "https://raw.githubusercontent.com/kimiyoung/planetoid/master/data/",
        ),
    ),
    GPT2_FILES: (
        FileSet(
            {
                "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
                "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
            },
            "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/",
        ),
    ),
}  # fmt: skip


def dataset_name(data: str | None) -> str | None:
    """Returns the data set that `data` names, by its name (if there is no such path) or by a path to its files; else None."""
    if data is None or data == "-":
        return None
    path = Path(data).expanduser()
    if not path.exists():
        return data if data in DATASETS else None
    name = uncompressed_name(path)
    return name if name in DATASETS and any(files.paths(path) for files in DATASETS[name]) else None


def dataset_files(name: str, data: str | None = None) -> dict[str, Path]:
    """Returns the files of a data set by name, decompressed and verified. They are downloaded if they are not on this machine.

    If `data` is an existing path, the files must be there. Raises ValueError if a file is missing or its sha256 is wrong.
    """
    root = os.environ.get("EVERYFORMER_DATA")
    locations = [*([Path(root) / name] if root else []), cache_folder() / name]
    is_path = data is not None and Path(data).expanduser().exists()
    if data is not None and is_path:
        locations = [Path(data).expanduser()]
    for location in locations:
        for files in DATASETS[name]:
            if paths := files.paths(location):
                return {file: _verify(name, path, file, files.sha256[file]) for file, path in paths.items()}
    if is_path:
        choices = " or ".join(", ".join(set(files.sha256) - files.optional) for files in DATASETS[name])
        raise ValueError(f"{data} does not have the files of {name}; put {choices} there")
    return _download(name, locations)


def _verify(name: str, path: Path, file: str, sha256: str) -> Path:
    content = path if path.name == file else decompress(path)
    _check_sha256(content, sha256, f"{path} is not {file} of {name}")
    return content


def _check_sha256(content: Path, expected: str, message: str) -> None:
    if (actual := checksum(content)) != expected:
        raise ValueError(
            f"{message}: its sha256 is {actual[:12]}..., not {expected[:12]}...; get it again, or rename it to use it as your "
            "own data"
        )


def _download(name: str, locations: list[Path]) -> dict[str, Path]:
    """Downloads a data set into the cache folder. A file gets its final name only after its content has been verified."""
    files = next(files for files in DATASETS[name] if files.url)
    folder = cache_folder() / name
    folder.mkdir(exist_ok=True)
    for file, sha256 in files.sha256.items():
        url, target = f"{files.url}{file}{files.suffix}", folder / f"{file}{files.suffix}"
        if target.exists():
            continue
        new = folder / f"new-{target.name}"  # ends in the suffix, which `decompress` needs
        try:
            with urllib.request.urlopen(url, timeout=60) as response, atomic_write(new) as part:
                shutil.copyfileobj(response, part, 1 << 20)
        except OSError as error:
            raise ValueError(
                f"{name} is not in {' or '.join(map(str, locations))}, and {url} cannot be downloaded ({error}); put its files "
                f"({', '.join(files.sha256)}) into {folder}, or set EVERYFORMER_DATA to a folder that has {name}/"
            ) from None
        content = new
        try:
            content = decompress(new) if files.suffix else new
            _check_sha256(content, sha256, f"the file from {url} is not {file} of {name}")
        except ValueError:
            new.unlink()
            raise
        finally:
            if content != new:
                content.unlink()  # the cache key has the file's name: it is decompressed again under the final one
        new.rename(target)
    return dataset_files(name, str(folder))
