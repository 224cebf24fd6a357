"""The record of the GPU: the speed of attention, the tests that need a GPU, and the contracts on CUDA.

    make gpu                                              # python -m bench.gpu --out docs/results
    PYTHONPATH=src python -m bench.gpu --commit 0123abc   # without git and .venv

Attention is timed first, alone on the GPU; then `tests/device` runs with several workers. Writes FOLDER/logs/gpu.txt,
FOLDER/attention_gpu.png and FOLDER/gpu.md, which is computed from the log alone (`--only-page` writes it again). Takes about five
minutes on one H200. Exits with 1 if a test or a contract fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import TextIO

import torch

from everyformer.train.provenance import COMMIT, read_header, start_log

ROOT = Path(__file__).parent.parent
ATTENTION, TESTS = "attention", "tests"  # the sections of the log
SPEED = re.compile(r"(\w+) +([\d,]+) +(\d+) +([\d.]+) +([\d.]+)x +([\d,]+)")
CONTRACT = re.compile(r"^(\w+) +(\d+) +(\S+) +(\S+)  (passed|FAILED)", re.MULTILINE)
BROKEN = re.compile(r"^FAILED: (.*)$", re.MULTILINE)
TEST = re.compile(r"\] (PASSED|FAILED|ERROR) (tests/\S+?\.py)::(\w+)(\[.*\])?")
SUMMARY = re.compile(r"=+ (.*) in ([\d.]+)s.*=+")
LENGTHS = (16_384, 65_536)
# The speed relative to dense attention that each kind must reach at these lengths.
TARGETS = {
    "local": (6, 25),
    "window": (6, 25),
    "fixed": (4, 12),
    "strided": (4, 12),
    "hashed": (1.5, 5),
    "span": (4, 15),
    "relative": (1 / 1.6, 1 / 1.6),
}


def section(log: TextIO, name: str, words: list[str], folder: Path = ROOT) -> int:
    """Run a program of this Python and write its output to the log and to the terminal. Returns its exit status."""
    places = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}
    write(log, f"== {name}: python {' '.join(words)}")
    start = time.perf_counter()
    program = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert program.stdout is not None
    paths = {sys.executable: "python", str(ROOT): ".", f"{sysconfig.get_path('purelib')}/": ""}  # of this machine alone
    for line in program.stdout:
        for path, short in paths.items():
            line = line.replace(path, short)
        write(log, line.rstrip())
    status = program.wait()
    write(log, f"exit status {status}, {time.perf_counter() - start:.0f} s")
    return status


def write(log: TextIO, line: str) -> None:
    for file in (log, sys.stdout):
        print(line, file=file, flush=True)


def page(path: Path) -> str:
    """The record as a page, from its log."""
    facts, text = read_header(path), path.read_text()
    speed, tests = (text.partition(f"\n== {name}: ")[2].partition("\n== ")[0] for name in (ATTENTION, TESTS))
    counts = Counter((match[2], match[3], match[1]) for match in TEST.finditer(tests))
    functions = list(dict.fromkeys((file, name) for file, name, _ in counts))
    failed = sum(count for (_, _, outcome), count in counts.items() if outcome != "PASSED")
    contracts = [match.groups() for match in CONTRACT.finditer(tests)]
    checks, broken = sum(int(row[1]) for row in contracts), [row[0] for row in contracts if row[4] == "FAILED"]
    summary = SUMMARY.search(tests)
    rows, missed = speed_rows(speed)
    lines = [
        "# The record of the GPU",
        "",
        f"{sum(counts.values()):,} tests on a GPU: {failed or 'none'} failed. {checks:,} checks of the contracts on CUDA: "
        f"{', '.join(broken) or 'none'} broken. Speeds of attention that miss their target: {', '.join(missed) or 'none'}.",
        "",
        f"    {facts['command']}",
        "",
        f"Commit {facts['commit']}, {facts['date']}; {facts['machine']}; {facts['versions']}; seed {facts['seed']} and those set in "
        f"the tests. Written by `python -m bench.gpu --only-page` from the [log](logs/{path.name}).",
        "",
        "## Speed of attention",
        "",
        "One forward and backward pass of 65,536 positions in bfloat16, 8 heads of width 64; [attention](attention.md) describes "
        "the kinds. Speeds are relative to dense attention, the target is in brackets.",
        "",
        *rows,
        "",
        "![Time and memory of one sequence by length](attention_gpu.png)",
        "",
        "## The contracts on CUDA",
        "",
        "Every member at its tiny size, and small models in which every two parts occur together, in float64.",
        "",
        "| contract | checks | worst error | limit |",
        "| --- | --- | --- | --- |",
        *(f"| {name} | {int(count):,} | {error} | {limit} |" for name, count, error, limit, _ in contracts),
        "",
        *(f"- Broken: {line}" for line in BROKEN.findall(tests)),
        *([""] if broken else []),
        "## Tests",
        "",
        f"{summary[1] if summary else 'The run did not end'}{f', {float(summary[2]):.0f} s' if summary else ''}.",
        "",
        "| test | cases | failed |",
        "| --- | --- | --- |",
    ]
    for file, name in functions:
        bad = sum(counts[file, name, outcome] for outcome in ("FAILED", "ERROR"))
        words = name.removeprefix("test_").replace("_", " ")
        lines.append(f"| {words} | {counts[file, name, 'PASSED'] + bad} | {bad} |")
    return "\n".join(lines) + "\n"


def speed_rows(text: str) -> tuple[list[str], list[str]]:
    """The table of speeds, and the kinds that miss a target."""
    found = {(m[1], int(m[2].replace(",", ""))): (float(m[4]), float(m[5]), m[6]) for m in SPEED.finditer(text)}
    lengths = sorted({length for _, length in found})
    heads = "".join(f"| {length:,} | speed | MiB " for length in lengths)
    rows, missed = [f"| kind {heads}|", "| --- " * (1 + 3 * len(lengths)) + "|"], []
    for kind in dict.fromkeys(kind for kind, _ in found):
        cells = [kind]
        for length in lengths:
            milliseconds, ratio, mib = found[kind, length]
            target = dict(zip(LENGTHS, TARGETS.get(kind, ()), strict=False)).get(length)
            cells += [f"{milliseconds:.2f} ms", f"{ratio:.2f}" + (f" ({target:.3g})" if target else ""), mib]
            if target is not None and ratio < target:
                missed.append(f"{kind} at {length:,}")
        rows.append(f"| {' | '.join(cells)} |")
    return rows, missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--commit", help="default: that of the checkout")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--only-page", action="store_true", help="write the page again from the log")
    options = parser.parse_args()
    path, status = options.out / "logs" / "gpu.txt", 0
    if not options.only_page:
        if not torch.cuda.is_available():
            raise SystemExit("torch finds no CUDA GPU here; run this on a machine with one")
        if options.commit:
            os.environ[COMMIT] = options.commit
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as log:
            with redirect_stdout(log):
                start_log(seed=0, packages=("pytest",))
            bench = ["-m", "everyformer", "bench", "attention", "--repeats", "15", "--figure", "attention_gpu.png"]
            status |= section(log, ATTENTION, bench, options.out)
            tests = ["-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:benchmark", "-n", str(options.workers)]
            status |= section(log, TESTS, [*tests, "--dist", "worksteal", "tests/device"])
    (options.out / "gpu.md").write_text(page(path))
    print(f"wrote {options.out / 'gpu.md'} and {path}")
    raise SystemExit(min(status, 1))


if __name__ == "__main__":
    main()
