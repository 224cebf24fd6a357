"""Data that hypothesis generates: records, text and token ids, graphs, images. See bench/hostile_generated.py."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from bench.hostile_generated import generated, numbers
from bench.hostile_inputs import SMALL, TINY
from bench.hostile_types import changed, floats, scalars, texts, trees

cells = st.one_of(
    st.sampled_from(["a", "b", "good film", "bad film"]), texts, numbers, st.sampled_from([None, True, [], {"a": 1}])
)
columns = st.one_of(*[st.just(["text", "label"])] * 3, st.lists(texts, max_size=4))
tables = st.tuples(
    columns,
    st.lists(st.lists(cells, min_size=1, max_size=3), max_size=3),  # rows of any length
    st.lists(st.tuples(cells, cells).map(list), max_size=12),
)
record_verbs = st.sampled_from(["classify", "classify", "regress", "translate", "language", "predict", "evaluate"])


@generated(
    "records, generated", st.tuples(tables, st.sampled_from(["csv", "tsv", "jsonl", "json", "txt"]), record_verbs)
)
def records(example: Any, folder: Path) -> list[str]:
    (names, odd, rows), suffix, task = example
    file = folder / f"table.{suffix}"
    every = [*rows, *odd, *rows]
    if suffix in ("csv", "tsv"):
        output = io.StringIO()
        csv.writer(output, delimiter="," if suffix == "csv" else "\t").writerows([names, *every])
        file.write_bytes(output.getvalue().encode("utf-8", "surrogatepass"))
    else:
        objects = [dict(zip(names, row, strict=False)) for row in every]
        lines = "\n".join(json.dumps(one) for one in objects)
        file.write_text(json.dumps(objects) if suffix == "json" else lines)
    if task in ("predict", "evaluate"):
        return [task, "classifier", "--data", file.name, *(["--out", "out.csv"] if task == "predict" else [])]
    member = {"translate": "transformer", "language": "byte-language"}.get(task, "byte-classifier")
    given = ["task.source=text", "task.target=label"] if task == "translate" else ["--task", task, "task.context=8"]
    return ["train", member, "--data", file.name, *TINY, *SMALL, *given]


contents = st.one_of(
    st.binary(max_size=200).map(lambda one: ("bytes.txt", one)),
    st.text(max_size=90).map(lambda one: ("text.txt", one.encode("utf-8", "surrogatepass"))),
    st.text("ab \n.", min_size=40, max_size=90).map(lambda one: ("text.txt", one.encode())),
    st.recursive(st.integers(-1, 99) | scalars, st.lists, max_leaves=30).map(
        lambda one: ("ids.json", json.dumps(one).encode())
    ),
    st.lists(st.integers(0, 50), min_size=30, max_size=90).map(lambda one: ("ids.json", json.dumps(one).encode())),
)
arrays = st.tuples(
    st.sampled_from(["int64", "int32", "uint16", "uint8", "float32", "bool", "complex64", "<U3", "S2", "M8[D]"]),
    st.lists(st.integers(0, 40), max_size=3),
    st.integers(-2, 60),
)


@generated(
    "text, generated",
    st.tuples(st.one_of(contents, arrays), st.sampled_from(["bytes", "characters", "bpe"]), st.integers(0, 3)),
)
def text(example: Any, folder: Path) -> list[str]:
    content, kind, choice = example
    if len(content) == 3:
        name, (dtype, shape, fill) = "ids.npy", content
        np.save(folder / name, np.full(shape, fill).astype(dtype))
    else:
        name, data = content
        (folder / name).write_bytes(data)
    if choice == 0:
        return ["evaluate", "language", "--data", name, "--limit", "2"]
    return ["train", "byte-language", "--data", name, *TINY, *SMALL, "task.context=8", f"task.tokenizer={kind}"]


entries = st.lists(st.integers(0, 13) | st.integers(-2, 99), max_size=9)
vectors = st.integers(1, 3).flatmap(
    lambda width: st.lists(st.lists(st.floats(-2, 2), min_size=width, max_size=width), min_size=12, max_size=12)
)
edges = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=20)
legal_graphs = st.fixed_dictionaries(
    {"features": vectors, "edges": edges, "labels": st.lists(st.integers(0, 2), min_size=12, max_size=12)},
    optional={"train": st.just([0, 1, 2, 3]), "val": st.just([5, 6]), "test": st.just([7])},
)
odd_fields = st.one_of(
    st.tuples(st.just("features"), st.lists(st.lists(floats, max_size=3), max_size=14) | trees),
    st.tuples(st.just("edges"), st.lists(entries, max_size=5) | trees),
    st.tuples(st.just("labels"), st.lists(texts | floats, min_size=11, max_size=13) | trees),
    st.tuples(st.sampled_from(["train", "val", "test", "more"]), entries | trees),
)
graphs = st.tuples(legal_graphs, st.lists(odd_fields, max_size=2)).map(lambda both: both[0] | dict(both[1]))


@generated("graph, generated", st.tuples(graphs, st.sampled_from(["classify", "classify", "regress", "predict"])))
def graph(example: Any, folder: Path) -> list[str]:
    tree, task = example
    (folder / "graph.json").write_text(json.dumps(tree))
    if task == "predict":
        return ["predict", "graph", "--data", "graph.json", "--out", "out.csv"]
    return ["train", "graph-classifier", "--task", task, "--data", "graph.json", *TINY, *SMALL]


pictures = st.lists(
    st.tuples(
        st.sampled_from(["L", "RGB", "RGBA", "P", "1", "LA", "CMYK", "I;16", "F"]),
        st.tuples(st.integers(1, 12), st.integers(1, 12)) | st.just((8, 8)),
        st.sampled_from(["png", "png", "jpg", "gif", "bmp", "tiff", "webp"]),
        st.sampled_from(["a", "b", "c", ".", "a/b", "é"]),
    ),
    min_size=1,
    max_size=8,
)


@generated(
    "images, generated", st.tuples(pictures, st.booleans(), st.sampled_from(["vit", "image-transformer", "predict"]))
)
def images(example: Any, folder: Path) -> list[str]:
    from PIL import Image

    drawn_images, alone, member = example
    for number, (mode, size, suffix, place) in enumerate(drawn_images):
        target = folder / ("own" if alone else "images") / place / f"x{number}.{suffix}"
        target.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.new(mode, size, 9 * number if mode in ("L", "1", "I;16", "F", "P") else None)
        try:
            picture.save(target)
        except (OSError, ValueError, KeyError):  # the format does not have this mode
            picture.convert("RGB").save(target)
    data = "own" if alone else "images"
    if member == "predict":
        return ["predict", "vision", "--data", data, "--out", "out.csv"]
    return ["train", member, "--data", data, *TINY, *SMALL, *(["model.patch=4"] if member == "vit" else [])]


parts_of_a_config = st.sampled_from(
    ["model_type", "architectures", "n_embd", "n_layer", "n_head", "n_positions", "vocab_size", "activation_function", "n_inner",
     "layer_norm_epsilon", "scale_attn_weights", "add_cross_attention", "tie_word_embeddings", "eos_token_id", "num_labels"]
)  # fmt: skip
config_values = st.one_of(st.sampled_from(["gpt2", "bert", "llama", "relu", "gelu"]), st.integers(-1, 20), trees)


@generated(
    "published model, generated",
    st.tuples(
        st.lists(st.tuples(parts_of_a_config.map(lambda name: (name,)), config_values), max_size=3),
        st.sampled_from([None, None, "model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json"]),
        st.binary(max_size=9),
        st.integers(0, 4000),
    ),
)
def published(example: Any, folder: Path) -> list[str]:
    """A model as transformers saves it, with other values in its config, or with a damaged file."""
    different, damaged, content, place = example
    config = folder / "published" / "config.json"
    config.write_text(json.dumps(changed(json.loads(config.read_text()), different)))
    if damaged is not None and (file := folder / "published" / damaged).exists():
        whole = file.read_bytes()
        file.write_bytes(whole[: place % len(whole)] + content + whole[place % len(whole) + len(content) :])
    return ["import", "published", "--out", "out"]


def save_published(folder: Path) -> None:
    """What the kind above damages: a small GPT-2 with a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    size = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 256}
    GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(folder)
