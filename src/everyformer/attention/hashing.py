"""Locality-sensitive hashing of keys: what `hashed` and `chunked` know of each position.

Paper: Kitaev et al. 2020, Reformer: The Efficient Transformer (W).
Equations, of a head and a round with the random map R_r:
    h_r(x) = argmax([x R_r; -x R_r])                                      a bucket for each direction: like keys share one
    hashed    S_i = U_r {j < i : h_r(k_j) = h_r(k_i), fewer than w of that bucket between them}, {i} where that is empty
    chunked   S_i = U_r {j < i : floor(s_j / m) = floor(s_i / m) or floor(s_i / m) - 1}, {i} where that is empty,
              s the places after sorting by bucket, then by position
Each key counts once however many rounds show it, which is what the -log N_ij of the paper's appendix does.
Symbols: `rounds` n_rounds, `buckets` b, `window` w, `chunk` m.
Departures: W writes h(q_i) = h(k_i) where h(k_j) is meant, and leaves out the rounds, their duplicates, j <= i and that
nobody sees himself but when alone. The published sets are those of `chunked`; both published codes count a key once for
each round, and wrap around: before the first chunk of a round comes the last of the round before. `hashed` is
ours: sorting moves with every later position, ranks within a bucket do not, so the future moves nothing and a cache
is exact. The maps are drawn once and saved with the model, not anew in each step, and the number of buckets is the
model's, not the length's. Hashing sees keys as projected, before rules turn them.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.attention.context import Context
from everyformer.attention.has_data import has_data
from everyformer.attention.kernels.request import HALF
from everyformer.attention.pattern import Chunked, Hashed, Pattern

BUCKET = 2**32  # how far apart the places of two buckets are: ranks are smaller
MOST = 256  # directions that a program turns to at once


class Hash(nn.Module):
    """The random maps of one attention, and the places of its keys by them."""

    rotation_RHEN: Tensor

    def __init__(self, pattern: Hashed | Chunked, heads: int, key_width: int):
        super().__init__()
        self.pattern = pattern
        shape = (pattern.rounds, heads, key_width, pattern.buckets // 2)
        self.register_buffer("rotation_RHEN", torch.randn(shape))

    def buckets(self, k_BHKE: Tensor) -> Tensor:
        """B, H, K, R."""
        return buckets(k_BHKE.detach(), self.rotation_RHEN)

    def forward(self, bucket_BHKR: Tensor, context: Context) -> Tensor:
        """The table B, H, rows, positions; its last row says who is alone, its last column is for padding."""
        bucket_BHRK = bucket_BHKR.mT
        if context.positions.key_BK is not None:  # padding has a bucket of its own, behind the others
            bucket_BHRK = bucket_BHRK.masked_fill(context.positions.key_BK[:, None, None] < 0, self.pattern.buckets)
        if isinstance(self.pattern, Chunked):
            return _by_position(_chunks(bucket_BHRK, self.pattern, context), context)
        return _by_position(_ranks(bucket_BHRK, self.pattern.buckets), context)


def hashing(pattern: Pattern) -> set[Hashed | Chunked]:
    """The parts of a pattern that read hashed keys."""
    return {part for part in pattern.walk() if isinstance(part, Hashed | Chunked)}


def buckets(k_BHKE: Tensor, rotation_RHEN: Tensor) -> Tensor:
    """argmax([k R; -k R]) for each round, B, H, K, R. In float32 at least: a bucket must not depend on the precision."""
    at_once = k_BHKE.is_cuda and k_BHKE.dtype in HALF and rotation_RHEN.shape[-1] <= MOST
    if at_once and not torch.compiler.is_compiling() and find_spec("triton"):
        return _buckets_at_once(k_BHKE, rotation_RHEN)
    exact = torch.promote_types(k_BHKE.dtype, torch.float32)
    found = []
    with torch.autocast(k_BHKE.device.type, enabled=False):
        for rotation_HEN in rotation_RHEN.to(exact):
            turned_BHKN = k_BHKE.to(exact) @ rotation_HEN
            (most, at), (least, opposite) = turned_BHKN.max(-1), turned_BHKN.min(-1)
            found.append(torch.where(most >= -least, at, opposite + turned_BHKN.shape[-1]))
    return torch.stack(found, dim=3)


def _buckets_at_once(k_BHKE: Tensor, rotation_RHEN: Tensor) -> Tensor:
    """The same by a Triton program that keeps what it turns to itself."""
    from everyformer.attention.kernels import programs

    k_BHKE = k_BHKE if k_BHKE.stride(-1) == 1 else k_BHKE.contiguous()
    batch, heads, keys, width = k_BHKE.shape
    rounds, half = rotation_RHEN.shape[0], rotation_RHEN.shape[-1]
    found_BHKR = torch.empty(batch, heads, keys, rounds, dtype=torch.int64, device=k_BHKE.device)
    if not has_data(k_BHKE):
        return found_BHKR
    sizes = {"M": 64, "N": max(16, 1 << (half - 1).bit_length()), "E": max(16, 1 << (width - 1).bit_length())}
    programs.buckets[(-(-keys // 64), batch * heads)](
        k_BHKE, rotation_RHEN.float().contiguous(), found_BHKR, keys, heads, *k_BHKE.stride()[:3],
        ROUNDS=rounds, HALF=half, WIDTH=width, **sizes,
    )  # fmt: skip
    return found_BHKR


def _sorted(bucket_BHRK: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    """Where each key stands among those of its row by bucket and position, and where its bucket begins."""
    keys, kinds = bucket_BHRK.shape[-1], buckets + 1  # and that of padding
    row = torch.arange(bucket_BHRK[..., 0].numel(), device=bucket_BHRK.device).view(*bucket_BHRK.shape[:3], 1)
    group_BHRK = bucket_BHRK + row * kinds
    at_once = 1 if bucket_BHRK.is_cuda else row.numel()  # a GPU sorts one long row faster than many
    group, order = group_BHRK.reshape(at_once, -1).to(torch.int32).sort(dim=-1, stable=True)
    count = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    place_BHRK = torch.empty_like(order).scatter_(-1, order, count).view_as(group_BHRK) % keys
    first = torch.searchsorted(group.flatten(), torch.arange(row.numel() * kinds, device=row.device, dtype=torch.int32))
    return place_BHRK, first[group_BHRK] - row * keys


def _ranks(bucket_BHRK: Tensor, buckets: int) -> Tensor:
    """For each round BUCKET times the bucket plus the rank in it; last, who is first in every bucket."""
    place_BHRK, first_BHRK = _sorted(bucket_BHRK, buckets)
    rank_BHRK = place_BHRK - first_BHRK
    alone = (rank_BHRK == 0).all(2, keepdim=True).long()
    return torch.cat((bucket_BHRK * BUCKET + rank_BHRK, alone), dim=2)


def _chunks(bucket_BHRK: Tensor, pattern: Chunked, context: Context) -> Tensor:
    """For each round the chunk; for each round the chunk before it, in a circle through all rounds; last, who is alone."""
    place_BHRK, _ = _sorted(bucket_BHRK, pattern.buckets)
    rounds, keys = bucket_BHRK.shape[2:]
    at_BK = context.positions.key_positions()
    chunks = ((at_BK >= 0).sum(1) + pattern.chunk - 1).view(-1, 1, 1, 1) // pattern.chunk  # in a round
    first = torch.arange(rounds, device=context.positions.device)[:, None] * chunks
    own = first + place_BHRK // pattern.chunk
    last = (own - 1) % (rounds * chunks)

    # Alone is who finds nobody earlier in the two chunks of any round, and on both sides nobody later.
    alone = torch.ones_like(own[:, :, :1], dtype=torch.bool)
    for sign in (1, -1) if pattern.bidirectional else (1,):
        at_BHRK = (sign * at_BK).masked_fill(at_BK < 0, BUCKET)[:, None, None].expand_as(own)
        none = torch.full((*own.shape[:2], rounds * -(-keys // pattern.chunk)), BUCKET, device=context.positions.device)
        earliest = none.scatter_reduce(-1, own.flatten(2), at_BHRK.flatten(2), "amin")
        for chunk in (own, last):
            alone &= (earliest.gather(-1, chunk.flatten(2)).view_as(own) >= at_BHRK).all(2, keepdim=True)
    return torch.cat((own, last, alone.long()), dim=2)


def _by_position(place_BHRK: Tensor, context: Context) -> Tensor:
    """The numbers of keys as a table by position, with a last column for padding."""
    if context.positions.key_BK is None:
        return F.pad(place_BHRK, (0, 1), value=-2 * BUCKET)
    spare = int(context.positions.key_BK.max()) + 1
    table_BHRP = place_BHRK.new_full((*place_BHRK.shape[:3], spare + 1), -2 * BUCKET)
    at_BK = context.positions.key_BK.masked_fill(context.positions.key_BK < 0, spare)
    table_BHRP = table_BHRP.scatter(-1, at_BK[:, None, None].expand_as(place_BHRK), place_BHRK)
    table_BHRP[..., spare] = -2 * BUCKET
    return table_BHRP
