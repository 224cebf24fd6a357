"""The memory of adaptive spans by length: the tensors of a training step, planned, and measured on a small model.

    python -m bench.span_memory

Spans are planned with their initial lengths, as `everyformer plan` does. The measured steps are those of two layers of width 64;
see bench/plan_memory.py for how the peak is measured.
"""

from __future__ import annotations

from bench.plan_memory import in_new_process, measured, planned
from everyformer.train.provenance import start_log

LENGTHS = (4096, 8192, 16384)
KINDS: dict[str, list[str]] = {"fixed": [], "dynamic": ["model.dynamic=true"]}
SMALL = ["model.layers=2", "model.width=64", "model.heads=2", "model.span=1024"]


def main() -> None:
    start_log(seed=0)
    print("| spans | positions | as published: planned MiB | small: planned MiB | small: measured MiB |")
    print("| --- | --- | --- | --- | --- |")
    for kind, settings in KINDS.items():
        for length in LENGTHS:
            context = [f"task.context={length}", "run.batch=1", *settings]
            small = ("adaptive-span", "enwik8", [*context, *SMALL], 3, "cpu")
            bytes_ = [
                in_new_process(planned, ("adaptive-span", "enwik8", context, 3, "cpu"))["planned"],
                in_new_process(planned, small)["planned"],
                in_new_process(measured, small)["measured"],
            ]
            print(f"| {kind} | {length:,} | " + " | ".join(f"{one / 2**20:,.0f}" for one in bytes_) + " |", flush=True)


if __name__ == "__main__":
    main()
