"""Trains each language model that has a segment memory or a recurrent state, and prints its bits by position from an empty memory.

    python -m bench.begin --data FILE --steps 800
    python -m bench.begin --data FILE --steps 800 --restart 0 --members transformer-xl

Positions are those of the targets: 0 is the second token of a text. `carried` is the evaluation that reads the whole held-out text and
carries the memory from segment to segment, in bits per byte. `--restart 0` trains without rows that begin anew. Prints the command, the
commit, the machine and the seed, then one JSON line for each model.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from typing import Any

from everyformer.study.positions import bits_by_position, position_groups
from everyformer.train.loop import train
from everyformer.train.provenance import start_log
from everyformer.train.recipe import Recipe

MEMBERS = {  # with the settings that give each a memory
    "transformer-xl": (),
    "gtrxl": (),
    "adaptive-span": (),
    "lstm": ("model.memory=64",),
    "ablated-lstm": ("model.memory=64",),
    "act-rnn": ("model.memory=64",),
}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    settings = [
        f"run.steps={options.steps}",
        f"run.seed={options.seed}",
        "run.evaluate=0",
        "task.context=64",
        *MEMBERS[name],
    ]
    settings += [] if options.restart is None else [f"task.restart={options.restart}"]
    start = time.perf_counter()
    run = train(Recipe.of(name, *settings, *options.settings, size="tiny", data=options.data))
    data: Any = run.task.data
    token_N = data.splits["valid"]
    length = min(4 * data.context, len(token_N) - 1)
    bits = bits_by_position(run.network, token_N, length, segment=data.context, windows=options.windows)  # type: ignore[arg-type]
    count_V = Counter(data.splits["train"].tolist())
    total = sum(count_V.values())
    groups = {
        str(a) if b == a + 1 else f"{a}-{b - 1}": round(sum(bits[a:b]) / (b - a), 3) for a, b in position_groups(length)
    }
    return {
        "member": name,
        "restart": data.restart,
        "lr": run.recipe.optim.lr,
        "carried": round(run.metrics["bits_per_byte"], 3),
        "by_position": groups,
        "unigram": round(-sum(n / total * math.log2(n / total) for n in count_V.values()), 3),
        "seconds": round(time.perf_counter() - start),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a text; default: the embedded Shakespeare")
    parser.add_argument("--members", nargs="*", default=list(MEMBERS), choices=list(MEMBERS))
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--windows", type=int, default=256, help="starts with an empty memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--restart", type=int, help="task.restart; default: the task's")
    parser.add_argument("settings", nargs="*", help="settings of every run, for example optim.lr=3e-3")
    options = parser.parse_args()
    start_log(seed=options.seed)
    for name in options.members:
        print(json.dumps(measure(name, options)), flush=True)


if __name__ == "__main__":
    main()
