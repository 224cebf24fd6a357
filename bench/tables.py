"""Computes every table in docs/results from its log. A table stands below a comment that names it and its log:

    <!-- table: halting on a CPU, logs/halting.txt -->
    <!-- python -m bench.begin --table docs/results/logs/begin.txt -->       a program that prints the tables of its log

    python -m bench.tables          # writes all tables again, and below each the facts at the beginning of its log

A test computes them too, so no table can differ from its log.
"""

from __future__ import annotations

import re
import sys
from contextlib import redirect_stdout, suppress
from importlib import import_module
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from bench import (  # noqa: F401  their tables join TABLES
    claims_tables,
    compare,
    defaults,
    effective_context,
    long_context_tables,
    ponder,
    pretraining,
    speed_tables,
    speedrun,
)
from bench.results import TABLES, Rows, json_lines, mean, metric, render, sections, table
from everyformer.train.provenance import read_header

RESULTS = Path(__file__).parent.parent / "docs" / "results"
MARKER = re.compile(
    r"<!-- (table: (?P<name>[^,]+), |python -m (?P<module>bench\.\w+) (?P<option>--\S+) docs/results/)(?P<log>logs/\S+) -->"
)
MISSING = "*This table has no log yet: it is to be measured with the command above.*"


def rewritten(page: Path, shown: bool = True) -> str:
    """The page with its tables computed from their logs, and below each where it comes from. With shown=False without them."""
    lines: list[str] = []
    left = page.read_text().splitlines()
    while left:
        line = left.pop(0)
        lines.append(line)
        if marker := MARKER.fullmatch(line):
            while left and (not left[0] or left[0].startswith(("|", "*`")) or left[0] == MISSING):
                left.pop(0)
            log = page.parent / marker["log"]
            computed = [*computed_lines(marker, log), "", source(log)] if log.exists() else [MISSING]
            lines += ["", *(computed if shown else []), *([""] if left else [])]
    return "\n".join(lines) + "\n"


def computed_lines(marker: re.Match[str], log: Path) -> list[str]:
    """The lines of a table: of a function of this file, or the tables that a program prints of its log."""
    if marker["name"]:
        return render(TABLES[marker["name"]](log.read_text()))
    output, module = StringIO(), import_module(marker["module"])
    with (
        redirect_stdout(output),
        patch.object(sys, "argv", [marker["module"], marker["option"], str(log)]),
        suppress(SystemExit),
    ):
        module.main()
    lines = [line for line in output.getvalue().splitlines() if not line or line.startswith("|")]
    return "\n".join(lines).strip().splitlines()


def source(log: Path) -> str:
    facts = read_header(log)
    where = f"commit {facts['commit']}; {facts['machine']}; {facts['versions']}; seed {facts['seed']}; {facts['date']}"
    return f"*`{facts['command']}`; {where}. [Log](logs/{log.name})*"


# Copy, reverse and addition


@table("algorithms")
def algorithms(log: str) -> Rows:
    names = {"fixed": "universal, 4 steps", "act": "universal, halting", "equal": "transformer, 1 layer"}
    names["deep"] = "transformer, 4 layers"
    lengths = (40, 80, 120, 200, 400)
    rows = [["task", "model", *map(str, lengths)]]
    for one in json_lines(log):
        if "seeds" in one:
            cells = [one[f"character_accuracy_{length}"] for length in lengths]
            rows.append(
                [one["data"], names[one["model"]], *(f"{m:.2f} ({low:.2f}-{high:.2f})" for m, low, high in cells)]
            )
    return rows


# Attention

SPEED = re.compile(r"^(\w+) +([\d,]+) +(\d+) +([\d.]+) +([\d.]+)x +([\d,]+)(?: +[\d.]+ +[\d.]+)?$", re.MULTILINE)
GROWTH = re.compile(r"^(\w+) +time grows as length\^([\d.]+), memory as length\^([\d.]+)$", re.MULTILINE)


