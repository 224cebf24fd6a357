"""A sublayer that looks up the last tokens in hashed tables. Papers: Pagnoni et al. 2024 (Byte Latent Transformer); Huang et al. 2025.

    y_i = W (x_i, sqrt(F) E_n[r_n(i)] for each order n)
    r_n(i) = h_n(i) mod R,   h_1(i) = t_i + 1,   h_n(i) = (1000003 h_(n-1)(i) + t_(i-n+1) + 1) mod (2^31 - 1)

with the token t_i, tables E_n of R rows of F numbers, and 0 in place of t + 1 before the first token. A small network sees the last
tokens together in its first layer, which attention and nets would have to learn first; a step reads one row of each table, so the
tables cost memory and no operations. Rows are shared by the n-grams that have the same hash.
Departures: the papers add the vectors to the embedding; here a sublayer may stand in any layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

from everyformer.attention.context import Context, Positions
from everyformer.network.cache import Entry, KVCache
from everyformer.network.convolution import shift
from everyformer.network.sublayer import Sublayer, SublayerModule
from everyformer.value import Size, Value

FACTOR, PRIME = 1000003, 2**31 - 1  # of the hash


class Ngrams(Sublayer, Value, frozen=True):
    """Vectors of the last tokens, from a hashed table of `rows` times `features` numbers for each of `orders`, 2 for the last two.

    Example: `Layer((Ngrams((2, 3), rows=4096), Attention(Standard(8), Causal()), FeedForward(256)))`.
    """

    orders: tuple[Size, ...] = (2, 3)
    rows: Size = 65536
    features: Size = 128
    carries: ClassVar[str | None] = "last tokens"

    def build(self, width: int) -> NgramsModule:
        return NgramsModule(width, self)

    def mixes_positions(self) -> bool:
        return True

    def reads(self) -> set[str]:
        return {"tokens"}

    def illegal_reasons(self, width: int) -> Iterator[str]:
        if not self.orders:
            yield "ngrams has no orders; give at least one, such as (2, 3)"


class NgramsModule(SublayerModule):
    def __init__(self, width: int, value: Ngrams):
        super().__init__()
        self.value = value
        self.tables = nn.ModuleList(nn.Embedding(value.rows, value.features) for _ in value.orders)
        self.out = nn.Linear(width + value.features * len(value.orders), width, bias=False)

    def new_entry(self, segment_memory: bool = False) -> Entry:
        return KVCache()  # its keys are the tokens, counted from 1

    def max_distance(self) -> int | None:
        return max(self.value.orders) - 1

    def output_map(self) -> nn.Linear | None:
        return self.out

    def forward(self, x_BTD: Tensor, context: Context, entry: Entry | None) -> tuple[Tensor, Entry | None]:
        token_BT = context.side.tokens
        assert token_BT is not None
        seen = KVCache(((token_BT.long() + 1)[:, None, :, None],))
        if entry is not None:
            assert isinstance(entry, KVCache)
            seen = entry.append(seen)
        parts, positions, scale = [x_BTD], seen.placed(context).positions, math.sqrt(self.value.features)
        hashes = _hashes(token_BT.long() + 1, seen.k_BHKE[:, 0], max(self.value.orders), positions)
        for order, table in zip(self.value.orders, self.tables, strict=True):
            parts.append((table(hashes[order - 1] % self.value.rows) * scale).to(x_BTD.dtype))
        return self.out(torch.cat(parts, dim=-1)), seen


def _hashes(token_BT: Tensor, seen_BK1: Tensor, orders: int, positions: Positions) -> list[Tensor]:
    """The hash of the last 1, 2, ... tokens at each position."""
    hashes = [token_BT]
    for back in range(1, orders):
        hashes.append((hashes[-1] * FACTOR + _earlier(seen_BK1, back, positions)) % PRIME)
    return hashes


def _earlier(seen_BK1: Tensor, back: int, positions: Positions) -> Tensor:
    """The token so many tokens before each query, counted from 1; 0 where there is none."""
    if positions.query_BQ is None:
        visible_BK = None if positions.in_order else (positions.key_positions() >= 0).expand(seen_BK1.shape[:2])
        return shift(seen_BK1, back, visible_BK)[:, seen_BK1.shape[1] - positions.queries :, 0].long()
    position_B1K, wanted_BQ1 = positions.key_positions()[:, None], positions.query_positions()[..., None] - back
    is_there_BQK = (position_B1K == wanted_BQ1) & (position_B1K >= 0)
    return (is_there_BQK * seen_BK1.mT).sum(-1)
