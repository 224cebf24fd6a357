"""Hostile inputs that hypothesis generates from declared types and formats. See bench/hostile.py.

A generated kind is a strategy, and a function that writes one of its examples to a folder and returns the command.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.strategies import DrawFn, SearchStrategy

from bench.hostile_inputs import RUN, SMALL, TINY, flat, write_sums
from bench.hostile_types import EDGES, changed, changes, drawn, floats, models, texts, trees, values
from everyformer.attention.pattern import Pattern
from everyformer.cli.main import app
from everyformer.train.recipe import Recipe

GROUP = 20  # examples that are drawn at a time
Write = Callable[[Any, Path], list[str]]
GENERATED: dict[str, tuple[SearchStrategy[Any], Write]] = {}
ROOT = Path(__file__).parent.parent


def generated(name: str, strategy: SearchStrategy[Any]) -> Callable[[Write], Write]:
    def add(write: Write) -> Write:
        GENERATED[name] = strategy, write
        return write

    return add


@functools.cache
def examples(name: str, group: int, seed: int) -> list[Any]:
    return drawn(GENERATED[name][0], GROUP, seed * 1_000_003 + group * 101 + list(GENERATED).index(name))


def example(name: str, number: int, seed: int) -> Any:
    """Example `number` of a kind."""
    found = examples(name, number // GROUP, seed)
    return found[number % GROUP % len(found)]  # a strategy with few values has fewer


def keep_files_in(folder: Path) -> None:
    """Where hypothesis writes, in place of the current folder."""
    set_hypothesis_home_dir(folder)


# What the strategies have in common


def word(text: str) -> str:
    """A word of a command line: without NUL, which it cannot have, and bytes that are not UTF-8 as Python reads them."""
    return os.fsdecode(text.replace("\0", "").encode("utf-8", "replace"))


words = st.one_of(texts, st.text(), st.binary(max_size=9).map(os.fsdecode)).map(lambda text: text.replace("\0", ""))
numbers = st.one_of(st.integers(-2, 9), floats, st.sampled_from(EDGES)).map(str)
verbs_of_a_run = st.sampled_from(
    [
        ["evaluate", "RUN", "--limit", "2"],
        ["generate", "RUN", "--prompt", "the dog", "--tokens", "3", "--seed", "1"],
        ["resume", "RUN", "--steps", "2"],
        ["predict", "RUN", "--data", "text.txt", "--limit", "2", "--out", "out.csv"],
        ["show", "attention", "RUN", "--out", "out.png"],
    ]
)
data_and_tasks = st.sampled_from(
    [
        ("text.txt", None),
        ("text.txt", "language"),
        ("text.txt", "masked"),
        ("records.csv", "classify"),
        ("records.csv", "regress"),
        ("images", "classify"),
        ("images", "image"),
        ("graph.json", "classify"),
    ]
)


def of_run(command: list[str], run: str) -> list[str]:
    return [run if one == "RUN" else one for one in command]


def write_run_file(folder: Path, run: str, name: str, change: Callable[[Any], Any]) -> None:
    """Change a JSON file of a run, with checksums to match."""
    for file in (folder / run).rglob(name):
        file.write_text(json.dumps(change(json.loads(file.read_text()))))
    write_sums(folder / run)


# Kinds


verbs_of_a_model = st.sampled_from(["train", "train", "train", "plan", "family", "settings"])


@generated("model JSON, generated", st.tuples(models(), data_and_tasks, verbs_of_a_model))
def model(example: Any, folder: Path) -> list[str]:
    tree, (data, task), verb = example
    (folder / "model.json").write_text(json.dumps(tree))
    if verb in ("family", "settings"):
        return [verb, "model.json"]
    outputs = tree.get("outputs") if isinstance(tree, dict) else None
    names = [head.get("type") for head in outputs if isinstance(head, dict)] if isinstance(outputs, list) else []
    for name in {"language", "masked", "classify"}.intersection(map(str, names)):  # a task that the model can have
        task, data = name, "records.csv" if name == "classify" else "text.txt"
    options = [
        "--data",
        data,
        *(["--task", task] if task else []),
        *RUN,
        *([] if task == "image" else ["task.context=8"]),
    ]
    return [verb, "model.json", *(["--out", "out"] if verb == "train" else ["--no-measure"]), *options]


RECIPES = {
    "language": Recipe.of("byte-language", "task.tokenizer=bpe", size="tiny"),
    "classifier": Recipe.of("byte-classifier", size="tiny"),
    "vision": Recipe.of("vit", size="tiny"),
    "graph": Recipe.of("graph-classifier", size="tiny"),
}
recipe_changes = st.sampled_from(sorted(RECIPES)).flatmap(
    lambda run: st.tuples(st.just(run), changes(RECIPES[run]), verbs_of_a_run)
)


@generated("recipe, generated", recipe_changes)
def recipe(example: Any, folder: Path) -> list[str]:
    run, different, command = example
    write_run_file(folder, run, "recipe.json", lambda tree: changed(tree, different))
    return of_run(command, run)


@st.composite
def setting_words(draw: DrawFn) -> list[str]:
    """A member with some settings whose values have the listed type, or are words."""
    listed = json.loads((ROOT / "src" / "everyformer" / "cli" / "settings.json").read_text())
    name = draw(st.sampled_from(sorted(listed["members"])))
    member = listed["members"][name]
    task = draw(st.sampled_from([member["task"], member["task"], *listed["tasks"]]))
    rows = [*listed["run"], *listed["optim"], *listed["tasks"][task], *flat(member)]
    rows = [row for row in rows if row["name"] not in ("run.compile", "run.steps", "task.copies", "task.episodes")]
    chosen = draw(st.lists(st.sampled_from(rows), min_size=1, max_size=4, unique_by=lambda row: row["name"]))
    settings = [word(f"{row['name']}={draw(st.one_of(*[listed_value(row)] * 9, words))}") for row in chosen]
    small = [one for one in SMALL if one.partition("=")[0] in {row["name"] for row in rows}]
    verb = draw(st.sampled_from((["train", *TINY], ["plan", "--no-measure", *TINY[:2], *RUN])))
    options = ["--task", task] if task != member["task"] else []
    data = {
        "language": "text.txt",
        "masked": "text.txt",
        "classify": "records.csv",
        "regress": "records.csv",
        "image": "images",
    }
    options += ["--data", data[task]] if task in data else []
    return [verb[0], name, *verb[1:], *options, *small, *settings]


def listed_value(row: dict[str, Any]) -> SearchStrategy[str]:
    """Text of the type that `everyformer settings` lists."""
    if row["choices"]:
        return st.sampled_from([*row["choices"]]).map(str)
    kinds = {"integer": st.integers(0, 12).map(str), "number": st.floats(0, 1).map(str), "pattern": patterns,
             "true": st.sampled_from(["true", "false"]), "list": trees.map(json.dumps)}  # fmt: skip
    return kinds.get(row["type"].split()[0].rstrip(","), words)


def expression(tree: Any) -> str:
    """The text of a pattern's JSON, as `everyformer show pattern` reads it."""
    if isinstance(tree, list):
        return f"({', '.join(map(expression, tree))})"
    if not isinstance(tree, dict):
        return str(tree)
    tree = dict(tree)
    kind = str(tree.pop("type", ""))
    inner = [expression(one) for one in tree.values()]
    if kind in ("and", "or"):
        return f"({'&|'[kind == 'or'].join(one for field in tree.values() for one in _each(field))})"
    if kind == "not":
        return f"~{inner[0] if inner else ''}"
    if kind == "by_head":
        return f"by_head({', '.join(one for field in tree.values() for one in _each(field))})"
    return f"{kind}({', '.join(inner)})" if inner else kind


