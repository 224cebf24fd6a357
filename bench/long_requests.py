"""Sends 10,000 requests to the service of `everyformer serve`, or to the page of `everyformer explore`, and records memory, file handles
and threads of the process.

    OMP_NUM_THREADS=1 python -m bench.long_requests serve --log docs/results/logs/long_serve.txt
    OMP_NUM_THREADS=1 python -m bench.long_requests explore --log docs/results/logs/long_explore.txt

The server listens on a socket in a thread of the process that measures, and the client is in the same process: its memory counts too. The
requests take turns: all that the server answers, with other texts each time, a few that it refuses, and clients that go away before
the answer. The model is a tiny byte model. The lines of the log are those of `bench.long_run`, with requests in place of steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import torch

from bench.long_run import growth, is_constant, read_log, table
from everyformer.explore.app import Explorer
from everyformer.explore.library import Library
from everyformer.serve.app import Service
from everyformer.serve.engine import Limits
from everyformer.serve.memory import limit_compiled_shapes
from everyformer.serve.server import Served, Server, open_socket
from everyformer.train.loop import train
from everyformer.train.memory import resident_memory
from everyformer.train.provenance import header, provenance
from everyformer.train.recipe import Recipe
from everyformer.train.trained import load

RUN = "first"
POOL = min(32, (os.cpu_count() or 1) + 4)  # threads that asyncio.to_thread starts, at most
SETTINGS = (
    "run.steps=4",
    "run.batch=4",
    "run.device=cpu",
    "model.width=16",
    "model.layers=1",
    "model.heads=2",
    "task.context=64",
)
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "box", "with", "five", "dozen", "jugs")
Ask = tuple[str, dict[str, Any] | None]  # path, and the body of a POST


def serve_request(rng: random.Random, number: int) -> Ask:
    """One of what the service is asked."""
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, 8)))
    more = {"prompt": text, "max_tokens": rng.randint(1, 8), "seed": number}
    asks: tuple[Ask, ...] = (
        ("/v1/completions", more),
        ("/v1/completions", more | {"stream": True, "logprobs": 2}),
        ("/v1/completions", more | {"prompt": [text, text[:3]], "n": 2, "echo": True}),
        ("/v1/completions", more | {"max_tokens": "many"}),
        ("/v1/embeddings", {"input": [text, "a fox"], "pooling": "mean"}),
        ("/tokenize", {"prompt": text}),
        ("/detokenize", {"tokens": list(text.encode())}),
        ("/v1/models", None),
        ("/metrics", None),
        (f"/v1/nothing/{number}", None),
    )
    return asks[number % len(asks)]


def explore_request(rng: random.Random, number: int) -> Ask:
    """One of what the page asks."""
    text, size = " ".join(rng.choices(WORDS, k=rng.randint(1, 8))), rng.randint(2, 40)
    pattern = {"text": f"causal & (window({size}) | stride({size}))", "length": 64}
    asks: tuple[Ask, ...] = (
        ("/", None),
        ("/page.js", None),
        ("/api/runs", {}),
        ("/api/runs/curves", {"runs": [RUN]}),
        ("/api/inside", {"run": RUN, "text": text}),
        ("/api/inside/head", {"run": RUN, "text": text, "part": "", "layer": 0, "head": number // 13 % 2}),
        ("/api/inside", {"run": RUN, "text": text, "off": [["", 0, 1]]}),
        ("/api/generate/step", {"run": RUN, "tokens": list(text.encode()), "seed": number}),
        ("/api/pattern", pattern | {"head": 0}),
        ("/api/pattern/cost", pattern),
        ("/api/family/member", {"name": rng.choice(("gpt2", "reformer", "t5")), "size": "tiny"}),
        ("/api/inside", {"run": f"no run {number}", "text": text}),
        (f"/nothing/{number}", None),
    )
    return asks[number % len(asks)]


KINDS: dict[str, Callable[[random.Random, int], Ask]] = {"serve": serve_request, "explore": explore_request}


def send(port: int, ask: Ask, leaves: bool) -> int:
    """The status of the answer; 0 if the client leaves before it."""
    path, body = ask
    with closing(HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        if leaves:
            return 0
        answer = connection.getresponse()
        answer.read()
        return answer.status


def trained(folder: Path) -> Path:
    """A run that is asked about."""
    (folder / "text.txt").write_text(
        "the quick brown fox jumps over a lazy dog; pack my box with five dozen jugs.\n" * 40
    )
    train(Recipe.of("gpt2", *SETTINGS, size="tiny", data=folder / "text.txt"), folder / RUN)
    return folder / RUN


def measure(kind: str, requests: int, every: int, run: Path) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """Returns a row for every so many requests, and how many answers had each status."""
    served: Served = (
        Service(load(run, device="cpu"), RUN, Limits()) if kind == "serve" else Explorer(Library([run], "cpu"))
    )
    opened = open_socket("127.0.0.1", 0)
    server = Server(served)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    rng, rows, statuses, start = random.Random(0), list[dict[str, Any]](), dict[int, int](), time.monotonic()
    try:
        for number in range(1, requests + 1):
            status = send(opened.getsockname()[1], KINDS[kind](rng, number), leaves=number % 29 == 0)
            statuses[status] = statuses.get(status, 0) + 1
            if number % every == 0:
                rows.append(row(number, time.monotonic() - start))
    finally:
        server.should_exit = True
        thread.join()
    return rows, statuses


def row(step: int, seconds: float) -> dict[str, Any]:
    """The process after so many requests."""
    time.sleep(0.2)  # until the connections of clients that have gone are closed
    gc.collect()
    return {
        "step": step,
        "memory": round(resident_memory() / 2**20, 1),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "objects": len(gc.get_objects()),
        "seconds": round(seconds, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS, nargs="?")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=100, help="requests between two rows")
    parser.add_argument("--log", type=Path, help="a file for the lines that are printed")
    parser.add_argument("--only-table", type=Path, metavar="LOG", help="print the table of a log")
    options = parser.parse_args()
    if options.only_table:
        print("\n".join(table(read_log(options.only_table), "requests")))
        return 0
    if options.kind is None:
        parser.error("give serve or explore")
    limit_compiled_shapes()
    torch.set_num_threads(1)
    lines = [header(provenance(0))]
    with tempfile.TemporaryDirectory(prefix="long-requests-") as folder:
        rows, statuses = measure(options.kind, options.requests, options.every, trained(Path(folder)))
    grown = growth(rows)
    lines += [json.dumps(one) for one in rows]
    constant = is_constant(grown, POOL)
    lines.append(json.dumps({"growth": grown, "constant": constant, "answers by status": statuses}))
    print("\n".join(lines))
    if options.log:
        options.log.write_text("\n".join(lines) + "\n")
    return int(not constant)


if __name__ == "__main__":
    sys.exit(main())
