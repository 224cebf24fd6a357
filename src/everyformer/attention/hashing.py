"""Locality-sensitive hashing of keys, for the patterns `hashed` and `chunked`.

Paper: Kitaev et al. 2020, Reformer: The Efficient Transformer (Weng 2020, source W).
Equations, for a head and a round r with the random matrix R_r:
    h_r(x) = argmax([x R_r; -x R_r])                                      one bucket for each direction: similar keys share one
    hashed    S_i = U_r {j < i : h_r(k_j) = h_r(k_i), fewer than w of that bucket between them}, {i} if that is empty
    chunked   S_i = U_r {j < i : floor(s_j / m) = floor(s_i / m) or floor(s_i / m) - 1}, {i} if that is empty,
              s the ranks after sorting by bucket, then by position
Each key counts once, however many rounds allow it; the -log N_ij in the paper's appendix has the same effect.
With several numbers of buckets b_1, b_2, ... the bucket is h^1 + b_1 h^2 + b_1 b_2 h^3 + ..., each h^n with a matrix of its own.
Symbols: `rounds` n_rounds, `buckets` b, `window` w, `chunk` m.
Departures: Weng 2020 (source W) writes h(q_i) = h(k_i) where h(k_j) is meant, and leaves out the rounds, their duplicates, j <= i
and that a query attends to itself only if it has no other key. The published sets are those of `chunked`; both published codes
count a key once for each round, and wrap around: before the first chunk of a round comes the last of the round before. `hashed` is
our own: sorted ranks change with every later token, ranks within a bucket do not, so no later token changes anything and a cache is
exact. The random matrices are drawn once and saved with the model, not drawn in each step, and the number of buckets belongs to the
model and does not grow with the length. Keys are hashed as projected, before score modifications transform them.
"""

from __future__ import annotations

import math
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.attention.context import Context
from everyformer.attention.has_data import has_data, is_exporting
from everyformer.attention.kernels.request import HALF
from everyformer.attention.pattern import Chunked, Hashed, Pattern

BUCKET = 2**32  # the table has BUCKET times the bucket plus the rank in it: ranks are smaller
MAX_DIRECTIONS = 256  # of the Triton program


