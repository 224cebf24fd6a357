"""Kitaev et al. 2020: hashing by directions, the sets of keys that hash alike, and attention over several rounds of them.

W writes {j : h(q_i) = h(k_i)} for {j : h(q_i) = h(k_j)}, and leaves out the rounds, their duplicates, j <= i, and that a query
sees itself only when it sees nobody else.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Rounds = list[list[int]]  # for each round the keys that one query sees; one may come twice


def bucket(x_E: Tensor, r_EN: Tensor) -> int:
    """h(x) = argmax([x R; -x R])."""
    turned = [(x_E @ column).item() for column in r_EN.T]
    both = turned + [-y for y in turned]
    return both.index(max(both))


def key(q_E: Tensor) -> Tensor:
    """k = q / |q|."""
    return q_E / torch.sqrt(q_E @ q_E)


def hashed(buckets: list[list[int]], window: int) -> list[Rounds]:
    """In each round the last `window` keys before i that are in its bucket; in the first one i itself if there are none."""
    found = []
    for i in range(len(buckets[0])):
        rounds = [[j for j in range(i) if one[j] == one[i]][-window:] for one in buckets]
        found.append(rounds if any(rounds) else [[i], *rounds[1:]])
    return found


def chunked(buckets: list[list[int]], size: int, bidirectional: bool) -> list[Rounds]:
    """In each round the keys of the query's chunk of the positions sorted by bucket, and of the chunk before it.

    As in both published codes the chunks of all rounds are a circle: before the first of a round comes the last of the
    round before.
    """
    length = len(buckets[0])
    orders = [sorted(range(length), key=lambda j, one=one: (one[j], j)) for one in buckets]
    chunks = [order[start : start + size] for order in orders for start in range(0, length, size)]
    in_round = len(chunks) // len(buckets)
    found = []
    for i in range(length):
        rounds = []
        for number in range(len(buckets)):
            at = next(n for n in range(number * in_round, (number + 1) * in_round) if i in chunks[n])
            rounds.append([j for j in chunks[at - 1] + chunks[at] if j != i and (bidirectional or j < i)])
        found.append(rounds if any(rounds) else [[i], *rounds[1:]])
    return found


def count(rounds: Rounds, j: int) -> int:
    """N_ij: how often the rounds show j."""
    return sum(one.count(j) for one in rounds)


def attend(q_TE: Tensor, v_TE: Tensor, sets: list[Rounds], once: bool = True) -> Tensor:
    """o_i = sum_r exp(z_r - z) sum_(j in P_r) exp(q_i . k_j - log N_ij - z_r) v_j, z_r and z the logs of the sums.

    Without `once` the -log N_ij is left out, as in the published codes: a key counts in every round that shows it.
    """
    rows = []
    for i, rounds in enumerate(sets):
        answers, totals = [], []
        for keys in rounds:
            if not keys:
                continue
            score = torch.stack([q_TE[i] @ key(q_TE[j]) - (math.log(count(rounds, j)) if once else 0) for j in keys])
            total = torch.log(torch.exp(score).sum())
            answers.append(sum(torch.exp(s - total) * v_TE[j] for s, j in zip(score, keys, strict=True)))
            totals.append(total)
        z = torch.log(sum(torch.exp(total) for total in totals))
        rows.append(sum(torch.exp(total - z) * answer for total, answer in zip(totals, answers, strict=True)))
    return torch.stack(rows)
