"""Load on a service: many clients that ask without a pause. Counts what is lost, and follows the memory of the service.

    python -m bench.serve > docs/results/logs/serve.txt
    python -m bench.serve --table docs/results/logs/serve.txt

The service is `everyformer serve` in a process of its own, with a model of random weights. Each client asks for the continuation of
one of 64 prompts, every fourth time as a stream, and every fiftieth time goes away in the middle of it. An answer is lost if it does not
come, is an error, or has another text or number of tokens than the first answer to the same question. A client that is answered with
429 asks again after the time it is told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

import everyformer
from everyformer.network.size import parameters
from everyformer.train.provenance import start_log

QUESTIONS = 64
EVERY = 5.0  # seconds between samples of the memory


class Load:
    """What the clients asked and got."""

    def __init__(self, url: str, questions: list[dict[str, Any]]):
        self.url, self.questions, self.counts, self.tokens = url, questions, Counter[str](), 0
        self.texts: dict[int, str] = {}
        self.seconds: list[float] = []
        self.problems: list[str] = []

    async def client(self, number: int, until: float) -> None:
        rng = random.Random(number)
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=1)) as http:
            while time.monotonic() < until:
                question, kind = rng.randrange(len(self.questions)), rng.random()
                try:
                    await self.ask(http, question, stream=kind < 0.25, leave=kind < 0.02)
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    self.lost(question, f"{type(error).__name__}: {error}")

    async def ask(self, http: httpx.AsyncClient, question: int, stream: bool, leave: bool) -> None:
        body, began = self.questions[question] | {"stream": stream}, time.monotonic()
        if not stream:
            answer = await http.post(f"{self.url}/v1/completions", json=body)
            if answer.status_code == 429:
                await self.wait(answer)
                return
            choice = answer.json()["choices"][0]
            self.check(question, choice["text"], choice["finish_reason"], time.monotonic() - began)
            return
        text, reason = "", None
        async with http.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
            if answer.status_code == 429:
                await self.wait(answer)
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    text, reason = text + choice["text"], choice["finish_reason"]
                    if leave:
                        self.counts["left"] += 1
                        return
        self.check(question, text, reason, time.monotonic() - began)

    async def wait(self, answer: httpx.Response) -> None:
        self.counts["told to wait"] += 1
        await asyncio.sleep(float(answer.headers["retry-after"]))

    def check(self, question: int, text: str, reason: str | None, seconds: float) -> None:
        if reason != "length" or self.texts.setdefault(question, text) != text:
            self.lost(question, f"reason {reason}, text {text[:40]!r}")
            return
        self.counts["answered"] += 1
        self.tokens += self.questions[question]["max_tokens"]
        self.seconds.append(seconds)

    def lost(self, question: int, problem: str) -> None:
        self.counts["lost"] += 1
        self.problems.append(f"question {question}: {problem}")


def questions() -> list[dict[str, Any]]:
    """Prompts of 1 to 200 bytes that ask for 1 to 64 tokens."""
    rng = random.Random(0)
    return [
        {
            "prompt": "".join(rng.choices("the quick brown fox ", k=rng.randint(1, 200))),
            "max_tokens": rng.randint(1, 64),
            "temperature": rng.choice([0, 0.8]),
            "seed": seed,
        }
        for seed in range(QUESTIONS)
    ]


def processor_seconds(process: int) -> float:
    """Returns the processor time that a process has used."""
    user, system = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def megabytes(process: int) -> float:
    """Returns the resident memory of a process in MiB."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


async def measure(url: str, process: int, clients: int, seconds: float) -> None:
    load, began, used = Load(url, questions()), time.monotonic(), processor_seconds(process)
    tasks = [asyncio.create_task(load.client(number, began + seconds)) for number in range(clients)]
    memory, loads = list[float](), list[float]()
    while time.monotonic() < began + seconds:
        await asyncio.sleep(EVERY)
        memory.append(megabytes(process))
        loads.append(os.getloadavg()[0])
        now = {"second": round(time.monotonic() - began, 1), "mib": round(memory[-1], 1), "load": round(loads[-1], 1)}
        print(json.dumps(now | load.counts), flush=True)
    await asyncio.gather(*tasks)
    took, times = time.monotonic() - began, sorted(load.seconds)
    used = processor_seconds(process) - used
    metrics = httpx.get(f"{url}/metrics").text
    left = [
        int(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("everyformer_") and "_sequences" in line
    ]
    summary = {
        "clients": clients, "seconds": round(took, 1), "answered": load.counts["answered"], "lost": load.counts["lost"],
        "told to wait": load.counts["told to wait"], "left": load.counts["left"],
        "tokens per second": round(load.tokens / took),
        "processor seconds of the service": round(used, 1), "tokens per processor second": round(load.tokens / used),
        "requests per second": round(load.counts["answered"] / took, 1),
        "p50": round(times[len(times) // 2], 2), "p99": round(times[len(times) * 99 // 100], 2),
        "mib after 10 s": round(memory[1], 1),
        "mib in the middle": round(memory[len(memory) // 2], 1), "mib at the end": round(memory[-1], 1),
        "mib at most": round(max(memory), 1), "still active": sum(left),
        "load of the machine": round(sum(loads) / len(loads), 1),
    }  # fmt: skip
    print(json.dumps(summary))
    for problem in load.problems[:20]:
        print(f"lost: {problem}")


def run(clients: int, seconds: float, member: str, size: str) -> None:
    start_log(seed=0, packages=("starlette", "uvicorn", "httpx"))
    with tempfile.TemporaryDirectory() as folder:
        network = everyformer.build(member, size)
        print(f"model: {member} {size} with random weights, {parameters(network.value):,} parameters")
        everyformer.save(network, folder)
        command = [sys.executable, "-m", "everyformer", "serve", folder, "--port", "0", "--name", "model"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ
        ) as service:
            try:
                assert service.stdout is not None
                url = service.stdout.readline().split()[2].removesuffix("/v1:")
                asyncio.run(measure(url, service.pid, clients, seconds))
                service.send_signal(signal.SIGTERM)
                print(f"exit code after SIGTERM: {service.wait(60)}")
            finally:
                with suppress(ProcessLookupError):
                    service.kill()


def show(log: str) -> None:
    """Print the table of a log."""
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    (summary,) = [line for line in lines if "clients" in line]
    print("| measured | result |\n| --- | --- |")
    for name in summary:
        print(f"| {name} | {summary[name]:,} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--member", default="byte-language")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        show(options.table.read_text())
    else:
        run(options.clients, options.seconds, options.member, options.size)


if __name__ == "__main__":
    main()
