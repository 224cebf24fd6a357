"""Hostile inputs: files that a user could have, damaged at random, and the commands that read them. See bench/hostile.py."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RUN = ("run.steps=1", "run.batch=2", "run.device=cpu", "run.examples=2")
SMALL = ("model.width=8", "model.heads=2", "model.layers=1")
TINY = ("--size", "tiny", "--out", "out", *RUN)
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "and",
    "runs",
    "home",
    "to",
    "its",
    "den",
]
NUMBERS = (0, -1, 1, 2, 3, 7, 64, 2**15, 2**31 - 1, 2**31, 2**63 - 1, 2**64, 10**30, -(2**63), 0.5, -0.0, 1e-300, 1e308)
TEXTS = ("", " ", "none", "nan", "inf", "-inf", "true", "null", "\0", "\ud800", "é", "\u202e", "a" * 5000, "../x", "/", "~",
         "[]", "{}", "causal", "=", "%s", "{0}", "1e999", "0x10", "1_000", "١")  # fmt: skip
NESTED = "lists in lists"
UNBOUNDED = ("run.steps", "run.sections", "task.copies", "task.episodes", "task.epochs", "task.segment")  # ask for work

Maker = Callable[[random.Random, Path], list[str]]
KINDS: dict[str, Maker] = {}


def kind(name: str) -> Callable[[Maker], Maker]:
    def add(maker: Maker) -> Maker:
        KINDS[name] = maker
        return maker

    return add


# Mutations


def value(rng: random.Random, depth: int = 0) -> Any:
    """A JSON value that is legal somewhere, and wrong in most places."""
    choice = rng.randrange(10)
    if choice < 4:
        return rng.choice(NUMBERS)
    if choice < 6:
        return rng.choice(TEXTS)
    if choice == 6:
        return rng.choice((None, True, False, float("nan"), float("inf")))
    if depth > 2:
        return []
    if choice == 7:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if choice == 8:
        return rng.choice(([], {}, [[[]]], NESTED))
    return {rng.choice((*WORDS, "type", "")): value(rng, depth + 1) for _ in range(rng.randrange(3))}


def dump(tree: Any) -> str:
    """JSON, with lists in lists in lists in place of the mark."""
    return json.dumps(tree).replace(json.dumps(NESTED), "[" * 100_000 + "]" * 100_000)


def places(tree: Any) -> list[tuple[Any, Any]]:
    """All (container, key) of a JSON tree."""
    keys: list[Any] = list(tree) if isinstance(tree, dict) else list(range(len(tree))) if isinstance(tree, list) else []
    return [(tree, key) for key in keys] + [place for key in keys for place in places(tree[key])]


def mutate_json(rng: random.Random, content: bytes) -> bytes:
    """Change some values, keys or bytes of a JSON file."""
    if rng.random() < 0.25:
        return mutate_bytes(rng, content)
    tree = json.loads(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        found = places(tree)
        if not found:
            break
        container, key = rng.choice(found)
        choice = rng.randrange(8)
        if choice == 0:
            del container[key]
        elif choice == 1 and isinstance(container, dict):
            container[rng.choice((str(key) + "s", "", "type"))] = container.pop(key)
        elif choice == 2:
            other, name = rng.choice(found)
            if name in (other if isinstance(other, dict) else range(len(other))):
                container[key] = json.loads(json.dumps(other[name]))
        elif choice == 3 and isinstance(container[key], int | float):
            container[key] = container[key] * rng.choice((-1, 0, 2, 3, 1000, 10**9)) + rng.choice((0, 1, -1, 0.5))
        else:
            container[key] = value(rng)
    if rng.random() < 0.03:
        tree = value(rng)
    return dump(tree).encode()


def mutate_bytes(rng: random.Random, content: bytes) -> bytes:
    """Flip, remove, repeat, insert or cut some bytes."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 8, 64))
        choice = rng.randrange(7)
        if choice == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif choice == 1:
            del data[at : at + length]
        elif choice == 2:
            data[at:at] = data[at : at + length] * rng.choice((1, 3, 50))
        elif choice == 3:
            data[at:at] = rng.randbytes(length)
        elif choice == 4:
            data[at:at] = rng.choice(
                (b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\n\n", b'"', b",", b"\t", b"-1", b"9" * 30)
            )
        elif choice == 5 and rng.random() < 0.4:
            del data[at:]
        elif at < len(data):
            data[at] = rng.randrange(256)
    return bytes(data)


def damage(rng: random.Random, file: Path) -> None:
    mutate = mutate_json if file.suffix == ".json" else mutate_bytes
    file.write_bytes(mutate(rng, file.read_bytes()))


def write_sums(run: Path) -> None:
    """Write the checksums of a run again, so that a damaged file is read."""
    for sums in run.rglob("SHA256SUMS"):
        names = [line.partition("  ")[2] for line in sums.read_text().splitlines()]
        lines = [f"{hashlib.sha256((sums.parent / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
        sums.write_text("".join(lines))


def damage_run(rng: random.Random, run: Path, *names: str) -> None:
    """Damage a file of a run, in its folder and in its checkpoint alike; mostly with checksums to match."""
    name = rng.choice(names)
    files = sorted(run.rglob(name))
    damage(rng, files[0])
    for file in files[1:]:
        file.write_bytes(files[0].read_bytes())
    if name != "SHA256SUMS" and rng.random() < 0.9:
        write_sums(run)


def use_run(rng: random.Random, run: Path) -> list[str]:
    """A command that reads a run."""
    verb = rng.choice(("evaluate", "evaluate", "generate", "resume", "predict", "show", "init"))
    if verb == "generate":
        return ["generate", str(run), "--prompt", "the dog", "--tokens", "3", "--seed", "1"]
    if verb == "resume":
        return ["resume", str(run), "--steps", "2"]
    if verb == "predict":
        return ["predict", str(run), "--data", str(run.parent / "text.txt"), "--limit", "2", "--out", "out.csv"]
    if verb == "show":
        return ["show", "attention", str(run), "--out", "out.png"]
    if verb == "init":
        return [
            "train",
            "byte-language",
            "--data",
            "text.txt",
            "--init-from",
            str(run),
            *TINY,
            *SMALL,
            "task.context=8",
        ]
    return ["evaluate", str(run), "--limit", "2"]


# Kinds. A maker damages files of its folder, a copy of the originals, and returns the command


@kind("recipe")
def recipe(rng: random.Random, folder: Path) -> list[str]:
    run = Path(rng.choice(("language", "classifier")))
    damage_run(rng, folder / run, "recipe.json", "recipe.json", "state.json", "SHA256SUMS", "records.jsonl")
    return use_run(rng, run)


@kind("model JSON")
def model(rng: random.Random, folder: Path) -> list[str]:
    if rng.random() < 0.4:
        run = Path(rng.choice(("language", "classifier")))
        damage_run(rng, folder / run, "model.json")
        return use_run(rng, run)
    damage(rng, folder / "model.json")
    if rng.random() < 0.5:
        return ["plan", "model.json", "--data", "text.txt", "--no-measure", "task.context=8", *RUN]
    return ["train", "model.json", "--data", "text.txt", "--out", "out", "task.context=8", *RUN]


@kind("safetensors")
def safetensors(rng: random.Random, folder: Path) -> list[str]:
    run = folder / "language"
    file = sorted(run.rglob("*.safetensors"))[rng.randrange(len(sorted(run.rglob("*.safetensors"))))]
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    head, body, choice = content[8 : 8 + size], content[8 + size :], rng.randrange(4)
    if choice == 0:
        file.write_bytes(mutate_bytes(rng, content))
    elif choice == 1:
        file.write_bytes(rng.choice(NUMBERS[5:9]).to_bytes(8, "little") + head + body)
    elif choice == 2:
        head = mutate_json(rng, head)
        file.write_bytes(len(head).to_bytes(8, "little") + head + body)
    else:  # numbers that no training gives
        numbers = np.frombuffer(body[: len(body) // 4 * 4], np.float32).copy()
        numbers[rng.randrange(max(1, len(numbers))) :] = rng.choice((np.nan, np.inf, 1e38, 0.0, -1e30))
        file.write_bytes(content[: 8 + size] + numbers.tobytes() + body[len(body) // 4 * 4 :])
    if rng.random() < 0.9:
        write_sums(run)
    return use_run(rng, Path("language"))


@kind("tokenizer")
def tokenizer(rng: random.Random, folder: Path) -> list[str]:
    if rng.random() < 0.2:
        damage(rng, folder / "gpt2" / rng.choice(("encoder.json", "vocab.bpe")))
        return ["train", "byte-language", "--data", "text.txt", *TINY, *SMALL, "task.context=8", "task.tokenizer=gpt2",
                "task.tokenizer_files=gpt2"]  # fmt: skip
    damage_run(rng, folder / "language", "tokenizer.json")
    return use_run(rng, Path("language"))


@kind("text")
def text(rng: random.Random, folder: Path) -> list[str]:
    name = rng.choice(("text.txt", "text.txt", "bytes.txt", "ids.npy", "text.txt.gz", "ids.json"))
    content = (folder / "text.txt").read_bytes()
    if name == "bytes.txt":
        content = rng.randbytes(rng.choice((0, 1, 2, 30, 3000)))
    elif name != "text.txt":
        content = (folder / name).read_bytes()
    (folder / name).write_bytes(mutate_json(rng, content) if name == "ids.json" else mutate_bytes(rng, content))
    if rng.random() < 0.3:
        return ["evaluate", "language", "--data", name, "--limit", "2"]
    kinds = rng.choice(("bytes", "characters", "bpe"))
    member, task = rng.choice((("byte-language", "language"), ("bert", "masked"), ("lstm", "language")))
    words = ["model.width=8"] if member == "lstm" else SMALL
    words = [*words, f"task.tokenizer={kinds}"] if task == "language" else words
    return ["train", member, "--task", task, "--data", name, *TINY, *words, "task.context=8"]


@kind("records")
def records(rng: random.Random, folder: Path) -> list[str]:
    """CSV, TSV, JSON lines, JSON and Parquet: classes, numbers and pairs."""
    name = rng.choice(("records.csv", "records.csv", "records.tsv", "records.jsonl", "records.json", "records.parquet"))
    content = (folder / name).read_bytes()
    if name == "records.csv" and rng.random() < 0.5:
        rows = list(csv.reader(io.StringIO(content.decode())))
        for _ in range(rng.randrange(1, 6)):
            row = rng.choice(rows)
            row[rng.randrange(len(row))] = str(rng.choice((*NUMBERS, *TEXTS[:-4]))).encode("utf-8", "replace").decode()
            if rng.random() < 0.3:
                row.append("more") if rng.random() < 0.5 else row.clear()
                rows[rows.index(row)] = row or ["x"]
        output = io.StringIO()
        csv.writer(output).writerows(rows)
        (folder / name).write_text(output.getvalue())
    else:
        damage(rng, folder / name)
    if rng.random() < 0.4:
        return ["predict", "classifier", "--data", name, "--out", "out.csv"]
    if rng.random() < 0.2:
        return ["train", "transformer", "--data", name, *TINY, *SMALL, "task.source=text", "task.target=label"]
    task = rng.choice(("classify", "regress"))
    columns = [f"task.{key}={rng.choice(WORDS)}" for key in ("column", "label") if rng.random() < 0.1]
    return ["train", "byte-classifier", "--task", task, "--data", name, *TINY, *SMALL, "task.context=8", *columns]


@kind("images")
def images(rng: random.Random, folder: Path) -> list[str]:
    files = sorted((folder / "images").rglob("*.png"))
    for file in rng.sample(files, rng.choice((1, 1, 3))):
        choice = rng.randrange(5)
        if choice == 0:
            shutil.move(file, file.with_suffix(rng.choice((".txt", ".gif", ".jpg", ""))))
        elif choice == 1:
            file.write_bytes(rng.choice((b"", b"x", (folder / "text.txt").read_bytes(), rng.randbytes(50))))
        elif choice == 2:  # the size in the header
            content = bytearray(file.read_bytes())
            content[16:24] = rng.randbytes(8)
            file.write_bytes(content)
        else:
            damage(rng, file)
    if rng.random() < 0.4:
        data = rng.choice(("images", str(files[0].relative_to(folder))))
        return ["predict", "vision", "--data", data, "--out", "out.csv"]
    size = [f"task.size={rng.choice((8, 0, -1, 9, 4))}"] if rng.random() < 0.3 else []
    member = rng.choice(("vit", "image-transformer"))
    return ["train", member, "--data", "images", *TINY, *SMALL, *size, *(["model.patch=4"] if member == "vit" else [])]


@kind("graph")
def graph(rng: random.Random, folder: Path) -> list[str]:
    damage(rng, folder / "graph.json")
    if rng.random() < 0.4:
        return ["predict", "graph", "--data", "graph.json", "--out", "out.csv"]
    task = rng.choice(("classify", "classify", "regress"))
    return ["train", "graph-classifier", "--task", task, "--data", "graph.json", *TINY, *SMALL]


@kind("settings")
def settings(rng: random.Random, folder: Path) -> list[str]:
    listed = json.loads((folder / "settings.json").read_text())
    member = rng.choice(sorted(listed["members"]))
    task = listed["tasks"][listed["members"][member]["task"]]
    entries = [*listed["run"], *listed["optim"], *task, *flat(listed["members"][member])]
    words = []
    for entry in rng.sample(entries, rng.choice((1, 1, 2, 3))):
        choices = [
            *entry["choices"] * 10,
            *[json.dumps(entry["default"])] * 20,
            *TEXTS,
            *(dump(value(rng)) for _ in range(8)),
        ]
        text = str(rng.choice(choices if entry["name"] in UNBOUNDED else [*choices, *NUMBERS, *NUMBERS]))
        name = entry["name"] if rng.random() < 0.95 else entry["name"][:-1] + rng.choice(("", "x", ".x"))
        words.append(f"{name}{'=' if rng.random() < 0.97 else ''}{text}")
    words = [word.replace("\0", "\\0").encode("utf-8", "replace").decode() for word in words]
    small = [word for word in SMALL if word.partition("=")[0] in {entry["name"] for entry in entries}]
    data = ["--data", "text.txt"] if rng.random() < 0.7 else []
    verb = ["plan", "--no-measure", *TINY[:2], *RUN] if rng.random() < 0.4 else ["train", *TINY]
    return [verb[0], member, *verb[1:], *data, *small, *words]


def flat(tree: Any) -> list[Any]:
    """The entries of the members' settings, however they are grouped."""
    if isinstance(tree, dict):
        return [tree] if "name" in tree else [entry for branch in tree.values() for entry in flat(branch)]
    return [entry for branch in tree for entry in flat(branch)] if isinstance(tree, list) else []


@kind("prompt")
def prompt(rng: random.Random, folder: Path) -> list[str]:
    text = rng.choice(
        (
            *TEXTS,
            *WORDS,
            rng.randbytes(30).decode("utf-8", "replace"),
            "".join(map(chr, rng.sample(range(1, 0xD7FF), 9))),
        )
    )
    text = text.replace("\0", "").encode("utf-8", "replace").decode()
    run = rng.choice(("language", "language", "classifier", "vision", "graph"))
    if rng.random() < 0.2:
        (folder / "lines.txt").write_text(f"{text}\n{rng.choice(TEXTS)[:3]!r}\n\n", encoding="utf-8")
        return ["predict", run, "--data", "lines.txt", "--out", "out.csv"]
    words = ["--tokens", str(rng.choice((0, 1, 3, -1)))]
    for name in rng.sample(
        ("temperature", "top-k", "top-p", "min-p", "beam", "seed", "images", "given", "step"), rng.randrange(4)
    ):
        numbers = [number for number in NUMBERS if name not in ("beam", "images") or abs(number) < 100]
        words += [f"--{name}={rng.choice((*numbers, *TEXTS[:8]))}".replace("\0", "")]
    return ["generate", run, f"--prompt={text}", *words]


@kind("pattern")
def pattern(rng: random.Random, folder: Path) -> list[str]:
    """Expressions of attention patterns."""
    names = ("causal", "full", "local", "stride", "by_head", "local2d", "block", "window", "summary", "prefix", "graph", "hashed",
             "same_document", "chunked", "wrong")  # fmt: skip

    def expression(depth: int) -> str:
        choice = rng.randrange(6 if depth < 4 else 2)
        if choice < 3:
            count = rng.randrange(4)
            return rng.choice(names) + (
                f"({', '.join(str(rng.choice(NUMBERS)) for _ in range(count))})" if count else ""
            )
        if choice == 3:
            return f"~{expression(depth + 1)}"
        return f"({expression(depth + 1)} {rng.choice('&|-^')} {expression(depth + 1)})"

    text = expression(0)
    if rng.random() < 0.3:
        text = mutate_bytes(rng, text.encode()).decode("utf-8", "replace").replace("\0", "")
    if rng.random() < 0.02:
        text = "~" * 5000 + "causal"
    return ["show", "pattern", f"--length={rng.choice((8, 32, 0, -1, 1))}", "--", text or "causal"]
