"""Compile every Triton program for a GPU, without one: `python -m tests.attention.compiled` in a process without the interpreter.

The interpreter computes what Python would, so it lets programs through that a compiler refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from everyformer.attention.kernels import fused, programs

HALF = ("q", "k", "v", "slope", "answer", "to_q", "to_k", "to_v")
SINGLE = ("total", "delta", "to_z", "z", "far_k", "far_v", "rotation")
WHOLE = ("order", "place", "alone", "reach")
PARTS = {  # with a soft mask or without, first or not
    "window": (fused.Part(fused.NEAR, 1, 255, 1), False, True),
    "span": (fused.Part(fused.NEAR, 1, 255, 1), True, True),
    "summary": (fused.Part(fused.NEAR, 128, 0, 8, 8), False, True),
    "stride": (fused.Part(fused.RESIDUE, 256, 1), False, False),
    "far": (fused.Part(fused.FAR, 128, 0, 8, 8), False, False),
    "fixed": (fused.Part(fused.FIXED, 128, 0, 8, 8), False, True),
    "bucket": (fused.Part(fused.IN_BUCKET, 1, 64, round=1), False, False),
}


def calls() -> Iterator[tuple[str, Any, dict[str, int]]]:
    """Programs with the numbers that are fixed when they are compiled, as `fused` launches them."""
    for name, (part, soft, first) in PARTS.items():
        numbers = {"KIND": part.kind, "SIZE": part.size, "COLUMNS": part.columns, "ROUND": part.round, "E": 64}
        numbers |= {"SOFT": soft, "FIRST": first}
        for program in (programs.forward, programs.to_queries, programs.to_keys):
            if program is not programs.to_keys or part.kind != fused.FIXED:
                yield f"{program.__name__} {name}", program, numbers | fused.SIZES[part.kind][program.__name__]
    far = {"SIZE": 128, "COLUMNS": 8, "SHARED": fused.SHARED, "N": fused.ADDED, "E": 64}
    yield "add_far", programs.add_far, far
    yield "buckets", programs.buckets, {"ROUNDS": 4, "HALF": 128, "WIDTH": 64, "M": 64, "N": 128, "E": 64}


def kind(name: str, numbers: dict[str, int]) -> str:
    """The type of an argument, as Triton writes it."""
    if name in HALF:
        return "*fp32" if name in ("to_k", "to_v") and numbers.get("KIND") == fused.FAR else "*bf16"
    if name in SINGLE or name in WHOLE or name == "found":
        return "*fp32" if name in SINGLE else "*i64" if name == "found" else "*i32"
    return "constexpr" if name in numbers else "fp32" if name == "scale" else "i32"


def main() -> None:
    for told, program, numbers in calls():
        given = {name: number for name, number in numbers.items() if name in program.arg_names}
        options = {name: number for name, number in numbers.items() if name not in program.arg_names}
        absent = () if numbers.get("SOFT") else ("z", "to_z", "reach")  # None, where nothing is soft
        types = {name: "constexpr" if name in absent else kind(name, numbers) for name in program.arg_names}
        fixed = {(at,): given.get(name) for at, name in enumerate(program.arg_names) if types[name] == "constexpr"}
        triton.compile(ASTSource(program, types, fixed), target=GPUTarget("cuda", 90, 32), options=options)
        print(told, flush=True)


if __name__ == "__main__":
    main()
