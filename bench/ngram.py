"""The bits per byte that an n-gram of bytes needs on the held-out part of a text: what a language model has to beat.

    python -m bench.ngram --data FILE --order 6

Interpolated with Witten & Bell's weights (1991): for the bytes h before c, n(h) their count and t(h) the number of different bytes after
them, p(c | h) = (n(h c) + t(h) p(c | h without its first byte)) / (n(h) + t(h)), down to 1/256. The text is split as `train` splits it.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everyformer.data.text import open_text
from everyformer.train.provenance import start_log


def grams(byte_N: NDArray[Any], order: int) -> NDArray[np.uint64]:
    """Returns the runs of `order` bytes that end at each byte from index `order` - 1 on, as numbers."""
    number_N = np.zeros(len(byte_N) - order + 1, np.uint64)
    for offset in range(order):
        number_N = number_N * np.uint64(256) + byte_N[offset : offset + len(number_N)].astype(np.uint64)
    return number_N


def lookup(key_K: NDArray[Any], count_K: NDArray[Any], wanted_N: NDArray[Any]) -> NDArray[np.float64]:
    """Returns the count of each wanted key; 0 where it does not occur."""
    index_N = np.minimum(np.searchsorted(key_K, wanted_N), len(key_K) - 1)
    return np.where(key_K[index_N] == wanted_N, count_K[index_N], 0).astype(np.float64)


def bits(train_N: NDArray[Any], valid_N: NDArray[Any], order: int) -> float:
    """Returns the mean bits of the bytes of `valid_N`, from the index `order` - 1 on."""
    p_N = np.full(len(valid_N) - order + 1, 1 / 256)
    for n in range(1, order + 1):
        gram_K, count_K = np.unique(grams(train_N, n), return_counts=True)
        wanted_N = grams(valid_N, n)[order - n :]
        history_K, first_K = np.unique(gram_K // np.uint64(256), return_index=True)
        total_K, kinds_K = np.add.reduceat(count_K, first_K), np.diff(np.append(first_K, len(gram_K)))
        history_N = wanted_N // np.uint64(256)
        total_N, kinds_N = lookup(history_K, total_K, history_N), lookup(history_K, kinds_K, history_N)
        mixed_N = (lookup(gram_K, count_K, wanted_N) + kinds_N * p_N) / np.maximum(total_N + kinds_N, 1)
        p_N = np.where(total_N > 0, mixed_N, p_N)
    return float(-np.log2(p_N).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a text; default: the embedded Shakespeare")
    parser.add_argument("--order", type=int, default=6, help="at most 8")
    parser.add_argument("--valid", type=float, default=0.1, help="task.valid")
    options = parser.parse_args()
    start_log(seed=None)
    text = open_text(options.data, (1 - options.valid, options.valid))
    for order in range(1, options.order + 1):
        result = bits(np.asarray(text.splits["train"]), np.asarray(text.splits["valid"]), order)
        print(json.dumps({"order": order, "bits_per_byte": round(result, 4)}), flush=True)


if __name__ == "__main__":
    main()
