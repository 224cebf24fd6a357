"""Compile every Triton program for a GPU, without one: `python -m tests.attention.compiled` in a process without the interpreter.

The interpreter computes what Python would, so it lets programs through that a compiler refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from everyformer.attention.kernels import fused, programs
from everyformer.attention.kernels.parts import Kind, Part, band, distant, residue
from everyformer.attention.pattern import Hashed
from everyformer.network import cross_entropy_program

HALF = ("q", "k", "v", "gradient", "output", "to_q", "to_k", "to_v", "logits", "relative", "to_relative")
SINGLE = ("total", "delta", "to_z", "z", "shared_k", "shared_v", "rotation", "loss")
WHOLE = ("order", "rank", "alone", "spans")
LONG = ("bucket_of", "target")
PARTS = {  # with a soft mask or without, first or not
    "window": (band(1, 255), False, True),
    "span": (band(1, 255), True, True),
    "relative": (band(1, 255), True, True),
    "summary": (band(128, 0, 8, 8), False, True),
    "stride": (residue(256, 1), False, False),
    "distant": (distant(128, 8, 8), False, False),
    "fixed": (replace(distant(128, 8, 8), kind=Kind.BLOCK_AND_DISTANT), False, True),
    "bucket": (Part(Kind.BUCKET, Hashed(4, 256, 64), back=64, round=1), False, False),
}


def calls() -> Iterator[tuple[str, Any, dict[str, int]]]:
    """Programs with the numbers that are fixed when they are compiled, as `fused` launches them."""
    for name, (part, soft, first) in PARTS.items():
        numbers = {"KIND": int(part.kind), "SIZE": part.size, "COLUMNS": part.columns, "ROUND": part.round, "E": 64}
        numbers |= {"SOFT": soft, "RELATIVE": name == "relative", "FIRST": first}
        for program in (programs.forward, programs.to_queries, programs.to_keys):
            if program is not programs.to_keys or part.kind is not Kind.BLOCK_AND_DISTANT:
                yield f"{program.__name__} {name}", program, numbers | fused.SIZES[part.kind][program.__name__]
    numbers = {"SIZE": 128, "COLUMNS": 8, "SHARED": fused.SHARED, "N": fused.ADDED, "E": 64}
    yield "add_distant", programs.add_distant, numbers
    capped = {"SMOOTH": True, "CAPPED": True, "GRADIENT": True, "BLOCK": cross_entropy_program.BLOCK, "num_warps": 8}
    yield "cross-entropy", cross_entropy_program._program, capped
    yield "buckets", programs.buckets, {"ROUNDS": 4, "HALF": 128, "WIDTH": 64, "M": 64, "N": 128, "E": 64}


def kind(name: str, numbers: dict[str, int]) -> str:
    """The type of an argument, as Triton writes it."""
    if name in HALF:
        return "*fp32" if name in ("to_k", "to_v") and numbers.get("KIND") == Kind.DISTANT else "*bf16"
    if name in SINGLE or name in WHOLE or name in LONG:
        return "*fp32" if name in SINGLE else "*i64" if name in LONG else "*i32"
    return "constexpr" if name in numbers else "fp32" if name in ("scale", "smoothing", "cap") else "i32"


def main() -> None:
    for name_of_call, program, numbers in calls():
        given = {name: number for name, number in numbers.items() if name in program.arg_names}
        options = {name: number for name, number in numbers.items() if name not in program.arg_names}
        absent = [] if numbers.get("SOFT") else ["z", "to_z", "spans"]  # None, where nothing is soft
        absent += [] if numbers.get("RELATIVE") else ["relative", "to_relative"]
        types = {name: "constexpr" if name in absent else kind(name, numbers) for name in program.arg_names}
        fixed = {(at,): given.get(name) for at, name in enumerate(program.arg_names) if types[name] == "constexpr"}
        triton.compile(ASTSource(program, types, fixed), target=GPUTarget("cuda", 90, 32), options=options)
        print(name_of_call, flush=True)


if __name__ == "__main__":
    main()
