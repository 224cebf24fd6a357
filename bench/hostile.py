"""Gives the command line thousands of damaged files and wrong values, and checks how each command ends.

    OMP_NUM_THREADS=1 python -m bench.hostile --count 10000 --seed 0 --processes 2 --log docs/results/logs/hostile.txt
    python -m bench.hostile --only 1234 --seed 0       # input 1234 alone: its command, its output and how it ended

An input is a real file (a recipe, a model, weights, a tokenizer, text, records, images, a graph) with some values, keys or bytes
changed, or a command with wrong settings, prompts or patterns; see bench/hostile_inputs.py. A command must end with a result (exit code 0)
or with one line that says what is wrong (exit code 1 or 2), in less than 60 seconds of a processor and 3 GiB. These are failures:

    traceback   the command raised an error that the command line does not show as one line
    lines       it was refused with more than one line, or with none
    raw         the line is the message of an error of Python or torch, which names neither the value nor the remedy
    time        it took longer, or 15 minutes by the clock
    died        the process ended by a signal
    wrote       it wrote elsewhere than it was told, or changed a file that was there

The parent imports torch once and forks a process for every few inputs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.hostile_generated import GENERATED, example, keep_files_in
from bench.hostile_generated_data import save_published
from bench.hostile_inputs import KINDS, RUN, SMALL, WORDS, write_sums
from bench.hostile_requests import send
from everyformer.cli.main import main as command_line
from everyformer.train.provenance import COMMIT, header, provenance

ROOT = Path(__file__).parent.parent
SECONDS, MEMORY, CHUNK = 60.0, 3 << 30, 50
WAIT = 900.0  # seconds without a result, after which a command hangs
MODULES = (
    *(
        "everyformer.study.curves",
        "everyformer.study.plan",
        "everyformer.task.attention_maps",
        "everyformer.train.loop",
    ),
    *("everyformer.train.trained", "everyformer.train.imported", "matplotlib.backends.backend_agg", "tokenizers"),
    *("PIL.Image", "pyarrow.parquet", "torch._dynamo"),
)
OUTPUTS = ("out", "out.csv", "out.png", "runs")  # what the commands are told to write
RAW = re.compile(
    r"object has no attribute|object is not|not subscriptable|unsupported operand|index out of range|invalid literal for|"
    r"could not convert|not enough values|too many values|NoneType|Traceback|<class '|size mismatch|c10::|aten::|"
    r"unexpected keyword|missing \d+ required|codec can't|RuntimeError|KeyError|TypeError"
)
NOTHING = re.compile(r"error: '?\w*'?$")
NAMES = (*KINDS, *GENERATED)
ENDS = ("result", "refused", "traceback", "lines", "raw", "time", "died", "wrote")


# The files that are damaged


def prepare(folder: Path) -> None:
    """Write files of each kind, and train the runs that read them."""
    from PIL import Image

    rng = random.Random(0)
    lines = [" ".join(rng.choices(WORDS, k=6)) for _ in range(30)]
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    (folder / "text.txt.gz").write_bytes(gzip.compress((folder / "text.txt").read_bytes(), mtime=0))
    np.save(folder / "ids.npy", np.array([rng.randrange(50) for _ in range(300)], dtype=np.int64))
    (folder / "ids.json").write_text(json.dumps([rng.randrange(50) for _ in range(300)]))
    rows = [(line, str(index % 3)) for index, line in enumerate(lines)]
    for name, comma in (("records.csv", ","), ("records.tsv", "\t")):
        (folder / name).write_text("".join(f"{text}{comma}{label}\n" for text, label in [("text", "label"), *rows]))
    objects = [{"text": text, "label": label} for text, label in rows]
    (folder / "records.jsonl").write_text("".join(json.dumps(one) + "\n" for one in objects))
    (folder / "records.json").write_text(json.dumps(objects))
    with suppress(ImportError):
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(
            pyarrow.table({"text": lines, "label": [label for _, label in rows]}), folder / "records.parquet"
        )
    for index in range(12):
        place = folder / "images" / "ab"[index % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.frombuffer(rng.randbytes(64), np.uint8).reshape(8, 8)
        Image.fromarray(pixels).save(place / f"{index}.png")
    nodes = range(12)
    graph = {"features": [[rng.random(), rng.random()] for _ in nodes], "edges": [[node, (node + 1) % 12] for node in nodes],
             "labels": [node % 2 for node in nodes], "train": [0, 1, 2, 3, 4], "val": [5, 6], "test": [7, 8]}  # fmt: skip
    (folder / "graph.json").write_text(json.dumps(graph))
    shutil.copy(ROOT / "src" / "everyformer" / "cli" / "settings.json", folder)
    shutil.copytree(ROOT / "tests" / "data" / "gpt2_excerpt", folder / "gpt2")
    save_published(folder / "published")
    small = (*RUN, *SMALL)
    for name, words in {
        "language": (
            "byte-language",
            "text.txt",
            "task.context=8",
            "task.tokenizer=bpe",
            "task.vocabulary=280",
            *small,
        ),
        "classifier": ("byte-classifier", "records.csv", "task.context=8", *small),
        "vision": ("vit", "images", "model.patch=4", *small),
        "graph": ("graph-classifier", "graph.json", *small),
    }.items():
        if command_line(["train", words[0], "--size", "tiny", "--data", words[1], "--out", name, *words[2:]]):
            raise SystemExit(f"the run {name} could not be trained")
    shutil.copy(folder / "language" / "model.json", folder)


def in_child(function: Any, *arguments: Any) -> int:
    """Run a function in a forked process, so that this one starts no threads. Returns the process."""
    child = os.fork()
    if child:
        return child
    try:
        function(*arguments)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


# One input


Files = dict[str, tuple[int, int, int]]


def snapshot(folder: Path) -> Files:
    """What tells whether a file was written: its number, its size and its time."""
    return {
        str(file.relative_to(folder)): (file.stat().st_ino, file.stat().st_size, file.stat().st_mtime_ns)
        for file in folder.rglob("*")
        if file.is_file()
    }


def make(index: int, seed: int, originals: Path, folder: Path) -> tuple[str, list[str]]:
    """Write input number `index` to a folder. Returns its kind and its command."""
    name = kind_of(index)
    shutil.copytree(originals, folder)
    for sums in folder.glob("*/recipe.json"):  # its data are those of this folder
        sums.write_text(sums.read_text().replace(str(originals), str(folder)))
    for run in folder.glob("*/SHA256SUMS"):
        write_sums(run.parent)
    if name in GENERATED:
        return name, GENERATED[name][1](example(name, index // len(NAMES), seed), folder)
    return name, KINDS[name](random.Random(f"{seed}/{index}"), folder)


def kind_of(index: int) -> str:
    return NAMES[index % len(NAMES)]


def call(words: list[str], folder: Path, output: Path) -> tuple[int | None, str]:
    """Run a command in a folder. Returns its exit code, or None after an error that is not shown as one line, and its last words."""
    os.chdir(folder)
    handle = os.open(output, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    kept = os.dup(1), os.dup(2)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.set_inheritable(handle, False)
    code: int | None
    try:
        code = send(words[1]) if words[0] == "request" else command_line(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        code = None
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    for number, one in enumerate(kept, 1):
        os.dup2(one, number)
        os.close(one)
    os.close(handle)
    return code, output.read_text(errors="replace")


def judge(code: int | None, text: str, words: list[str], before: Files, after: Files) -> tuple[str, str]:
    """How a command ended, and the line that shows it."""
    lines = [line for line in text.splitlines() if line.strip()]
    if code is None or "Traceback (most recent call last)" in text:
        return "traceback", lines[-1] if lines else ""
    changed = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    resumed = words[1] + "/" if words[0] == "resume" else None
    own = {"generate": (words[1] + "/samples.png", words[1] + "/episode.gif"), "show": (f"{words[1]}.png",)}
    for name in changed:
        written = (
            name.split("/")[0] in OUTPUTS or name in own.get(words[0], ()) or (resumed and name.startswith(resumed))
        )
        if not written:
            return (
                "wrote",
                f"{name} was {'changed' if name in before and name in after else 'removed' if name in before else 'written'}",
            )
    if code == 0:
        return "result", ""
    errors = [line for line in lines if line.startswith("error: ")]
    if "─ Error ─" in text:  # a sentence in a box: an option, or its type
        errors = [line for line in lines if line.startswith("│")][:1]
    if len(errors) != 1:
        return "lines", f"exit code {code}; " + (lines[-1] if lines else "no output")
    raw = NOTHING.search(errors[0]) or RAW.search(re.sub(r"\(.*\)", "", errors[0]))
    return ("raw" if raw else "refused"), errors[0]


def run_one(index: int, seed: int, originals: Path, scratch: Path) -> dict[str, Any]:
    folder = scratch / "surroundings" / "input"
    shutil.rmtree(scratch / "surroundings", ignore_errors=True)
    folder.parent.mkdir(parents=True)
    (folder.parent / "neighbour.txt").write_text("keep me\n")
    name, words = make(index, seed, originals, folder)
    before = snapshot(folder)
    start = time.monotonic()
    code, text = call(words, folder, scratch / "output.txt")
    seconds = time.monotonic() - start
    end, message = judge(code, text, words, before, snapshot(folder))
    around = {one.name for one in folder.parent.iterdir()}
    if around != {"input", "neighbour.txt"} or (folder.parent / "neighbour.txt").read_text() != "keep me\n":
        end, message = "wrote", f"beside its folder: {sorted(around)}"
    message = message.replace(str(folder), "INPUT")
    return {
        "index": index,
        "kind": name,
        "end": end,
        "seconds": round(seconds, 2),
        "command": words,
        "message": message[:300],
    }


# The campaign


def work(indices: Sequence[int], seed: int, originals: Path, scratch: Path, pipe: int) -> None:
    """What a forked process does: run inputs, and write a line about each to a pipe."""
    from everyformer.study import curves
    from everyformer.task.language_inference import LanguageInference

    LanguageInference.sample = lambda *_: None  # type: ignore[method-assign]  # this and the curves take most of the time
    draw = curves.draw
    curves.draw = lambda run: draw(run) if (run / "checkpoints" / "00000002").exists() else run  # of resumed runs
    os.fsync = lambda _: None
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28, 1 << 28))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.environ["EVERYFORMER_CACHE"] = str(scratch / "cache")
    for index in indices:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime + SECONDS) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        os.write(pipe, (json.dumps(run_one(index, seed, originals, scratch)) + "\n").encode())


class Worker:
    """A forked process with its pipe, and the inputs that it has not finished."""

    def __init__(self, indices: list[int], seed: int, originals: Path, scratch: Path):
        self.left, self.buffer = indices, b""
        self.scratch = scratch
        scratch.mkdir(parents=True, exist_ok=True)
        for index in indices:  # here, so that an example does not depend on what the process did before
            if kind_of(index) in GENERATED:
                example(kind_of(index), index // len(NAMES), seed)
        self.pipe, write = os.pipe()
        self.child = in_child(work, indices, seed, originals, scratch, write)
        os.close(write)
        self.limit = time.monotonic() + WAIT

    def lines(self) -> tuple[list[dict[str, Any]], bool]:
        """The results so far, and whether the process has ended."""
        done: list[dict[str, Any]] = []
        content = os.read(self.pipe, 1 << 16) if select.select([self.pipe], [], [], 0)[0] else None
        if content:
            *complete, self.buffer = (self.buffer + content).split(b"\n")
            done = [json.loads(line) for line in complete]
            self.left = self.left[len(done) :]
            self.limit = time.monotonic() + WAIT
        late = content is None and time.monotonic() > self.limit
        if late:
            os.kill(self.child, signal.SIGKILL)
        if content == b"" or late:
            os.close(self.pipe)
            code = os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])
            if self.left:
                slow = late or code == -signal.SIGXCPU
                limit = f"{WAIT:g} s by the clock" if late else f"{SECONDS:g} s of a processor"
                why = f"more than {limit}" if slow else f"exit code {code}"
                end, kind = "time" if slow else "died", kind_of(self.left[0])
                done.append(
                    {"index": self.left[0], "kind": kind, "end": end, "seconds": SECONDS, "command": [], "message": why}
                )
                self.left = self.left[1:]
            return done, True
        return done, False


def campaign(indices: list[int], seed: int, processes: int, folder: Path) -> Iterator[dict[str, Any]]:
    originals = folder / "originals"
    originals.mkdir(parents=True)
    keep_files_in(folder / "hypothesis")
    os.chdir(originals)
    _, status = os.waitpid(in_child(prepare, originals), 0)
    if status:
        raise SystemExit("the files to damage could not be written")
    before = snapshot(originals)
    chunks = [indices[start : start + CHUNK] for start in range(0, len(indices), CHUNK)]
    free, workers = [folder / str(number) for number in range(processes)], list[Worker]()
    while chunks or workers:
        while chunks and free:
            workers.append(Worker(chunks.pop(0), seed, originals, free.pop()))
        select.select([worker.pipe for worker in workers], [], [], 0.2)
        for worker in list(workers):
            done, ended = worker.lines()
            yield from done
            if ended:
                workers.remove(worker)
                free.append(worker.scratch)
                if worker.left:
                    chunks.insert(0, worker.left)
    if snapshot(originals) != before:
        raise SystemExit(f"a command changed files of {originals}, outside of its folder")


def summary(lines: list[dict[str, Any]]) -> list[str]:
    counts = {name: Counter(line["end"] for line in lines if line["kind"] == name) for name in NAMES}
    rows = [[name, count.total(), *(count[end] for end in ENDS)] for name, count in counts.items() if count]
    rows.append(["all", len(lines), *(sum(line["end"] == end for line in lines) for end in ENDS)])
    head = ["input", "inputs", *ENDS]
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10000, help="inputs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="inputs at a time")
    parser.add_argument("--only", type=int, help="run this input alone, and show its output")
    parser.add_argument("--all", action="store_true", help="show also the inputs that ended well")
    parser.add_argument("--log", type=Path, help="a file for the lines that are printed")
    parser.add_argument("--table", type=Path, metavar="LOG", help="print the table of a log")
    options = parser.parse_args()
    if options.table:
        print("\n".join(line for line in options.table.read_text().splitlines() if line.startswith("|")))
        return 0
    torch.set_num_threads(1)
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg"}
    for name in MODULES:  # once, for all processes to come
        with suppress(ImportError):
            import_module(name)
    facts = provenance(options.seed)
    os.environ[COMMIT] = facts["commit"]
    log = options.log.absolute() if options.log else Path(os.devnull)
    folder = Path(tempfile.mkdtemp(prefix="hostile-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    indices = list(range(options.count)) if options.only is None else [options.only]
    lines: list[dict[str, Any]] = []
    with log.open("w") as file:
        print(header(facts), file=file, flush=True)
        for line in campaign(indices, options.seed, options.processes, folder):
            lines.append(line)
            if options.all or line["end"] not in ENDS[:2]:
                print(json.dumps(line), file=file, flush=True)
                print(f"{line['index']} {line['kind']}: {line['end']}: {line['message']}", flush=True)
        print("\n".join(summary(lines)), file=file)
    print("\n".join(summary(lines)))
    if options.only is not None:
        print(lines, (folder / "0" / "output.txt").read_text(errors="replace"), sep="\n")
    shutil.rmtree(folder)
    return int(any(line["end"] not in ENDS[:2] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
