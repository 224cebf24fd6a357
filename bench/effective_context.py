"""How long a context Transformer-XL and a vanilla Transformer use, measured as in Dai et al. 2019 by what a longer one gains.

    OMP_NUM_THREADS=1 python -m bench.effective_context run.steps=400 --trials 3 --seeds 3 --out runs/context

The text is made here: documents of 512 letters with a space at the end, each of which draws its letters with shares of its own, so that
each letter of a document that is known helps to predict the next one. Both models read windows or segments of 64 bytes; Transformer-XL
has a memory of 64 too. Takes the settings and options of bench.compare, which chooses the rates on the validation split, and prints its
log. Then each final run predicts the same letters of new documents from the last 8, 16, 32, 64 and 128 before them; a JSON line for each
run has its bits per byte by context. The vanilla model has positions for 64.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from bench import compare
from bench.results import Rows, json_lines, mean, table

FILE = Path("runs/documents.txt")
LENGTH, LETTERS, SHAPE = 512, "abcdefghijklmnop", 0.3  # SHAPE: of the gamma distribution of the shares
SEGMENT = 64
CONTEXTS = (8, 16, 32, 64, 128)
GAIN = 0.01  # of the bits: what the doubling of a context gains at least, if it is used
MODELS = (
    "vanilla=byte-language", "transformer-xl", f"transformer-xl:model.memory={SEGMENT}",
    f"task.context={SEGMENT}", "model.dropout=0",
)  # fmt: skip


def documents(count: int, seed: int) -> list[str]:
    choose = random.Random(seed)
    shares = ([choose.gammavariate(SHAPE, 1) for _ in LETTERS] for _ in range(count))
    return ["".join(choose.choices(LETTERS, weights=some, k=LENGTH)) for some in shares]


@torch.no_grad()
def bits_by_context(network: Any, size: int = 4096) -> dict[str, float | None]:
    """The mean bits of the same letters by the number of letters before them; None where the model has no positions for them."""
    letters = "".join(documents(64, 1))
    token_DT = torch.frombuffer(bytearray(letters.encode()), dtype=torch.uint8).long().unflatten(0, (-1, LENGTH))
    random = torch.Generator().manual_seed(0)
    row_B1 = torch.randint(len(token_DT), (size, 1), generator=random)
    end_B1 = torch.randint(max(CONTEXTS), LENGTH, (size, 1), generator=random)
    found = dict[str, float | None]()
    for context in CONTEXTS:
        nats = 0.0
        try:
            for row_b1, end_b1 in zip(row_B1.split(256), end_B1.split(256), strict=True):
                logits = network(token_DT[row_b1, end_b1 + torch.arange(-context, 0)]).logits[:, -1]
                nats += float(F.cross_entropy(logits, token_DT[row_b1, end_b1][:, 0], reduction="sum"))
        except ValueError:
            found[str(context)] = None
        else:
            found[str(context)] = round(nats / size / math.log(2), 4)
    return found


def effective(bits: dict[str, float | None]) -> int:
    """The longest context whose second half lowers the bits by GAIN of them or more."""
    used = [CONTEXTS[0]]
    for half, context in pairwise(CONTEXTS):
        less, more = bits[str(half)], bits[str(context)]
        if less is not None and more is not None and more < (1 - GAIN) * less:
            used.append(context)
    return used[-1]


def main() -> None:
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(" ".join(documents(2000, 0)))
    sys.argv[1:] = [*MODELS, *sys.argv[1:], "--data", str(FILE), "--size", "tiny"]
    for entry, seed, run in compare.final_runs(compare.printed()):
        line = {"model": entry, "seed": seed, "bits_by_context": bits_by_context(run.network.eval())}
        print(json.dumps(line), flush=True)


@table("bits by context")
def by_context(log: str) -> Rows:
    lines = [one for one in json_lines(log) if "bits_by_context" in one]
    rows = [["model", *(f"{context} bytes" for context in CONTEXTS), "effective context of each seed"]]
    for model in dict.fromkeys(one["model"] for one in lines):
        some = [one["bits_by_context"] for one in lines if one["model"] == model]
        cells = (_mean([one[str(context)] for one in some]) for context in CONTEXTS)
        rows.append([f"`{model}`", *cells, ", ".join(str(effective(one)) for one in some)])
    return rows


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{mean(known):.3f}" if known else "refused"


if __name__ == "__main__":
    main()
