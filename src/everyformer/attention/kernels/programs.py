"""The Triton programs of `fused`: flash attention (Dao 2023) over slots, and the buckets of hashed keys.

A part of a plan numbers its queries and keys by slots and decides which pairs are allowed. Query slot x is position i, key slot y is
position j:

    kind               query slot x   key slot y                          allowed pairs
    band               i = x          j = y                               i // l * l - m <= j <= i, l - c - s <= j % l < l - s
    residue            i = r + l x    j = r + l y                         m <= x - y
    distant            i = x          j = y // c * l + l - c - s + y % c  y < i // l * c
    block and distant  i = x          as distant up to y = n c,           j <= i, in the same l or l - c - s <= j % l < l - s
                                      then n l + y - n c
    bucket             i = order[x]   j = order[y]                        0 < rank[i] - rank[j] <= m and in no earlier round,
                                                                          or i = j in the first round if i has no other key

with l the SIZE, m `back`, c the COLUMNS and s `skip` of the part, r the residue class of the program, and n the block of l of its first
query; `which` is r or n. The programs of keys compute `block and distant` as a band and a distant part.

A band may be soft: the weight of a key is multiplied by min(max((ramp + z_i - (i - j)) / ramp, 0), 1), and keys with 0 are not read.
A band may be RELATIVE: `relative` has a number for each query, the first of which is position `offset`, and each distance, the last column
for the distance 0; it is added to the score, and a pair without a number in the table, or with -inf, is hidden.
Scores are never stored. A part that is not the FIRST continues from the outputs, sums and gradients of those before it.
Products are computed in the precision of the inputs, everything else in float32; `total` is the base-2 logarithm of a query's sum.
Offsets within a sequence are 32-bit: computing them takes much of the time.
A block meets the others, from `low` to `high`, in three pieces. In the FULL one all pairs are allowed and no mask is computed. The
other two go in steps of UNEVEN, smaller than the full one's: the mask needs registers, and the fewer registers a block needs, the
more blocks run on a multiprocessor.
"""

from __future__ import annotations

import triton
import triton.language as tl

BAND = tl.constexpr(0)
RESIDUE = tl.constexpr(1)
DISTANT = tl.constexpr(2)
BLOCK_AND_DISTANT = tl.constexpr(3)
BUCKET = tl.constexpr(4)
LOG2E = tl.constexpr(1.4426950408889634)
FULL = tl.constexpr(1)  # the second of the three pieces
LAST = tl.constexpr(2)


