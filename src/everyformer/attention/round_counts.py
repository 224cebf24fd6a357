"""How often a key counts that several rounds of hashing find. Paper: Kitaev et al. 2020, appendix A.

    o_i = sum_r exp(z_r - z) sum_(j in P_r) exp(q_i . k_j - log N_ij - z_r) v_j,   N_ij the number of times that j occurs in P_1, P_2, ...

The pattern `chunked` is this equation: each key counts once. Both published codes omit - log N_ij, so a key counts once for each round
that has it. `RoundCounts` adds log N_ij, so that weights which were trained there are computed as they were trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from everyformer.attention.context import Context
from everyformer.attention.pattern import hash_lookup
from everyformer.attention.score_mod import ScoreMod, ScoreModModule, Term
from everyformer.value import Value


class RoundCounts(ScoreMod, Value, frozen=True):
    """Counts a key of the pattern `chunked` once for each round that has it, as the code of Reformer does.

    Example: `Attention(Shared(2), Chunked(4, 8, 16, leaks=True), (RoundCounts(),))`.
    """

    def build(self, heads: int, key_width: int, value_width: int) -> ScoreModModule:
        return RoundCountsModule()


class RoundCountsModule(ScoreModModule):
    def bias(self, q_BHQE: Tensor, k_BHKE: Tensor, scale: float, context: Context) -> Term:
        positions, table_BHRP, dtype = context.positions, context.side.hashes, q_BHQE.dtype
        assert table_BHRP is not None
        rounds = table_BHRP.shape[2] // 2  # a chunk and the one before it for each, and one more row

        def term(b: Any, h: Any, i: Any, j: Any) -> Tensor:
            at = hash_lookup(table_BHRP, b, h)
            query, key = positions.query_at(b, i), positions.key_at(b, j)
            count = torch.zeros_like(query - key)
            for number in range(rounds):
                chunk, previous = at(number, query), at(rounds + number, query)
                for row in {number, (number - 1) % rounds}:
                    count = count + (at(row, key) == chunk) + (at(row, key) == previous)
            return count.clamp(min=1).to(dtype).log()

        return term