def _each(field: Any) -> list[str]:
    return [expression(one) for one in (field if isinstance(field, list) else [field])]


patterns = values(Pattern).map(expression)


@generated("settings, generated", setting_words())
def settings(example: list[str], folder: Path) -> list[str]:
    return example


@generated("pattern, generated", st.tuples(patterns, st.integers(-1, 40), st.booleans()))
def pattern(example: Any, folder: Path) -> list[str]:
    text, length, trains = example
    if trains:
        return ["train", "gpt2", "--data", "text.txt", *TINY, *SMALL, "task.context=8", word(f"model.pattern={text}")]
    return ["show", "pattern", f"--length={length}", "--", word(text)]


options = st.dictionaries(
    st.sampled_from(
        ["tokens", "temperature", "top-k", "top-p", "min-p", "beam", "seed", "step", "images", "given", "device"]
    ),
    st.one_of(numbers, numbers, words),
    max_size=4,
)


@generated(
    "prompt, generated",
    st.tuples(st.sampled_from(["language"] * 3 + ["classifier", "vision", "graph"]), words, options),
)
def prompt(example: Any, folder: Path) -> list[str]:
    run, text, given = example
    given = {
        name: value for name, value in given.items() if not (name in ("tokens", "beam", "images") and len(value) > 2)
    }
    return [
        "generate",
        run,
        f"--prompt={text}",
        *(f"--{name}={value}" for name, value in ({"tokens": "3"} | given).items()),
    ]


