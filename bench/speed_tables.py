"""The tables of `everyformer bench train`, from its logs."""

from __future__ import annotations

import re

from bench.results import Rows, table

CEILING = re.compile(
    r"^(matrix product.*|copy in memory): ([\d,.]+) (TFLOP/s|GB/s) \(([\d,.]+) to ([\d,.]+)\)$", re.MULTILINE
)
STEP = re.compile(r"^([a-z][\w-]+) +((?:everyformer|plain|transformers)[\w-]*) +(.+)$", re.MULTILINE)
PROFILE = re.compile(r"^([\w-]+) ([\w-]+): ([\d.]+) ms a step, ([\d.]+%) of it without any (kernel|operator)$")
KERNEL = re.compile(r"^ +([\d.]+%) +([\d.]+) ms +(\d+) x  (.*)$")


@table("ceilings")
def ceilings(log: str) -> Rows:
    rows = [["ceiling", "median", "least", "most"]]
    return [*rows, *([name, f"{rate} {unit}", least, most] for name, rate, unit, least, most in CEILING.findall(log))]


@table("training")
def training(log: str) -> Rows:
    head = [
        "row",
        "way",
        "ms a step",
        "least",
        "most",
        "processor ms",
        "tokens/s",
        "TFLOP/s",
        "of the matrix rate",
        "GiB",
        "warm-up",
    ]
    rows = [head]
    for row, way, rest in STEP.findall(log):
        failed = rest.startswith("failed: ")
        rows.append([row, way, *([rest] + [""] * (len(head) - 3) if failed else rest.split())])
    return rows


@table("profiles of training")
def profiles(log: str) -> Rows:
    """The slowest five of each row."""
    rows, shown = [["row", "way", "ms a step", "idle", "kernel or operator", "share", "ms", "calls"]], 0
    first: list[str] = []
    for line in log.splitlines():
        if found := PROFILE.match(line):
            first, shown = list(found.groups()[:4]), 0
        elif (found := KERNEL.match(line)) and shown < 5:
            share, milliseconds, calls, name = found.groups()
            rows.append([*(first if shown == 0 else [""] * 4), f"`{name[:60]}`", share, milliseconds, calls])
            shown += 1
    return rows


@table("members")
def members(log: str) -> Rows:
    head = [
        "member",
        "task",
        "parameters",
        "ms a step",
        "least",
        "most",
        "processor ms",
        "targets/s",
        "tokens/s",
        "MiB",
    ]
    rows = [head]
    for line in log.partition("\nmember ")[2].splitlines()[1:]:
        name, _, rest = line.partition(" ")
        cells = rest.split()
        if "failed:" in cells[:1]:
            rows.append([name, rest.strip(), *[""] * (len(head) - 2)])
        elif len(cells) == len(head) - 1:
            rows.append([f"`{name}`", *cells])
    return rows


@table("evaluation")
def evaluation(log: str) -> Rows:
    lines = [line.split() for line in log.splitlines() if line.startswith(("forward ", "evaluate "))]
    return [["way", "positions/s", "least", "most", "bytes/s", "of the forward pass"], *lines]
