"""Why the memory of a service grows: what the allocator holds while prompts of many lengths come and go, in one process.

    python -m bench.serve_memory >> docs/results/logs/serve_memory.txt
    python -m bench.serve_memory --table docs/results/logs/serve_memory.txt

The requests are those of bench.serve, with 32 rows and never an empty queue. `in use` is what the process has allocated, `free` what
glibc keeps of what was freed (mallinfo2). The first rows are those of torch's own limits of 1,024 compiled shapes, the next those
of `everyformer serve`, with 64, and the last give free memory back as the service does.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import torch

import everyformer
from bench.serve import megabytes, questions
from everyformer.infer.batching import Batcher
from everyformer.serve.memory import CAPACITIES, EVERY, SHAPES, memory_trimmer
from everyformer.train.provenance import start_log

PER_LINE = 300  # requests
VARIANTS = {
    "torch's limits": (1024, False),
    "limits of the service": (SHAPES, False),
    "free memory given back": (SHAPES, True),
}


class Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def serve(name: str, requests: int, trims: bool) -> None:
    """Serve so many requests, and print what the allocator holds."""
    mallinfo, trim = ctypes.CDLL(None).mallinfo2, memory_trimmer()
    mallinfo.restype = Mallinfo
    torch.manual_seed(0)
    batcher, rng = Batcher(everyformer.build("byte-language", "tiny").eval(), 32), random.Random(1)

    def submit() -> None:
        one = rng.choice(asked)
        batcher.submit(list(one["prompt"].encode()), one["max_tokens"], one["temperature"], seed=one["seed"])

    asked, done, steps, began = questions(), 0, 0, time.process_time()
    for _ in range(64):
        submit()
    while done < requests:
        ended = sum(event.ended is not None for event in batcher.step())
        steps += 1
        if trims and steps % EVERY == 0:
            trim()
        for _ in range(ended):
            submit()
        if (done + ended) // PER_LINE > done // PER_LINE:
            found = mallinfo()
            line = {
                "variant": name, "answered": done + ended, "mib": round(megabytes(os.getpid()), 1),
                "in use": round((found.uordblks + found.hblkhd) / 2**20, 1), "free": round(found.fordblks / 2**20, 1),
                "processor seconds": round(time.process_time() - began, 1),
            }  # fmt: skip
            print(json.dumps(line), flush=True)
        done += ended


def show(log: str) -> None:
    """Print the table of a log: the first and the last line of each variant."""
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    names = ["variant", "answered", "mib", "in use", "free", "processor seconds"]
    print("| " + " | ".join(names) + " |\n" + "| --- " * len(names) + "|")
    for variant in VARIANTS:
        some = [line for line in lines if line["variant"] == variant]
        for line in (some[0], some[-1]):
            print("| " + " | ".join(f"{line[name]:,}" if name != "variant" else variant for name in names) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--variant")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        show(options.table.read_text())
    elif options.variant:
        serve(options.variant, options.requests, VARIANTS[options.variant][1])
    else:
        start_log(seed=0)
        for name, (shapes, _) in VARIANTS.items():  # each in a process of its own, because torch reads the limits once
            limits = dict.fromkeys(CAPACITIES, str(shapes))
            command = [
                sys.executable,
                "-m",
                "bench.serve_memory",
                "--variant",
                name,
                "--requests",
                str(options.requests),
            ]
            subprocess.run(command, env=os.environ | limits, check=True)


if __name__ == "__main__":
    main()
