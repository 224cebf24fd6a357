"""The tables of docs/results/long_context.md; see tables.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from bench.results import Rows, json_lines, mean, metric, sections, table


def each_seed(log: str, names: Sequence[str], *words: str) -> list[float]:
    parts = sections(log)
    return [metric(parts[name], "bits per byte", *(words or ("targets 4999999",))) for name in names]


def seeds(name: str) -> list[str]:
    return [f"{name}-{seed}" for seed in range(3)]


def bits(numbers: Sequence[float]) -> list[str]:
    return [", ".join(f"{one:.3f}" for one in numbers), f"{mean(numbers):.3f}"]


@table("long context")
def long_context(log: str) -> Rows:
    runs = {
        "Transformer-XL, segments of 128, memory 256": "xl",
        "vanilla (`byte-language`), context 128, stride 64": "vanilla",
        "the same, every byte predicted from a full context (first 256,000 bytes)": "",
        "Sparse Transformer, strided, context 1,024": "strided",
        "Sparse Transformer, fixed": "fixed",
        "the same with dense attention": "dense",
        "adaptive span, at most 512, initialized to 51": "span",
        "all spans initialized to 512, without a span penalty": "fullspan",
        "Reformer, 1 hash round, context 1,024": "lsh1",
        "2 rounds": "lsh2",
        "4 rounds": "lsh4",
        "full attention with shared queries and keys": "lshfull",
    }
    found = [
        each_seed(log, seeds(name)) if name else each_seed(log, seeds("vanilla"), "stride 1 ") for name in runs.values()
    ]
    return [
        ["model", "bits per byte, each seed", "mean"],
        *([label, *bits(one)] for label, one in zip(runs, found, strict=True)),
    ]


@table("sparse and dense after 6000 steps")
def sparse_longer(log: str) -> Rows:
    runs = {
        ("4,096", "dense"): ["dense-4096-6000", "dense-4096-1", "dense-4096-2"],
        ("4,096", "fixed"): ["own-4096-6000", "fixed-4096-1", "fixed-4096-2"],
        ("1,024", "dense"): ["dense-1024-6000"],
        ("1,024", "fixed"): ["own-1024-6000"],
    }
    found = {key: each_seed(log, names) for key, names in runs.items()}
    rows = [["context", "attention", "bits per byte, each seed", "mean", "against dense"]]
    for (context, kind), numbers in found.items():
        apart = mean(numbers) - mean(found[context, "dense"])
        rows.append([context, kind, *bits(numbers), f"{apart:+.3f}" if kind != "dense" else ""])
    return rows


@table("sparse and dense after 2400 steps")
def sparse_shorter(log: str) -> Rows:
    stride_128 = [
        [f"{kind}, stride 128, columns 32, 2,400 steps, seed {seed}" for seed in range(3)]
        for kind in ("dense", "fixed")
    ]
    alike = "the same columns for all heads"
    runs: list[tuple[str, list[str], str | None]] = [
        ("dense, `model.stride=128` (here the width of the position table)", stride_128[0], None),
        (f"fixed, stride 128, 32 columns, {alike} (`model.own=false`)", stride_128[1], "128"),
        ("fixed, stride 128, 32 columns", ["own-128-32"], "128"),
        ("strided, stride 128", ["strided-128"], "128"),
        ("dense, `model.stride=256`", ["dense-256"], None),
        ("fixed, stride 256, 64 columns", ["own-256-64"], "256"),
        ("fixed, stride 256, 64 columns, one set per head (`model.uses=by_head`)", ["byhead-256-64"], "256"),
        (f"fixed, stride 256, 64 columns, {alike}", ["alike-256-64"], "256"),
        ("strided, stride 256", ["strided-256"], "256"),
        ("strided, stride 64", ["strided-64"], None),
        ("dense, `model.stride=32`", ["dense, stride 32, 2,400 steps, seed 0"], None),
        ("strided, stride 32", ["strided, stride 32, 2,400 steps, seed 0"], "32"),
        (f"fixed, stride 32, 8 columns, {alike}", ["fixed, stride 32, columns 8, 2,400 steps, seed 0"], "32"),
    ]
    dense = {"128": mean(each_seed(log, stride_128[0])), "256": mean(each_seed(log, ["dense-256"]))}
    dense["32"] = mean(each_seed(log, ["dense, stride 32, 2,400 steps, seed 0"]))
    rows = [["attention", "bits per byte, each seed", "mean", "against dense"]]
    for label, names, against in runs:
        numbers = each_seed(log, names)
        rows.append([label, *bits(numbers), f"{mean(numbers) - dense[against]:+.3f}" if against else ""])
    return rows


@table("sparse and dense on a CPU")
def sparse_cpu(log: str) -> Rows:
    runs = {
        "fixed, the same columns for all heads (`model.own=false`)": "CPU, fixed, all heads alike, 2,400 steps, seed 0",
        "fixed, different columns for each head": "CPU, fixed, columns of their own, 2,400 steps, seed 0",
        "dense": "CPU, dense, 2,400 steps, seed 0",
    }
    found = {label: each_seed(log, [name], "targets 998998")[0] for label, name in runs.items()}
    return [["attention", "bits per byte"], *([label, f"{one:.3f}"] for label, one in found.items())]


@table("adaptive spans trained longer")
def adaptive_longer(log: str) -> Rows:
    parts = sections(log)
    names = {
        "adaptive": "adaptive span, initialized to 51",
        "full": "all spans initialized to 512, without a span penalty",
    }
    rows = [["model", "bits per byte, seed 0", "operations per byte", "training bits at step 2,600, each seed"]]
    for name, label in names.items():
        operations = float(re.findall(r"operations +(\S+)", parts[f"{name}-0"])[0]) / 1e6
        training = [re.findall(r"step 2600: ([\d.]+) bits", parts[one])[0] for one in seeds(name)]
        rows.append([label, f"{each_seed(log, [f'{name}-0'])[0]:.3f}", f"{operations:.1f}M", ", ".join(training)])
    return rows


@table("duplication")
def duplication(log: str) -> Rows:
    rows = [["trained with", "1", "2", "4", "8", "full attention"]]
    for one in json_lines(sections(log)["duplication"]):
        right: Any = one.get("accuracy", one.get("right"))
        trained = (
            "full attention" if one["trained"] == "full" else f"{one['trained']} round{'s' * (one['trained'] > 1)}"
        )
        rows.append([trained, *(f"{right[key]:.3f}" for key in ("1", "2", "4", "8", "full"))])
    return rows


@table("images")
def images(log: str) -> Rows:
    parts = sections(log)
    labels = {
        "local1d": "1-D: query blocks of 112 pixels and the 112 before",
        "local2d": "2-D: query blocks of 7 x 7 with 7 pixels above, left and right (`model.local=2d model.rectangle=7,7 model.around=7,7`)",
    }
    rows = [["attention", "bits per dimension, validation", "test"]]
    for name, label in labels.items():
        numbers = [metric(parts[name], "bits per dimension", f"split {split}") for split in ("valid", "test")]
        rows.append([label, f"{numbers[0]:.3f}", f"**{numbers[1]:.3f}**"])
    return rows