@table("attention on a GPU")
def attention_gpu(log: str) -> Rows:
    from bench.gpu import LENGTHS, TARGETS

    found = {(m[1], int(m[2].replace(",", ""))): (float(m[4]), float(m[5])) for m in SPEED.finditer(log)}
    rows = [["kind", *(cell for length in LENGTHS for cell in (f"{length:,}", "speed relative to dense", "target"))]]
    for kind in dict.fromkeys(kind for kind, _ in found):
        cells = [kind]
        for length, target in zip(LENGTHS, TARGETS.get(kind, (None, None)), strict=True):
            milliseconds, speed = found[kind, length]
            cells += [f"{milliseconds:.2f} ms", f"{speed:.2f}", "" if target is None else f"{target:.3g}"]
        rows.append(cells)
    return rows


@table("attention on a CPU")
def attention_cpu(log: str) -> Rows:
    found = {(m[1], m[2]): f"{float(m[4]):,.0f} ms, {m[6]} MiB" for m in SPEED.finditer(log)}
    lengths = list(dict.fromkeys(length for _, length in found))
    rows = [["kind", *lengths, "time grows as", "memory grows as"]]
    for kind, time, memory in GROWTH.findall(log):
        rows.append([kind, *(found[kind, length] for length in lengths), f"n^{time}", f"n^{memory}"])
    return rows


@table("own patterns")
def own_patterns(log: str) -> Rows:
    names = {
        "DilatedGlobal": "every fourth of the last 1,024 keys, and the first 16",
        "RandomBlocks": "an eighth of the blocks of 64 keys, at random",
        "Halves": "the keys of the same block of 2,048",
    }
    rows = [["pattern", "positions", "flex", "sdpa with a mask", "blocked"]]
    for line in log.splitlines():
        if match := re.match(r"(\w+) +([\d,]+) positions: ", line):
            times = {kernel: float(ms) for kernel, ms in re.findall(r"(\w+) ([\d.]+) ms", line)}
            best = min(times, key=lambda kernel: times[kernel])
            texts = [
                f"**{times[k]:.2f} ms**" if k == best else f"{times[k]:.2f} ms" for k in ("flex", "sdpa", "blocked")
            ]
            rows.append([names[match[1]], match[2], *texts])
    return rows


@table("reversible layers")
def depth(log: str) -> Rows:
    found = {
        (one["layers"], one["residual"]): f"{one['MiB']} MiB, {one['ms']:,.0f} ms"
        for one in json_lines(log)
        if "layers" in one
    }
    layers = dict.fromkeys(layers for layers, _ in found)
    return [["layers", "reversible", "plain"], *([str(n), found[n, "reversible"], found[n, "plain"]] for n in layers)]


@table("segment memory")
def reuse(log: str) -> Rows:
    rows = [["attention length", "recomputed", "with memory", "speedup"]]
    for one in json_lines(log):
        if "attention_length" in one:
            times = one["ms_per_byte_encoding_again"], one["ms_per_byte_with_memory"]
            texts = [f"{times[0]:,.0f} ms a byte", f"{times[1]:.2f} ms a byte", f"{one['faster']:,}x"]
            rows.append([f"{one['attention_length']:,}", *texts])
    return rows


@table("short spans")
def spans(log: str) -> Rows:
    found = [one for one in json_lines(log) if "span" in one]
    return [
        ["span", "step", "memory"],
        *([f"{one['span']:,}", f"{one['ms']:,.0f} ms", f"{one['MiB']:,.0f} MiB"] for one in found),
    ]


# Contracts and control


@table("generation")
def generation(log: str) -> Rows:
    head = ["model", "batch", "threads", "way", "tokens/s", "least", "most", "processor ms a step", "of transformers"]
    number = r"(\d{1,3}(?:,\d{3})*)"  # large ones stand side by side without a space
    row = rf"^(bytes|gpt2) +(\d+) +(\d+)  (\w+) +{number} *{number} *{number} +([\d.]+) *([\d.]+x)?$"
    return [head, *(list(cells) for cells in re.findall(row, log, re.MULTILINE))]


@table("contracts")
def contracts(log: str) -> Rows:
    found = re.findall(r"^(\w+) +(\d+) +(\S+) +(\S+)  passed$", log, re.MULTILINE)
    return [["contract", "cells", "worst error", "limit"], *([n, f"{int(c):,}", e, limit] for n, c, e, limit in found)]


