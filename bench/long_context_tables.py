"""The tables of docs/results/long_context.md; see tables.py."""

from __future__ import annotations

from collections.abc import Sequence

from bench.results import Rows, mean, metric, sections, table


def each_seed(log: str, names: Sequence[str]) -> list[float]:
    parts = sections(log)
    return [metric(parts[name], "bits per byte", "targets 4999999") for name in names]


def bits(numbers: Sequence[float]) -> list[str]:
    return [", ".join(f"{one:.3f}" for one in numbers), f"{mean(numbers):.3f}"]


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