class Hash(nn.Module):
    """The random matrices of one attention, which hash its keys."""

    rotation_RHEN: Tensor

    def __init__(self, pattern: Hashed | Chunked, heads: int, key_width: int):
        super().__init__()
        self.pattern = pattern
        self.factors = pattern.factors if isinstance(pattern, Chunked) else (pattern.buckets,)
        shape = (pattern.rounds, heads, key_width, sum(self.factors) // 2)
        self.register_buffer("rotation_RHEN", torch.randn(shape))

    def buckets(self, k_BHKE: Tensor) -> Tensor:
        """Returns the bucket of each key in each round: B, H, K, R."""
        parts = self.rotation_RHEN.split([size // 2 for size in self.factors], dim=-1)
        bucket_BHKR, step = buckets(k_BHKE.detach(), parts[0]), 1
        for part_RHEN, size in zip(parts[1:], self.factors, strict=False):
            step *= size
            bucket_BHKR = bucket_BHKR + step * buckets(k_BHKE.detach(), part_RHEN)
        return bucket_BHKR

    def forward(self, bucket_BHKR: Tensor, context: Context) -> Tensor:
        """Returns the table of hashes B, H, rows, positions. Its last row has a 1 for each query without other keys, its last column is
        for padding."""
        bucket_BHRK, count = bucket_BHKR.mT, math.prod(self.factors)
        if context.positions.key_BK is not None:  # padding has one more bucket, after the others
            bucket_BHRK = bucket_BHRK.masked_fill(context.positions.key_BK[:, None, None] < 0, count)
        if isinstance(self.pattern, Chunked):
            return _by_position(_chunks(_sorted(bucket_BHRK, count)[0], self.pattern, context), context)
        return _by_position(_ranks(bucket_BHRK, count), context)


def hashing(pattern: Pattern) -> set[Hashed | Chunked]:
    """Returns the parts of a pattern that read hashed keys."""
    return {part for part in pattern.walk() if isinstance(part, Hashed | Chunked)}


def buckets(k_BHKE: Tensor, rotation_RHEN: Tensor) -> Tensor:
    """Returns argmax([k R; -k R]) for each round, B, H, K, R. In float32 or better: a bucket must not depend on the precision."""
    has_program = k_BHKE.is_cuda and k_BHKE.dtype in HALF and rotation_RHEN.shape[-1] <= MAX_DIRECTIONS
    if has_program and not torch.compiler.is_compiling() and find_spec("triton"):
        return _buckets_by_program(k_BHKE, rotation_RHEN)
    exact = torch.promote_types(k_BHKE.dtype, torch.float32)
    of_rounds = []
    with torch.autocast(k_BHKE.device.type, enabled=False):
        for rotation_HEN in rotation_RHEN.to(exact):
            projected_BHKN = k_BHKE.to(exact) @ rotation_HEN
            (most, at), (least, opposite) = projected_BHKN.max(-1), projected_BHKN.min(-1)
            of_rounds.append(torch.where(most >= -least, at, opposite + projected_BHKN.shape[-1]))  # eq. W25
    return torch.stack(of_rounds, dim=3)


def _buckets_by_program(k_BHKE: Tensor, rotation_RHEN: Tensor) -> Tensor:
    """Returns the same by a Triton program that does not store the projected keys."""
    from everyformer.attention.kernels import programs

    k_BHKE = k_BHKE if k_BHKE.stride(-1) == 1 else k_BHKE.contiguous()
    batch, heads, keys, width = k_BHKE.shape
    rounds, half = rotation_RHEN.shape[0], rotation_RHEN.shape[-1]
    bucket_BHKR = torch.empty(batch, heads, keys, rounds, dtype=torch.int64, device=k_BHKE.device)
    if not has_data(k_BHKE):
        return bucket_BHKR
    sizes = {"M": 64, "N": max(16, 1 << (half - 1).bit_length()), "E": max(16, 1 << (width - 1).bit_length())}
    programs.buckets[(-(-keys // 64), batch * heads)](
        k_BHKE, rotation_RHEN.float().contiguous(), bucket_BHKR, keys, heads, *k_BHKE.stride()[:3],
        ROUNDS=rounds, HALF=half, WIDTH=width, **sizes,
    )  # fmt: skip
    return bucket_BHKR


def _sorted(bucket_BHRK: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    """Returns the rank of each key in its row, sorted by bucket and position, and the rank of the first key of its bucket."""
    if is_exporting():
        return _counted(bucket_BHRK)
    keys, kinds = bucket_BHRK.shape[-1], buckets + 1  # and the one for padding
    row = torch.arange(bucket_BHRK[..., 0].numel(), device=bucket_BHRK.device).view(*bucket_BHRK.shape[:3], 1)
    group_BHRK = bucket_BHRK + row * kinds
    sorts = 1 if bucket_BHRK.is_cuda else row.numel()  # a GPU sorts one long row faster than many
    group, order = group_BHRK.reshape(sorts, -1).to(torch.int32).sort(dim=-1, stable=True)
    count = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    rank_BHRK = torch.empty_like(order).scatter_(-1, order, count).view_as(group_BHRK) % keys
    first = torch.searchsorted(group.flatten(), torch.arange(row.numel() * kinds, device=row.device, dtype=torch.int32))
    return rank_BHRK, first[group_BHRK] - row * keys


def _counted(bucket_BHRK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the same by comparing all pairs, without a sort, which not every format of graphs has."""
    index_K = torch.arange(bucket_BHRK.shape[-1], device=bucket_BHRK.device)
    one, other = bucket_BHRK[..., :, None], bucket_BHRK[..., None, :]
    first_BHRK = (other < one).sum(-1)
    return first_BHRK + ((other == one) & (index_K < index_K[:, None])).sum(-1), first_BHRK


def _ranks(bucket_BHRK: Tensor, buckets: int) -> Tensor:
    """Returns for each round BUCKET times the bucket plus the rank in it; in the last row 1 for keys that are first in every bucket."""
    sorted_BHRK, first_BHRK = _sorted(bucket_BHRK, buckets)
    rank_BHRK = sorted_BHRK - first_BHRK
    alone = (rank_BHRK == 0).all(2, keepdim=True).long()
    return torch.cat((bucket_BHRK * BUCKET + rank_BHRK, alone), dim=2)


def _chunks(rank_BHRK: Tensor, pattern: Chunked, context: Context) -> Tensor:
    """Returns for each round the chunk of each sorted key; for each round the chunk before it, cyclically through all rounds; in the
    last row 1 for queries without other keys."""
    rounds, keys = rank_BHRK.shape[2:]
    at_BK = context.positions.key_positions()
    chunks = ((at_BK >= 0).sum(1) + pattern.chunk - 1).view(-1, 1, 1, 1) // pattern.chunk  # in a round
    first = torch.arange(rounds, device=context.positions.device)[:, None] * chunks
    chunk_BHRK = first + rank_BHRK // pattern.chunk
    previous_BHRK = (chunk_BHRK - 1) % (rounds * chunks)

    # A query is alone if the two chunks of every round have no earlier key, and, if bidirectional, no later one.
    alone = torch.ones_like(chunk_BHRK[:, :, :1], dtype=torch.bool)
    for sign in (1, -1) if pattern.bidirectional else (1,):
        at_BHRK = (sign * at_BK).masked_fill(at_BK < 0, BUCKET)[:, None, None].expand_as(chunk_BHRK)
        none = torch.full(
            (*chunk_BHRK.shape[:2], rounds * ((keys + pattern.chunk - 1) // pattern.chunk)),
            BUCKET,
            device=context.positions.device,
        )
        earliest = none.scatter_reduce(-1, chunk_BHRK.flatten(2), at_BHRK.flatten(2), "amin")
        for chunk in (chunk_BHRK, previous_BHRK):
            alone &= (earliest.gather(-1, chunk.flatten(2)).view_as(chunk_BHRK) >= at_BHRK).all(2, keepdim=True)
    return torch.cat((chunk_BHRK, previous_BHRK, alone.long()), dim=2)


def _by_position(row_BHRK: Tensor, context: Context) -> Tensor:
    """Returns the rows of keys as a table by position, with a last column for padding."""
    if context.positions.key_BK is None:
        return F.pad(row_BHRK, (0, 1), value=-2 * BUCKET)
    padding = context.positions.table_size()
    table_BHRP = row_BHRK.new_full((*row_BHRK.shape[:3], padding + 1), -2 * BUCKET)
    at_BK = context.positions.key_BK.masked_fill(context.positions.key_BK < 0, padding)
    table_BHRP = table_BHRP.scatter(-1, at_BK[:, None, None].expand_as(row_BHRK), row_BHRK)
    table_BHRP[..., -1] = -2 * BUCKET
    return table_BHRP
