"""Compares a reversible stack with a pre-norm one: the tiny reformer with full attention, of which only the residual differs.

    OMP_NUM_THREADS=1 python -m bench.reversible run.steps=400 run.batch=8 --data enwik8 --trials 3 --seeds 5 --out runs/reversible

Takes the settings and options of bench.compare, and prints its log. What a reversible stack saves is measured by bench.long_context.
"""

from __future__ import annotations

import sys
from pathlib import Path

from msgspec.structs import replace

import everyformer
from bench import compare
from everyformer import Model, PreNorm
from everyformer.family.reformer import FULL_PATTERN

FOLDER = Path("runs/reversible-models")


def models(**sizes: int) -> dict[str, Model]:
    """The two models by name. A reversible stack has no dropout here, because its masks differ from those of a pre-norm one."""
    value = everyformer.member("reformer", "tiny", pattern=FULL_PATTERN, chunk=None, dropout=0.0, **sizes)
    assert isinstance(value, Model)
    return {"plain": replace(value, body=replace(value.body, residual=PreNorm())), "reversible": value}  # type: ignore[type-var]


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    files = {name: FOLDER / f"{name}.json" for name in models()}
    for name, value in models().items():
        files[name].write_text(everyformer.to_json(value))
    sys.argv[1:] = [*map(str, files.values()), *sys.argv[1:]]
    compare.main()


if __name__ == "__main__":
    main()
