"""The record of the GPU: the speed of attention, the tests that need a GPU, and the contracts on CUDA.

    make gpu                                              # python -m bench.gpu --out docs/results
    PYTHONPATH=src python -m bench.gpu --commit 0123abc   # without git and .venv

Attention is timed first, alone on the GPU; then `tests/device` runs with several workers, or with one where pytest-xdist is not
installed. Needs the dependencies of everyformer and pytest, no extra and no network. If one part fails, the other still runs. Writes
FOLDER/logs/gpu.txt, FOLDER/attention_gpu.png and FOLDER/gpu.md, which is computed from the log (`--only-page` writes it again, also
from a log that breaks off). Takes about five minutes on one H200. Exits with 1 if a test or a contract fails.
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import torch

from everyformer.train.provenance import COMMIT, read_header, start_log

ROOT = Path(__file__).parent.parent
ATTENTION, TESTS = "attention", "tests"  # the sections of the log
SPEED = re.compile(r"(\w+) +([\d,]+) +(\d+) +([\d.]+) +([\d.]+)x +([\d,]+)")
CONTRACT = re.compile(r"^(\w+) +(\d+) +(\S+) +(\S+)  (passed|FAILED)", re.MULTILINE)
BROKEN = re.compile(r"^(?:E +)?FAILED: (.*)$", re.MULTILINE)
TEST = re.compile(r"\] (?P<outcome>PASSED|FAILED|ERROR) (?P<file>tests/\S+?\.py)::(?P<name>\w+)")  # of a worker
ALONE = re.compile(r"^(?P<file>tests/\S+?\.py)::(?P<name>\w+)(\[.*\])? (?P<outcome>PASSED|FAILED|ERROR)", re.MULTILINE)
STATUS = re.compile(r"^exit status (-?\d+), ", re.MULTILINE)
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


def section(log: TextIO, name: str, words: list[str], folder: Path) -> int:
    """Run a program of this Python and write its output to the log and to the terminal. Returns its exit status."""
    places = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}
    write(log, f"== {name}: python {' '.join(words)}")
    start = time.perf_counter()
    paths = {sys.executable: "python", str(ROOT): ".", f"{sysconfig.get_path('purelib')}/": ""}  # of this machine alone
    options: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([sys.executable, *words], cwd=folder, env=environment, **options) as program:
        for line in program.stdout or ():
            for path, short in paths.items():
                line = line.replace(path, short)
            write(log, line.rstrip())
    write(log, f"exit status {program.returncode}, {time.perf_counter() - start:.0f} s")
    return program.returncode


def write(log: TextIO, line: str) -> None:
    for file in (log, sys.stdout):
        print(line, file=file, flush=True)


def page(path: Path) -> str:
    """The record as a page, from its log."""
    facts, text = read_header(path), path.read_text()
    speed, tests = (text.partition(f"\n== {name}: ")[2].partition("\n== ")[0] for name in (ATTENTION, TESTS))
    found = [match for pattern in (TEST, ALONE) for match in pattern.finditer(tests)]
    counts = Counter((match["file"], match["name"], match["outcome"]) for match in found)
    contracts = [match.groups() for match in CONTRACT.finditer(tests)]
    broken = [row[0] for row in contracts if row[4] == "FAILED"]
    summary = SUMMARY.search(tests)
    rows, missed = speed_rows(speed)
    lines = [
        "# The record of the GPU",
        "",
        verdict(speed, tests, counts, contracts, missed),
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
        *(f"- Broken: {line}" for line in dict.fromkeys(BROKEN.findall(tests))),
        *([""] if broken else []),
        "## Tests",
        "",
        f"{summary[1] if summary else 'The run did not end'}{f', {float(summary[2]):.0f} s' if summary else ''}.",
        "",
        "| test | cases | failed |",
        "| --- | --- | --- |",
    ]
    for file, name in dict.fromkeys((match["file"], match["name"]) for match in found):
        bad = sum(counts[file, name, outcome] for outcome in ("FAILED", "ERROR"))
        words = name.removeprefix("test_").replace("_", " ")
        lines.append(f"| {words} | {counts[file, name, 'PASSED'] + bad} | {bad} |")
    return "\n".join(lines) + "\n"


def verdict(
    speed: str, tests: str, counts: Counter[tuple[str, str, str]], contracts: list[tuple[str, ...]], missed: list[str]
) -> str:
    """What was tested on the GPU. The first sentence names all that failed."""
    total, failed = sum(counts.values()), sum(count for key, count in counts.items() if key[2] != "PASSED")
    checks, broken = sum(int(row[1]) for row in contracts), [row[0] for row in contracts if row[4] == "FAILED"]
    failures = [f"{failed:,} of {total:,} tests failed"] if failed else []
    if broken:
        failures.append(f"these contracts were broken: {', '.join(broken)}")
    if missed:
        failures.append(f"these speeds of attention missed their targets: {', '.join(missed)}")
    if status(speed) != "exit status 0":
        failures.append(f"attention was not timed to the end ({status(speed)})")
    if not SUMMARY.search(tests):
        failures.append(f"the tests did not run to the end ({status(tests)})")
    counted = f"{total:,} tests and {checks:,} checks of the contracts on CUDA"
    if not failures:
        return f"Nothing failed on a GPU: {counted} passed, and attention reached the targets of its speed."
    return f"On a GPU {'; '.join(failures)}. There were {counted}."


def status(text: str) -> str:
    """How a section of the log ended."""
    found = STATUS.search(text)
    return f"exit status {found[1]}" if found else "its log breaks off"


def speed_rows(text: str) -> tuple[list[str], list[str]]:
    """The table of speeds, and the kinds that miss a target."""
    found = {(m[1], int(m[2].replace(",", ""))): (float(m[4]), float(m[5]), m[6]) for m in SPEED.finditer(text)}
    lengths = sorted({length for _, length in found})
    heads = "".join(f"| {length:,} | speed | MiB " for length in lengths)
    rows, missed = [f"| kind {heads}|", "| --- " * (1 + 3 * len(lengths)) + "|"], []
    for kind in dict.fromkeys(kind for kind, _ in found):
        cells = [kind]
        for length in lengths:
            if (kind, length) not in found:  # the program failed before
                cells += ["-"] * 3
                continue
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
    path, failed = options.out / "logs" / "gpu.txt", 0
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
            failed |= section(log, ATTENTION, bench, options.out)
            tests = ["-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:benchmark"]
            workers = ["-n", str(options.workers), "--dist", "worksteal"] if find_spec("xdist") else []
            failed |= section(log, TESTS, [*tests, *workers, "tests/device"], ROOT)
    (options.out / "gpu.md").write_text(page(path))
    print(f"wrote {options.out / 'gpu.md'} and {path}")
    raise SystemExit(int(failed != 0))


if __name__ == "__main__":
    main()