@triton.jit
def _program(
    order, rank, alone, blocks, length, heads, group, groups, rounds,
    KIND: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROUND: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Returns what a program computes: its block of slots; the row of its sequence and head among those of its group and among all,
    the offset of that row and its residue class; the number of its query and key slots; and its tables of buckets."""
    block, number = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    which = 0
    queries = length
    keys = length
    if KIND == RESIDUE:
        which = number % SIZE
        number = number // SIZE
        queries = (length - which + SIZE - 1) // SIZE
        keys = queries
    if KIND == DISTANT:
        keys = length // SIZE * COLUMNS
    per_group = heads // groups
    # Heads are 32-bit, because 64 bits would occupy registers throughout the program.
    b, h = (number // per_group).to(tl.int64), group + number % per_group * groups
    number, row = number.to(tl.int64), b * heads + h
    if KIND == BUCKET:
        order += (row * rounds + ROUND) * length
        rank += row * rounds * length
        alone += row * length
    return block, number, row, b * length * heads * E + h * E, which, queries, keys, order, rank, alone


@triton.jit
def _blocks_before(start, queries, M: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns the number of blocks before the queries from a slot on, and the number of key slots that these may attend to."""
    before = start // SIZE
    return before, tl.minimum(start + M, queries) - before * (SIZE - COLUMNS)


@triton.jit
def _column(slot, skip, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    return slot // COLUMNS * SIZE + SIZE - COLUMNS - skip + slot % COLUMNS


@triton.jit
def _positions(
    slot, count, order, which, skip, IS_KEY: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr
):
    at = slot
    if KIND == RESIDUE:
        at = which + SIZE * slot
    if KIND == DISTANT and IS_KEY:
        at = _column(slot, skip, SIZE, COLUMNS)
    if KIND == BLOCK_AND_DISTANT and IS_KEY:
        at = tl.where(slot < which * COLUMNS, _column(slot, skip, SIZE, COLUMNS), which * (SIZE - COLUMNS) + slot)
    if KIND == BUCKET:
        at = tl.load(order + slot, mask=slot < count, other=0)
    return at


@triton.jit
def _keys_from(
    at, keys, order, which, skip, step, e,
    IS_FULL: tl.constexpr, N: tl.constexpr, UNEVEN: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Returns the key slots of a step, their positions, their offsets in memory, and which of them exist."""
    y = at + tl.arange(0, N if IS_FULL else UNEVEN)
    j = _positions(
        y, keys, order, which, skip, True, DISTANT if KIND == BLOCK_AND_DISTANT and IS_FULL else KIND, SIZE, COLUMNS
    )
    return y, j, j[:, None] * step + e[None, :], (y < keys)[:, None] | IS_FULL


@triton.jit
def _allowed(
    x, y, i, j, z, queries, keys, which, rank, alone, length, ramp, back, skip,
    KIND: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, SOFT: tl.constexpr, ROUND: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Returns the allowed pairs, queries along one axis and keys along the second. If the part is soft, also the soft mask, and the
    same before it is clamped."""
    # A query slot past the last allows keys up to -1, so none; a key slot past the last comes after every query.
    if KIND == BAND:
        allowed = (j <= tl.where(x < queries, i, -1)) & (j >= i // SIZE * SIZE - back)
        if COLUMNS < SIZE:
            allowed &= (j + skip) % SIZE >= SIZE - COLUMNS
    if KIND == RESIDUE:
        allowed = y <= tl.where(x < queries, x - back, -1)
    if KIND == DISTANT:
        allowed = y < tl.where(x < queries, i // SIZE * COLUMNS, 0)
    if KIND == BLOCK_AND_DISTANT:
        allowed = y <= tl.where(x < queries, x - which * (SIZE - COLUMNS), -1)
        if SIZE % M:  # the queries belong to several blocks
            allowed &= (j >= i // SIZE * SIZE) | ((j + skip) % SIZE >= SIZE - COLUMNS)
    if KIND == BUCKET:
        distance = tl.load(rank + ROUND * length + i) - tl.load(rank + ROUND * length + j)
        in_window = (distance > 0) & (distance <= back)
        for earlier in tl.static_range(ROUND):
            distance = tl.load(rank + earlier * length + i) - tl.load(rank + earlier * length + j)
            in_window &= (distance <= 0) | (distance > back)
        if ROUND == 0:
            in_window |= (x == y) & (tl.load(alone + i) > 0)
        allowed = in_window & (x < queries) & (y < keys)
    weight, raw = allowed, allowed
    if SOFT:
        raw = (ramp + z - (i - j)) * (1.0 / ramp)
        weight = tl.minimum(tl.maximum(raw, 0.0), 1.0)
        allowed &= raw > 0.0
    return allowed, weight, raw


@triton.jit
def _relative_offsets(i, j, length, offset, distances):
    """Returns where the relative numbers of pairs stand in their table, and which pairs have one."""
    at, distance = i - offset, i - j
    exists = (at >= 0) & (i < length) & (distance >= 0) & (distance < distances)
    return at * distances + distances - 1 - distance, exists


@triton.jit
def _pieces(low, full_start, full_end, high, STEP: tl.constexpr):
    """Returns the bounds of three pieces; the middle one lies within `full_start` and `full_end`, in whole steps."""
    full_start = tl.minimum(low + tl.cdiv(tl.maximum(full_start - low, 0), STEP) * STEP, high)
    full_end = full_start + tl.maximum(tl.minimum(full_end, high) - full_start, 0) // STEP * STEP
    return low, full_start, full_end, high


@triton.jit
def _keys_of(
    start, queries, keys, which, z, ramp, back,
    M: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """Returns the pieces of the key slots to which the queries from a slot on may attend."""
    end = tl.minimum(start + M, queries)
    low, full_start, full_end = 0, 0, 0
    high = tl.minimum(end, keys)
    if KIND == BAND:
        low = tl.maximum(start // SIZE * SIZE - back, 0)
        if COLUMNS == SIZE:
            full_start, full_end = (end - 1) // SIZE * SIZE - back, start + 1
        if SOFT:
            low = tl.maximum(low, start - tl.ceil(tl.max(z, 0) + ramp).to(tl.int32))
            full_start = tl.maximum(full_start, end - tl.ceil(tl.min(z, 0)).to(tl.int32))
    if KIND == RESIDUE:
        full_end = start - back + 1
    if KIND == BUCKET:
        low = tl.maximum(start - back, 0)
    if KIND == DISTANT:
        full_end, high = start // SIZE * COLUMNS, (end - 1) // SIZE * COLUMNS
    if KIND == BLOCK_AND_DISTANT:
        full_end, high = which * COLUMNS, keys
    return _pieces(low, full_start, full_end, high, N)


@triton.jit
def _queries_of(
    start, queries, max_span, min_span, back,
    M: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """Returns the pieces of the query slots that may attend to the keys from a slot on."""
    low, full_start, full_end = start, 0, 0
    high = queries
    if KIND == BAND:
        high = tl.minimum(high, (start + N - 1 + back) // SIZE * SIZE + SIZE)
        if COLUMNS == SIZE:
            full_start, full_end = start + N - 1, (start + back) // SIZE * SIZE + SIZE
        if SOFT:
            high, full_end = tl.minimum(high, start + N + max_span), tl.minimum(full_end, start + min_span)
    if KIND == RESIDUE:
        full_start, full_end = start + N - 1 + back, queries
    if KIND == BUCKET:
        high = tl.minimum(high, start + N + back)
    if KIND == DISTANT:
        low, full_start, full_end = (start // COLUMNS + 1) * SIZE, tl.cdiv(start + N, COLUMNS) * SIZE, queries
    return _pieces(low, full_start, full_end, high, M)


@triton.jit
def forward(
    q, k, v, output, total, z, relative, order, rank, alone,
    blocks, length, heads, group, groups, rounds, scale, ramp, back, skip, offset, distances,
    KIND: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, SOFT: tl.constexpr, RELATIVE: tl.constexpr,
    ROUND: tl.constexpr, FIRST: tl.constexpr, M: tl.constexpr, N: tl.constexpr, UNEVEN: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    block, _number, row, base, which, queries, keys, order, rank, alone = _program(
        order, rank, alone, blocks, length, heads, group, groups, rounds, KIND, SIZE, COLUMNS, ROUND, E
    )
    step, e = heads * E, tl.arange(0, E)
    start = (blocks - 1 - block) * M  # the longest rows first
    if KIND == BLOCK_AND_DISTANT:
        which, keys = _blocks_before(start, queries, M, SIZE, COLUMNS)
    x = start + tl.arange(0, M)
    i = _positions(x, queries, order, which, skip, False, KIND, SIZE, COLUMNS)
    valid, own_offsets, stat = (x < queries), i[:, None] * step + e[None, :], row * length + i
    q, k, v, output = q + base, k + base, v + base, output + base
    if RELATIVE:
        relative += row * (length - offset) * distances
    q_ME = tl.load(q + own_offsets, mask=valid[:, None], other=0.0)
    z_M = tl.zeros([M], tl.float32)
    if SOFT:
        z_M = tl.load(z + stat, mask=valid, other=0.0)
    top, sum_, acc = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, E], tl.float32)
    if not FIRST:
        top = tl.load(total + stat, mask=valid, other=float("-inf"))
        sum_ = tl.where(top == float("-inf"), 0.0, 1.0)
        acc = tl.load(output + own_offsets, mask=valid[:, None], other=0.0).to(tl.float32)

    bounds = _keys_of(start, queries, keys, which, z_M, ramp, back, M, N, KIND, SIZE, COLUMNS, SOFT)
    for piece in tl.static_range(LAST if KIND == BUCKET else (FULL if KIND == BLOCK_AND_DISTANT else 0), 3):
        for at in range(bounds[piece], bounds[piece + 1], N if piece == FULL else UNEVEN):
            y, j, other_offsets, exists = _keys_from(
                at, keys, order, which, skip, step, e, piece == FULL, N, UNEVEN, KIND, SIZE, COLUMNS
            )
            k_NE = tl.load(k + other_offsets, mask=exists, other=0.0)
            score = tl.dot(q_ME, tl.trans(k_NE))
            if RELATIVE:
                relative_offsets, has_number = _relative_offsets(i[:, None], j[None, :], length, offset, distances)
                number_MN = tl.load(relative + relative_offsets, mask=has_number, other=float("-inf"))
                score += number_MN.to(tl.float32) * (1.0 / scale)
            if piece != FULL:
                allowed, weight, _ = _allowed(
                    x[:, None], y[None, :], i[:, None], j[None, :], z_M[:, None], queries, keys, which, rank, alone, length,
                    ramp, back, skip, KIND, SIZE, COLUMNS, SOFT, ROUND, M,
                )  # fmt: skip
                score = tl.where(allowed, score, float("-inf"))
            new = tl.maximum(top, tl.max(score, 1) * (scale * LOG2E))
            safe = new
            if piece != FULL or RELATIVE:
                safe = tl.where(new == float("-inf"), 0.0, new)
            p = tl.exp2(score * (scale * LOG2E) - safe[:, None])
            if SOFT and piece != FULL:
                p *= weight
            decay = tl.exp2(top - safe)
            v_NE = tl.load(v + other_offsets, mask=exists, other=0.0)
            acc = acc * decay[:, None] + tl.dot(p.to(v_NE.dtype), v_NE)
            sum_, top = sum_ * decay + tl.sum(p, 1), new
    sum_ = tl.where(sum_ == 0.0, 1.0, sum_)
    tl.store(output + own_offsets, (acc / sum_[:, None]).to(q_ME.dtype), mask=valid[:, None])
    tl.store(total + stat, top + tl.log2(sum_), mask=valid)


@triton.jit
def to_queries(
    q, k, v, gradient, output, total, delta, to_q, to_z, to_relative, z, relative, order, rank, alone,
    blocks, length, heads, group, groups, rounds, scale, ramp, back, skip, offset, distances,
    KIND: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, SOFT: tl.constexpr, RELATIVE: tl.constexpr,
    ROUND: tl.constexpr, FIRST: tl.constexpr, M: tl.constexpr, N: tl.constexpr, UNEVEN: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of queries and spans, and for `to_keys` the product `delta` of each output and its gradient."""
    block, _number, row, base, which, queries, keys, order, rank, alone = _program(
        order, rank, alone, blocks, length, heads, group, groups, rounds, KIND, SIZE, COLUMNS, ROUND, E
    )
    step, e = heads * E, tl.arange(0, E)
    start = (blocks - 1 - block) * M
    if KIND == BLOCK_AND_DISTANT:
        which, keys = _blocks_before(start, queries, M, SIZE, COLUMNS)
    x = start + tl.arange(0, M)
    i = _positions(x, queries, order, which, skip, False, KIND, SIZE, COLUMNS)
    valid, own_offsets, stat = (x < queries), i[:, None] * step + e[None, :], row * length + i
    q, k, v, gradient, output, to_q = q + base, k + base, v + base, gradient + base, output + base, to_q + base
    q_ME = tl.load(q + own_offsets, mask=valid[:, None], other=0.0)
    gradient_ME = tl.load(gradient + own_offsets, mask=valid[:, None], other=0.0)
    total_M = tl.load(total + stat, mask=valid, other=0.0)
    if RELATIVE:
        relative += row * (length - offset) * distances
        to_relative += row * (length - offset) * distances
        total_M = tl.where(total_M == float("-inf"), 0.0, total_M)  # of a query without keys
    if FIRST:
        output_ME = tl.load(output + own_offsets, mask=valid[:, None], other=0.0)
        delta_M = tl.sum(gradient_ME.to(tl.float32) * output_ME.to(tl.float32), 1)
        tl.store(delta + stat, delta_M, mask=valid)
    else:
        delta_M = tl.load(delta + stat, mask=valid, other=0.0)
    z_M = tl.zeros([M], tl.float32)
    if SOFT:
        z_M = tl.load(z + stat, mask=valid, other=0.0)
    acc, acc_z = tl.zeros([M, E], tl.float32), tl.zeros([M], tl.float32)

    bounds = _keys_of(start, queries, keys, which, z_M, ramp, back, M, N, KIND, SIZE, COLUMNS, SOFT)
    for piece in tl.static_range(LAST if KIND == BUCKET else (FULL if KIND == BLOCK_AND_DISTANT else 0), 3):
        for at in range(bounds[piece], bounds[piece + 1], N if piece == FULL else UNEVEN):
            y, j, other_offsets, exists = _keys_from(
                at, keys, order, which, skip, step, e, piece == FULL, N, UNEVEN, KIND, SIZE, COLUMNS
            )
            k_NE = tl.load(k + other_offsets, mask=exists, other=0.0)
            v_NE = tl.load(v + other_offsets, mask=exists, other=0.0)
            score = tl.dot(q_ME, tl.trans(k_NE))
            if RELATIVE:
                relative_offsets, has_number = _relative_offsets(i[:, None], j[None, :], length, offset, distances)
                number_MN = tl.load(relative + relative_offsets, mask=has_number, other=float("-inf"))
                score += number_MN.to(tl.float32) * (1.0 / scale)
            p = tl.exp2(score * (scale * LOG2E) - total_M[:, None])
            if piece != FULL:
                allowed, weight, raw = _allowed(
                    x[:, None], y[None, :], i[:, None], j[None, :], z_M[:, None], queries, keys, which, rank, alone, length,
                    ramp, back, skip, KIND, SIZE, COLUMNS, SOFT, ROUND, M,
                )  # fmt: skip
                p = tl.where(allowed, p, 0.0)
            to_score = p * (tl.dot(gradient_ME, tl.trans(v_NE)) - delta_M[:, None])
            if SOFT and piece != FULL:
                acc_z += tl.sum(tl.where(raw <= 1.0, to_score, 0.0), 1)
                to_score *= weight
            if RELATIVE:
                tl.store(to_relative + relative_offsets, to_score.to(relative.dtype.element_ty), mask=has_number)
            acc += tl.dot(to_score.to(k_NE.dtype), k_NE)
    acc *= scale
    if not FIRST:
        acc += tl.load(to_q + own_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
    tl.store(to_q + own_offsets, acc.to(q_ME.dtype), mask=valid[:, None])
    if SOFT:
        tl.store(to_z + stat, acc_z * (1.0 / ramp), mask=valid)


@triton.jit
def to_keys(
    q, k, v, gradient, total, delta, to_k, to_v, z, spans, relative, order, rank, alone,
    blocks, length, heads, group, groups, rounds, scale, ramp, back, skip, offset, distances,
    KIND: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, SOFT: tl.constexpr, RELATIVE: tl.constexpr,
    ROUND: tl.constexpr, FIRST: tl.constexpr, M: tl.constexpr, N: tl.constexpr, UNEVEN: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of keys and values. All queries attend to the few distant keys: several programs share the queries of
    a block of these keys, and each stores its sums separately (B H of the group, programs, keys, E) for `add_distant`."""
    block, number, row, base, which, queries, keys, order, rank, alone = _program(
        order, rank, alone, blocks, length, heads, group, groups, rounds, KIND, SIZE, COLUMNS, ROUND, E
    )
    step, e = heads * E, tl.arange(0, E)
    start = block * N
    y = start + tl.arange(0, N)
    j = _positions(y, keys, order, which, skip, True, KIND, SIZE, COLUMNS)
    own_offsets, valid = j[:, None] * step + e[None, :], (y < keys)[:, None]
    q, k, v, gradient = q + base, k + base, v + base, gradient + base
    total, delta = total + row * length, delta + row * length
    if RELATIVE:
        relative += row * (length - offset) * distances
    k_NE = tl.load(k + own_offsets, mask=valid, other=0.0)
    v_NE = tl.load(v + own_offsets, mask=valid, other=0.0)
    acc_k, acc_v = tl.zeros([N, E], tl.float32), tl.zeros([N, E], tl.float32)
    max_span, min_span = 0, 0
    if SOFT:
        max_span, min_span = tl.load(spans + row * 2), tl.load(spans + row * 2 + 1)

    bounds = _queries_of(start, queries, max_span, min_span, back, M, N, KIND, SIZE, COLUMNS, SOFT)
    for piece in tl.static_range(LAST if KIND == BUCKET else 0, 3):
        step_size = M if piece == FULL else UNEVEN
        for at in range(
            bounds[piece] + tl.program_id(1) * step_size, bounds[piece + 1], tl.num_programs(1) * step_size
        ):
            x = at + tl.arange(0, M if piece == FULL else UNEVEN)
            i = _positions(x, queries, order, which, skip, False, KIND, SIZE, COLUMNS)
            exists, other_offsets = (x < queries) | (piece == FULL), i[:, None] * step + e[None, :]
            q_ME = tl.load(q + other_offsets, mask=exists[:, None], other=0.0)
            gradient_ME = tl.load(gradient + other_offsets, mask=exists[:, None], other=0.0)
            total_M = tl.load(total + i, mask=exists, other=0.0)
            delta_M = tl.load(delta + i, mask=exists, other=0.0)
            # Keys along the first axis: so the result has the layout that the next product needs.
            score = tl.dot(k_NE, tl.trans(q_ME))
            if RELATIVE:
                total_M = tl.where(total_M == float("-inf"), 0.0, total_M)
                relative_offsets, has_number = _relative_offsets(i[None, :], j[:, None], length, offset, distances)
                number_NM = tl.load(relative + relative_offsets, mask=has_number, other=float("-inf"))
                score += number_NM.to(tl.float32) * (1.0 / scale)
            p = tl.exp2(score * (scale * LOG2E) - total_M[None, :])
            if piece != FULL:
                z_M = tl.zeros([UNEVEN], tl.float32)
                if SOFT:
                    z_M = tl.load(z + row * length + i, mask=exists, other=0.0)
                allowed, weight, _ = _allowed(
                    x[None, :], y[:, None], i[None, :], j[:, None], z_M[None, :], queries, keys, which, rank, alone, length,
                    ramp, back, skip, KIND, SIZE, COLUMNS, SOFT, ROUND, M,
                )  # fmt: skip
                p = tl.where(allowed, p, 0.0)
                if SOFT:
                    p *= weight
            acc_v += tl.dot(p.to(gradient_ME.dtype), gradient_ME)
            if KIND == DISTANT:  # a sum that starts at -delta, which then needs no registers besides
                initial = tl.zeros([N, M if piece == FULL else UNEVEN], tl.float32) - delta_M[None, :]
                to_score = p * tl.dot(v_NE, tl.trans(gradient_ME), initial)
            else:
                to_score = p * (tl.dot(v_NE, tl.trans(gradient_ME)) - delta_M[None, :])
            acc_k += tl.dot(to_score.to(q_ME.dtype), q_ME)
    acc_k *= scale
    if KIND == DISTANT:
        base, own_offsets = (number * tl.num_programs(1) + tl.program_id(1)) * keys * E, y[:, None] * E + e[None, :]
    to_k, to_v = to_k + base, to_v + base
    if KIND != DISTANT and not FIRST:
        acc_k += tl.load(to_k + own_offsets, mask=valid, other=0.0).to(tl.float32)
        acc_v += tl.load(to_v + own_offsets, mask=valid, other=0.0).to(tl.float32)
    tl.store(to_k + own_offsets, acc_k.to(to_k.dtype.element_ty), mask=valid)
    tl.store(to_v + own_offsets, acc_v.to(to_v.dtype.element_ty), mask=valid)


@triton.jit
def add_distant(
    shared_k, shared_v, to_k, to_v, blocks, length, heads, group, groups, skip,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, SHARED: tl.constexpr, N: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Adds the sums of SHARED programs to the gradients of distant keys and values."""
    block, row, _, base, _, _, keys, _, _, _ = _program(
        shared_k, shared_k, shared_k, blocks, length, heads, group, groups, 1, DISTANT, SIZE, COLUMNS, 0, E
    )
    y, e = block * N + tl.arange(0, N), tl.arange(0, E)
    j, valid = _positions(y, keys, shared_k, 0, skip, True, DISTANT, SIZE, COLUMNS), (y < keys)[:, None]
    own_offsets, other_offsets = base + j[:, None] * heads * E + e[None, :], y[:, None] * E + e[None, :]
    sum_k = tl.load(to_k + own_offsets, mask=valid, other=0.0).to(tl.float32)
    sum_v = tl.load(to_v + own_offsets, mask=valid, other=0.0).to(tl.float32)
    for number in tl.static_range(SHARED):
        sum_k += tl.load(shared_k + (row * SHARED + number) * keys * E + other_offsets, mask=valid, other=0.0)
        sum_v += tl.load(shared_v + (row * SHARED + number) * keys * E + other_offsets, mask=valid, other=0.0)
    tl.store(to_k + own_offsets, sum_k.to(to_k.dtype.element_ty), mask=valid)
    tl.store(to_v + own_offsets, sum_v.to(to_v.dtype.element_ty), mask=valid)


@triton.jit
def buckets(
    k, rotation, bucket_of, length, heads, per_sequence, per_head, per_position,
    ROUNDS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Computes argmax([k R; -k R]) of M keys in every round; one half of the buckets are directions, the second their opposites."""
    row, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * M + tl.arange(0, M)
    b, h, e, n = row // heads, row % heads, tl.arange(0, E), tl.arange(0, N)
    own_offsets = b * per_sequence + h * per_head + i[:, None] * per_position + e[None, :]
    k_ME = tl.load(k + own_offsets, mask=(i < length)[:, None] & (e < WIDTH)[None, :], other=0.0).to(tl.float32)
    for number in tl.static_range(ROUNDS):
        other_offsets = ((number * heads + h) * WIDTH + e[:, None]) * HALF + n[None, :]
        rotation_EN = tl.load(rotation + other_offsets, mask=(e < WIDTH)[:, None] & (n < HALF)[None, :], other=0.0)
        projected_MN = tl.dot(k_ME, rotation_EN, input_precision="tf32x3")
        most, at = tl.max(projected_MN, 1, return_indices=True)
        least, opposite = tl.min(projected_MN, 1, return_indices=True)
        bucket = tl.where(most >= -least, at, opposite + HALF)
        tl.store(bucket_of + (row * length + i) * ROUNDS + number, bucket.to(tl.int64), mask=i < length)