fields = st.one_of(
    st.tuples(st.just("dtype"), st.sampled_from(["F32", "F64", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "X", ""])),
    st.tuples(st.just("shape"), st.lists(st.integers(-1, 300) | st.sampled_from(EDGES), max_size=4)),
    st.tuples(st.just("data_offsets"), st.lists(st.integers(-1, 9000) | st.sampled_from(EDGES), max_size=3)),
    st.tuples(st.sampled_from(["dtype", "shape", "data_offsets", "more"]), trees),
    st.tuples(st.sampled_from(["NAME", "REMOVE", "COPY"]), texts),
)


@generated(
    "safetensors, generated",
    st.tuples(
        st.sampled_from(["model.safetensors", "optimizer.safetensors"]),
        st.lists(st.tuples(st.integers(0, 30), fields), max_size=3),
        st.sampled_from([0, 0, 0, 0, 1, -1, 8, 2**40]),  # added to the length of the header
        st.sampled_from([None, None, None, np.nan, np.inf, 1e38, 0.0]),  # in place of all numbers
        verbs_of_a_run,
    ),
)
def safetensors(example: Any, folder: Path) -> list[str]:
    name, different, longer, fill, command = example
    for file in (folder / "language").rglob(name):
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        tree, body = json.loads(content[8 : 8 + size]), content[8 + size :]
        for number, (field, value) in different:
            tensor = sorted(tree)[number % max(1, len(tree))] if tree else ""
            if field in ("NAME", "COPY", "REMOVE"):
                old = tree.pop(tensor, None) if field != "COPY" else tree.get(tensor)
                tree |= {} if field == "REMOVE" else {value: old}
            elif isinstance(tree.get(tensor), dict):
                tree[tensor] |= {field: value}
        head = json.dumps(tree).encode()
        body = (
            body if fill is None else np.full(len(body) // 4, fill, np.float32).tobytes() + body[len(body) // 4 * 4 :]
        )
        file.write_bytes(max(0, len(head) + longer).to_bytes(8, "little") + head + body)
    write_sums(folder / "language")
    return of_run(command, "language")


letters = st.text("abcdefghij Ġé\0", min_size=1, max_size=2)
vocabularies = st.one_of(
    st.lists(letters, unique=True, max_size=12).map(lambda one: {text: number for number, text in enumerate(one)}),
    st.dictionaries(texts, st.integers(-1, 300) | st.sampled_from(EDGES), max_size=5),
    trees,
)
merges = st.lists(st.tuples(letters, letters).map(list) | letters.map(" ".join), max_size=6) | trees
tokens = st.fixed_dictionaries(
    {"id": st.integers(0, 400) | st.sampled_from(EDGES), "content": texts},
    optional=dict.fromkeys(("special", "normalized", "lstrip", "rstrip", "single_word"), st.booleans()),
)
parts = st.sampled_from(
    ["ByteLevel", "Whitespace", "BertPreTokenizer", "Sequence", "NFC", "WordPiece", "Split", "none"]
).map(lambda name: None if name == "none" else {"type": name})
tokenizer_changes = st.lists(
    st.one_of(
        st.tuples(st.just(("model", "vocab")), vocabularies),
        st.tuples(st.just(("model", "merges")), merges),
        st.tuples(st.just(("model", "type")), st.sampled_from(["BPE", "WordPiece", "Unigram", "WordLevel", ""])),
        st.tuples(st.just(("model", "unk_token")), texts | trees),
        st.tuples(st.just(("added_tokens",)), st.lists(tokens, max_size=3) | trees),
        st.tuples(
            st.sampled_from([("pre_tokenizer",), ("decoder",), ("normalizer",), ("post_processor",)]), parts | trees
        ),
    ),
    min_size=1,
    max_size=3,
)


@generated(
    "tokenizer, generated", st.tuples(tokenizer_changes, st.sampled_from(["language", "classifier"]), verbs_of_a_run)
)
def tokenizer(example: Any, folder: Path) -> list[str]:
    different, run, command = example
    write_run_file(folder, run, "tokenizer.json", lambda tree: changed(tree, different))
    return of_run(command, run)


@functools.cache
def declared_options(verb: tuple[str, ...]) -> dict[str, Any]:
    """The long options of a command with their types."""
    command = functools.reduce(lambda app, name: app[name], verb, app)
    arguments = command.assemble_argument_collection()
    return {name: one.hint for one in arguments for name in one.names if name.startswith("--")}


places = st.sampled_from(
    ["out", "out.csv", "out.png", "missing/out.png", "text.txt", "language", "graph.json", "", "."]
)
FIRST = {  # what each command is given first
    ("evaluate",): ["language", "classifier", "vision", "graph", "images", "missing"],
    ("predict",): ["language", "classifier", "vision", "graph"],
    ("embed",): ["language", "classifier", "vision"],
    ("import",): ["published", "language", "images", "missing"],
    ("resume",): ["language", "graph"],
    ("show", "attention"): ["language", "classifier", "vision", "graph"],
    ("show", "halting"): ["language"],
    ("show", "gates"): ["language"],
    ("show", "spans"): ["language", "graph"],
    ("show", "pattern"): ["causal", "causal & window(3)", "full"],
    ("family",): ["gpt2", "bert:tiny", "model.json", "gpt", ""],
    ("settings",): ["gpt2", "model.json", "vit"],
    ("completion",): ["bash", "fish", "csh"],
}


@st.composite
def commands(draw: DrawFn) -> list[str]:
    """A command with some of its options, whose values have the declared type, or not."""
    verb = draw(st.sampled_from(sorted(FIRST)))
    given = [*verb, draw(st.sampled_from(FIRST[verb]))]
    declared = {name: kind for name, kind in declared_options(verb).items() if name not in ("--import", "--length")}
    for name in draw(st.lists(st.sampled_from(sorted(declared)), max_size=3, unique=True)) if declared else []:
        kind = str(declared[name])
        if declared[name] is bool:
            given.append(draw(st.sampled_from([name, f"{name}=x"])) if draw(st.booleans()) else name)
            continue
        value = (
            places
            if "Path" in kind or name in ("--data", "--out")
            else numbers
            if "int" in kind or "float" in kind
            else words
        )
        given.append(f"{name}={draw(st.one_of(value, value, value, words if value is not places else places))}")
    return given


@generated("command, generated", commands())
def command(example: list[str], folder: Path) -> list[str]:
    return example