@table("agents")
def agents(log: str) -> Rows:
    from bench.control import AGENTS
    from bench.control import table as lines

    last = {(one["task"], one["agent"], one["seed"]): one for one in json_lines(log) if one["agent"] in AGENTS}
    order = sorted(last.values(), key=lambda one: (one["task"], list(AGENTS).index(one["agent"]), one["seed"]))
    head, _, *rest = lines(order).splitlines()
    return [line.strip("| ").split(" | ") for line in (head, *rest)]


@table("deep character models")
def deep_character(log: str) -> Rows:
    parts = sections(log)
    bits = {name: metric(part, "bits per byte", "targets 4999999") for name, part in parts.items()}
    return [
        ["losses", "seed 0", "seed 1"],
        ["of every layer, two bytes ahead", *(f"**{bits[f'deep-{seed}']:.3f}**" for seed in (0, 1))],
        ["of the last layer only", *(f"{bits[f'bare-{seed}']:.3f}" for seed in (0, 1))],
    ]


# Experiments: a table of one row for each log


def accuracy(log: str, *words: str) -> float:
    return 100 * metric(log, "accuracy", "split test", *words)


def test_accuracies(log: str) -> list[float]:
    """In percent, of the evaluations on the test split in a log of `everyformer evaluate`."""
    return [100 * float(one) for one in re.findall(r"^step \d+  test: accuracy ([\d.]+) ", log, re.MULTILINE)]


@table("Multi30k")
def multi30k(log: str) -> Rows:
    rows = [["", "BLEU", "perplexity"]]
    for label, split in (("test 2016 (target: BLEU 38)", "test_2016_flickr"), ("validation", "valid")):
        bleu, perplexity = (metric(log, name, f" {split}: ") for name in ("bleu", "perplexity"))
        rows.append([label, f"{bleu:.2f}", f"{perplexity:.2f}"])
    return rows


@table("MNIST")
def mnist(log: str) -> Rows:
    test, valid = (100 * metric(log, "accuracy", f" {split}: ") for split in ("test", "valid"))
    return [["test accuracy (target: 98.5 %)", "validation"], [f"**{test:.2f} %**", f"{valid:.2f} %"]]


@table("images")
def images(log: str) -> Rows:
    rows = [["attention", "bits per dimension, validation", "test"]]
    runs = re.split(r"^# command: .* train ", log, flags=re.MULTILINE)[1:]
    for run in runs:
        pattern = re.findall(r"'model\.pattern=(.*?)'", run)[0]
        valid, test = (metric(run, "bits per dimension", f" {split}: ") for split in ("valid", "test"))
        rows.append([f"`{pattern}`", f"{valid:.3f}", f"**{test:.3f}**"])
    return rows


@table("masked pretraining")
def masked_pretraining(log: str) -> Rows:
    parts = sections(log, "# ")
    columns = [
        [accuracy(parts[f"{kind}, seed {seed}"]) for seed in range(3)] for kind in ("fine-tuned", "from scratch")
    ]
    rows = [["seed", "fine-tuned", "from scratch"]]
    rows += [[str(seed), *(f"{column[seed]:.2f} %" for column in columns)] for seed in range(3)]
    return [*rows, ["mean", *(f"**{mean(column):.2f} %**" for column in columns)]]


@table("Cora")
def cora(log: str) -> Rows:
    found = test_accuracies(log)
    seeds = [f"seed {seed}" for seed in range(len(found))]
    return [[*seeds, "mean (target: 80 %)"], [*(f"{one:.1f} %" for one in found), f"**{mean(found):.1f} %**"]]


@table("byte model")
def byte_language(log: str) -> Rows:
    ways = {
        "stride 1, float16": ("stride 1 ", "fp16"),
        "stride 1, bfloat16": ("stride 1 ", "bf16"),
        "stride 128, bfloat16": ("stride 128", "targets 4999999"),
    }
    return [
        ["evaluation", "bits per byte (target: 1.343)"],
        *([way, f"{metric(log, 'bits per byte', *words):.3f}"] for way, words in ways.items()),
    ]


