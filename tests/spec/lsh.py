"""The Reformer, Kitaev et al. 2020: angular locality-sensitive hashing, and attention over several hash rounds.

Weng 2020 (source W) writes {j : h(q_i) = h(k_i)} for {j : h(q_i) = h(k_j)}, and omits the rounds, their duplicates, j <= i, and
that a query attends to itself only if it attends to no other key.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Rounds = list[list[int]]  # the keys that one query attends to in each round; a key may occur in several


def bucket(x_E: Tensor, r_EN: Tensor) -> int:  # eq. W25
    """Section 2: h(x) = argmax([x R; -x R])."""
    rotated = [(x_E @ column).item() for column in r_EN.T]
    directions = rotated + [-y for y in rotated]
    return directions.index(max(directions))


def product_bucket(x_E: Tensor, r_EN: Tensor, factors: tuple[int, ...]) -> int:
    """A bucket of each factor, from as many columns of R as half of it; the first counts the fastest, as in the published code."""
    number, step, columns = 0, 1, list(r_EN.T)
    for size in factors:
        of_factor, columns = columns[: size // 2], columns[size // 2 :]
        number, step = number + step * bucket(x_E, torch.stack(of_factor, dim=1)), step * size
    return number


def key(q_E: Tensor) -> Tensor:  # eq. W27
    """Shared queries and keys: k = q / |q|."""
    return q_E / torch.sqrt(q_E @ q_E)


def hashed(buckets: list[list[int]], window: int) -> list[Rounds]:  # eq. W26
    """The last `window` keys before i in its bucket, for each round; i itself, in the first round, if there are none."""
    sets = []
    for i in range(len(buckets[0])):
        rounds = [[j for j in range(i) if one[j] == one[i]][-window:] for one in buckets]
        sets.append(rounds if any(rounds) else [[i], *rounds[1:]])
    return sets


def chunked(buckets: list[list[int]], size: int, bidirectional: bool) -> list[Rounds]:
    """The keys of the query's chunk of the positions sorted by bucket, and of the chunk before it, for each round.

    As in both published implementations the chunks of all rounds form a circle: the first chunk of a round follows the last one of
    the round before.
    """
    length = len(buckets[0])
    orders = [sorted(range(length), key=lambda j, one=one: (one[j], j)) for one in buckets]
    chunks = [order[start : start + size] for order in orders for start in range(0, length, size)]
    in_round = len(chunks) // len(buckets)
    sets = []
    for i in range(length):
        rounds = []
        for number in range(len(buckets)):
            at = next(n for n in range(number * in_round, (number + 1) * in_round) if i in chunks[n])
            rounds.append([j for j in chunks[at - 1] + chunks[at] if j != i and (bidirectional or j < i)])
        sets.append(rounds if any(rounds) else [[i], *rounds[1:]])
    return sets


def count(rounds: Rounds, j: int) -> int:
    """N_ij: the number of times that j occurs in the rounds of query i."""
    return sum(one.count(j) for one in rounds)


def attend(q_TE: Tensor, v_TE: Tensor, sets: list[Rounds], once: bool = True) -> Tensor:
    """Appendix A: o_i = sum_r exp(z_r - z) sum_(j in P_r) exp(q_i . k_j - log N_ij - z_r) v_j, z_r and z the logs of the sums.

    Without `once` the -log N_ij is omitted, as in the published implementations: a key counts once per round that contains it.
    """
    rows = []
    for i, rounds in enumerate(sets):
        outputs, totals = [], []
        for keys in rounds:
            if not keys:
                continue
            score = torch.stack([q_TE[i] @ key(q_TE[j]) - (math.log(count(rounds, j)) if once else 0) for j in keys])
            total = torch.log(torch.exp(score).sum())
            outputs.append(sum(torch.exp(s - total) * v_TE[j] for s, j in zip(score, keys, strict=True)))
            totals.append(total)
        z = torch.log(sum(torch.exp(total) for total in totals))
        rows.append(sum(torch.exp(total - z) * output for total, output in zip(totals, outputs, strict=True)))
    return torch.stack(rows)