@table("byte classifier")
def byte_classifier(log: str) -> Rows:
    found = test_accuracies(log)
    steps = [int(one) for one in re.findall(r"^step (\d+)  test: ", log, re.MULTILINE)]
    return [
        ["", *(f"seed {seed}" for seed in range(len(found))), "mean (target: 85 %)"],
        ["test accuracy", *(f"{one:.2f} %" for one in found), f"**{mean(found):.2f} %**"],
        ["best step", *map(str, steps), ""],
    ]


# Halting and recurrent nets


def halting(log: str, digits: int) -> Rows:
    found = {(one["halted"], one["way"]): one for one in json_lines(log) if one["halted"] is not None}
    rows = [
        ["halted after one step", "steps per position", "forward: all", "gather", "forward and backward: all", "gather"]
    ]
    for halted in dict.fromkeys(halted for halted, _ in found):
        both = [found[halted, way] for way in ("all", "gather")]
        steps = both[0].get("steps_per_position", both[0].get("steps_a_position"))
        times = [f"{one[what]:,.{digits}f}" for what in ("forward", "step") for one in both]
        rows.append([f"{halted:.0%}".replace("%", " %"), f"{steps:g}", *times])
    return rows


TABLES["halting on a CPU"] = lambda log: halting(log, 0)
TABLES["halting on a GPU"] = lambda log: halting(log, 1)


@table("a recurrent step")
def recurrent_step(log: str) -> Rows:
    ways = [("lstm", "reference"), ("lstm", "auto"), ("ablated-lstm", "reference"), ("ablated-lstm", "auto")]
    ways += [("byte-language", "auto"), ("recurrence", "loop"), ("recurrence", "scan")]
    rows = [
        [
            "size, batch",
            "positions",
            "lstm: steps",
            "fast",
            "ablated-lstm: steps",
            "fast",
            "byte-language",
            "loop",
            "scan",
        ]
    ]
    for command, part in sections(log, "# command: ").items():
        found = {(one["member"], one["kernel"], one["length"]): one for one in json_lines(part)}
        for length in dict.fromkeys(length for _, _, length in found):
            size = "tiny" if "--size tiny" in command else "byte (9.7M)"
            ones = [found[member, kernel, length] for member, kernel in ways]
            rows.append([f"{size}, {ones[0]['batch']}", f"{length:,}", *(f"{one['ms']:,.1f}" for one in ones)])
    return rows


# Beginning with an empty memory, and default learning rates


@table("bits by position")
def begin(log: str) -> Rows:
    found = list(json_lines(log))
    names = list(found[0]["by_position"])
    rows = [["member", "begins anew after", "rate", *names, "carried"]]
    for one in found:
        after = f"{one['restart']} segments" if one["restart"] else "never"
        bits = [f"{one['by_position'][name]:.2f}" for name in names]
        rows.append(
            [f"`{one['member']}`", after, f"{one['lr']:.2g}" if "lr" in one else "", *bits, f"{one['carried']:.2f}"]
        )
    return rows


@table("learning rates")
def rates(log: str) -> Rows:
    rows = [["model", "settings", "rate", "result"]]
    for one in json_lines(log):
        result = f"{one['accuracy']:.1%} right" if "accuracy" in one else f"{one['bits_per_byte']:.3f} bits per byte"
        if "order" in one:  # of bench.ngram
            rows.append([f"{one['order']}-gram", "", "", result])
        else:
            rows.append([f"`{one['member']}`, {one['task']}", f"`{one['settings']}`", f"{one['lr']:.2g}", result])
    return rows


# Memory plans, and GPT-2's step: the program prints the table


def printed(log: str) -> Rows:
    lines = [line for line in log.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")] for line in lines]


PRINTED = ("planned memory on a CPU", "planned memory on a GPU", "a step of GPT-2", "the page")
for name in (*PRINTED, "the loss in chunks", "compilation", "memory of spans"):
    TABLES[name] = printed


def main() -> None:
    for page in sorted(RESULTS.glob("*.md")):
        text = rewritten(page)
        if text != page.read_text():
            page.write_text(text)
            print(f"wrote {page.name}")


if __name__ == "__main__":
    main()
