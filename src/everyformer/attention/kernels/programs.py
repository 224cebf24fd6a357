"""The Triton programs of `fused`: flash attention (Dao 2023) over slots, and the buckets of keys.

A part of a pattern numbers its queries and keys and says who sees whom. Query slot x is position i, key slot y position j:

    near      i = x             j = y                               i // l * l - m <= j <= i, l - c - s <= j % l < l - s
    residue   i = r + l x       j = r + l y                         m <= x - y
    far       i = x             j = y // c * l + l - c - s + y % c  y < i // l * c
    fixed     i = x             as far up to y = n c,               j <= i, of the same l or l - c - s <= j % l < l - s
                                then n l + y - n c
    bucket    i = order[x]      j = order[y]                        0 < place[i] - place[j] <= m and in no round before,
                                                                    or in the first round i = j where i is alone

with l the SIZE, m `back`, c the COLUMNS and s `skip` of the part, r its residue class, and n the block of l that a program's first query is
in (`which` is the one or the other). Programs of keys take a fixed part as near and far.

`near` may be soft: the weight of a key counts min(max((ramp + z_i - (i - j)) / ramp, 0), 1) times, and what counts nothing is not read.
Scores are never in memory. A part that is not the first goes on from the answers, sums and slopes of those before it.
Numbers are as given in products and float32 elsewhere; `total` is the logarithm to base 2 of a query's sum.
Within a sequence a number's place fits into 32 bits: adding up places takes much of the time.
A block meets the others from `low` to `high` in three pieces; in the flat one everybody sees everybody, and nothing is asked. The
others go in steps of UNEVEN, a part of the flat one's: who sees whom takes registers, and a processor that is to have more blocks has few.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEAR = tl.constexpr(0)
RESIDUE = tl.constexpr(1)
FAR = tl.constexpr(2)
FIXED = tl.constexpr(3)
BUCKET = tl.constexpr(4)
LOG2E = tl.constexpr(1.4426950408889634)
FLAT = tl.constexpr(1)  # the numbers of pieces
LAST = tl.constexpr(2)


@triton.jit
def _program(
    order, place, alone, blocks, length, heads, turn, turns, rounds,
    KIND: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROUND: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """What a program is for: which block of slots; the row of its sequence and head, among those of its group and among all, where its
    numbers begin, and its residue class; how many slots queries and keys have there; and the tables of the row."""
    block, number = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    which = 0
    queries = length
    keys = length
    if KIND == RESIDUE:
        which = number % SIZE
        number = number // SIZE
        queries = (length - which + SIZE - 1) // SIZE
        keys = queries
    if KIND == FAR:
        keys = length // SIZE * COLUMNS
    group = heads // turns
    # Heads in 32 bits, because 64 would take registers all through a program.
    b, h = (number // group).to(tl.int64), turn + number % group * turns
    number, row = number.to(tl.int64), b * heads + h
    if KIND == BUCKET:
        order += (row * rounds + ROUND) * length
        place += row * rounds * length
        alone += row * length
    return block, number, row, b * length * heads * E + h * E, which, queries, keys, order, place, alone


@triton.jit
def _behind(start, queries, M: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """The number of blocks behind the queries from a slot on, and of the key slots that these may see."""
    behind = start // SIZE
    return behind, tl.minimum(start + M, queries) - behind * (SIZE - COLUMNS)


@triton.jit
def _last(slot, skip, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    return slot // COLUMNS * SIZE + SIZE - COLUMNS - skip + slot % COLUMNS


@triton.jit
def _positions(
    slot, count, order, which, skip, IS_KEY: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr
):
    at = slot
    if KIND == RESIDUE:
        at = which + SIZE * slot
    if KIND == FAR and IS_KEY:
        at = _last(slot, skip, SIZE, COLUMNS)
    if KIND == FIXED and IS_KEY:
        at = tl.where(slot < which * COLUMNS, _last(slot, skip, SIZE, COLUMNS), which * (SIZE - COLUMNS) + slot)
    if KIND == BUCKET:
        at = tl.load(order + slot, mask=slot < count, other=0)
    return at


@triton.jit
def _keys_from(
    at, keys, order, which, skip, step, e,
    IS_FLAT: tl.constexpr, N: tl.constexpr, UNEVEN: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The key slots of a step, their positions, where their numbers are, and which of them there are."""
    y = at + tl.arange(0, N if IS_FLAT else UNEVEN)
    j = _positions(y, keys, order, which, skip, True, FAR if KIND == FIXED and IS_FLAT else KIND, SIZE, COLUMNS)
    return y, j, j[:, None] * step + e[None, :], (y < keys)[:, None] | IS_FLAT


@triton.jit
def _seen(
    x, y, i, j, z, queries, keys, which, place, alone, length, ramp, back, skip,
    KIND: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, SOFT: tl.constexpr, ROUND: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Who sees whom, of queries along one axis and keys along the other. Where it is soft, also what a key counts, and the same
    without bounds."""
    # A query that is none sees up to before the first key; a key that is none comes after every query.
    if KIND == NEAR:
        seen = (j <= tl.where(x < queries, i, -1)) & (j >= i // SIZE * SIZE - back)
        if COLUMNS < SIZE:
            seen &= (j + skip) % SIZE >= SIZE - COLUMNS
    if KIND == RESIDUE:
        seen = y <= tl.where(x < queries, x - back, -1)
    if KIND == FAR:
        seen = y < tl.where(x < queries, i // SIZE * COLUMNS, 0)
    if KIND == FIXED:
        seen = y <= tl.where(x < queries, x - which * (SIZE - COLUMNS), -1)
        if SIZE % M:  # the queries are of several blocks
            seen &= (j >= i // SIZE * SIZE) | ((j + skip) % SIZE >= SIZE - COLUMNS)
    if KIND == BUCKET:
        away = tl.load(place + ROUND * length + i) - tl.load(place + ROUND * length + j)
        near = (away > 0) & (away <= back)
        for before in tl.static_range(ROUND):
            away = tl.load(place + before * length + i) - tl.load(place + before * length + j)
            near &= (away <= 0) | (away > back)
        if ROUND == 0:
            near |= (x == y) & (tl.load(alone + i) > 0)
        seen = near & (x < queries) & (y < keys)
    weight, raw = seen, seen
    if SOFT:
        raw = (ramp + z - (i - j)) * (1.0 / ramp)
        weight = tl.minimum(tl.maximum(raw, 0.0), 1.0)
        seen &= raw > 0.0
    return seen, weight, raw


@triton.jit
def _pieces(low, flat, bent, high, STEP: tl.constexpr):
    """Bounds of three pieces, the middle one within `flat` to `bent`, in whole steps."""
    flat = tl.minimum(low + tl.cdiv(tl.maximum(flat - low, 0), STEP) * STEP, high)
    bent = flat + tl.maximum(tl.minimum(bent, high) - flat, 0) // STEP * STEP
    return low, flat, bent, high


@triton.jit
def _keys_of(
    start, queries, keys, which, z, ramp, back,
    M: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """The pieces of the key slots that the queries from a slot on may see."""
    end = tl.minimum(start + M, queries)
    low, flat, bent = 0, 0, 0
    high = tl.minimum(end, keys)
    if KIND == NEAR:
        low = tl.maximum(start // SIZE * SIZE - back, 0)
        if COLUMNS == SIZE:
            flat, bent = (end - 1) // SIZE * SIZE - back, start + 1
        if SOFT:
            low = tl.maximum(low, start - tl.ceil(tl.max(z, 0) + ramp).to(tl.int32))
            flat = tl.maximum(flat, end - tl.ceil(tl.min(z, 0)).to(tl.int32))
    if KIND == RESIDUE:
        bent = start - back + 1
    if KIND == BUCKET:
        low = tl.maximum(start - back, 0)
    if KIND == FAR:
        bent, high = start // SIZE * COLUMNS, (end - 1) // SIZE * COLUMNS
    if KIND == FIXED:
        bent, high = which * COLUMNS, keys
    return _pieces(low, flat, bent, high, N)


@triton.jit
def _queries_of(
    start, queries, reach, whole, back,
    M: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """The pieces of the query slots that may see the keys from a slot on."""
    low, flat, bent = start, 0, 0
    high = queries
    if KIND == NEAR:
        high = tl.minimum(high, (start + N - 1 + back) // SIZE * SIZE + SIZE)
        if COLUMNS == SIZE:
            flat, bent = start + N - 1, (start + back) // SIZE * SIZE + SIZE
        if SOFT:
            high, bent = tl.minimum(high, start + N + reach), tl.minimum(bent, start + whole)
    if KIND == RESIDUE:
        flat, bent = start + N - 1 + back, queries
    if KIND == BUCKET:
        high = tl.minimum(high, start + N + back)
    if KIND == FAR:
        low, flat, bent = (start // COLUMNS + 1) * SIZE, tl.cdiv(start + N, COLUMNS) * SIZE, queries
    return _pieces(low, flat, bent, high, M)


@triton.jit
def forward(
    q, k, v, answer, total, z, order, place, alone, blocks, length, heads, turn, turns, rounds, scale, ramp, back, skip,
    KIND: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, SOFT: tl.constexpr, ROUND: tl.constexpr, FIRST: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, UNEVEN: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    block, _number, row, base, which, queries, keys, order, place, alone = _program(
        order, place, alone, blocks, length, heads, turn, turns, rounds, KIND, SIZE, COLUMNS, ROUND, E
    )
    step, e = heads * E, tl.arange(0, E)
    start = (blocks - 1 - block) * M  # the longest first
    if KIND == FIXED:
        which, keys = _behind(start, queries, M, SIZE, COLUMNS)
    x = start + tl.arange(0, M)
    i = _positions(x, queries, order, which, skip, False, KIND, SIZE, COLUMNS)
    real, mine, stat = (x < queries), i[:, None] * step + e[None, :], row * length + i
    q, k, v, answer = q + base, k + base, v + base, answer + base
    q_ME = tl.load(q + mine, mask=real[:, None], other=0.0)
    z_M = tl.zeros([M], tl.float32)
    if SOFT:
        z_M = tl.load(z + stat, mask=real, other=0.0)
    top, sum_, acc = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, E], tl.float32)
    if not FIRST:
        top = tl.load(total + stat, mask=real, other=float("-inf"))
        sum_ = tl.where(top == float("-inf"), 0.0, 1.0)
        acc = tl.load(answer + mine, mask=real[:, None], other=0.0).to(tl.float32)

    bounds = _keys_of(start, queries, keys, which, z_M, ramp, back, M, N, KIND, SIZE, COLUMNS, SOFT)
    for piece in tl.static_range(LAST if KIND == BUCKET else (FLAT if KIND == FIXED else 0), 3):
        for at in range(bounds[piece], bounds[piece + 1], N if piece == FLAT else UNEVEN):
            y, j, theirs, here = _keys_from(
                at, keys, order, which, skip, step, e, piece == FLAT, N, UNEVEN, KIND, SIZE, COLUMNS
            )
            k_NE = tl.load(k + theirs, mask=here, other=0.0)
            score = tl.dot(q_ME, tl.trans(k_NE))
            if piece != FLAT:
                seen, weight, _ = _seen(
                    x[:, None], y[None, :], i[:, None], j[None, :], z_M[:, None], queries, keys, which, place, alone, length,
                    ramp, back, skip, KIND, SIZE, COLUMNS, SOFT, ROUND, M,
                )  # fmt: skip
                score = tl.where(seen, score, float("-inf"))
            new = tl.maximum(top, tl.max(score, 1) * (scale * LOG2E))
            safe = new
            if piece != FLAT:
                safe = tl.where(new == float("-inf"), 0.0, new)
            p = tl.exp2(score * (scale * LOG2E) - safe[:, None])
            if SOFT and piece != FLAT:
                p *= weight
            fade = tl.exp2(top - safe)
            v_NE = tl.load(v + theirs, mask=here, other=0.0)
            acc = acc * fade[:, None] + tl.dot(p.to(v_NE.dtype), v_NE)
            sum_, top = sum_ * fade + tl.sum(p, 1), new
    sum_ = tl.where(sum_ == 0.0, 1.0, sum_)
    tl.store(answer + mine, (acc / sum_[:, None]).to(q_ME.dtype), mask=real[:, None])
    tl.store(total + stat, top + tl.log2(sum_), mask=real)


@triton.jit
def to_queries(
    q, k, v, slope, answer, total, delta, to_q, to_z, z, order, place, alone,
    blocks, length, heads, turn, turns, rounds, scale, ramp, back, skip,
    KIND: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, SOFT: tl.constexpr, ROUND: tl.constexpr, FIRST: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, UNEVEN: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The slopes of queries and spans, and for `to_keys` the product `delta` of each answer and its slope."""
    block, _number, row, base, which, queries, keys, order, place, alone = _program(
        order, place, alone, blocks, length, heads, turn, turns, rounds, KIND, SIZE, COLUMNS, ROUND, E
    )
    step, e = heads * E, tl.arange(0, E)
    start = (blocks - 1 - block) * M
    if KIND == FIXED:
        which, keys = _behind(start, queries, M, SIZE, COLUMNS)
    x = start + tl.arange(0, M)
    i = _positions(x, queries, order, which, skip, False, KIND, SIZE, COLUMNS)
    real, mine, stat = (x < queries), i[:, None] * step + e[None, :], row * length + i
    q, k, v, slope, answer, to_q = q + base, k + base, v + base, slope + base, answer + base, to_q + base
    q_ME = tl.load(q + mine, mask=real[:, None], other=0.0)
    slope_ME = tl.load(slope + mine, mask=real[:, None], other=0.0)
    total_M = tl.load(total + stat, mask=real, other=0.0)
    if FIRST:
        answer_ME = tl.load(answer + mine, mask=real[:, None], other=0.0)
        delta_M = tl.sum(slope_ME.to(tl.float32) * answer_ME.to(tl.float32), 1)
        tl.store(delta + stat, delta_M, mask=real)
    else:
        delta_M = tl.load(delta + stat, mask=real, other=0.0)
    z_M = tl.zeros([M], tl.float32)
    if SOFT:
        z_M = tl.load(z + stat, mask=real, other=0.0)
    acc, acc_z = tl.zeros([M, E], tl.float32), tl.zeros([M], tl.float32)

    bounds = _keys_of(start, queries, keys, which, z_M, ramp, back, M, N, KIND, SIZE, COLUMNS, SOFT)
    for piece in tl.static_range(LAST if KIND == BUCKET else (FLAT if KIND == FIXED else 0), 3):
        for at in range(bounds[piece], bounds[piece + 1], N if piece == FLAT else UNEVEN):
            y, j, theirs, here = _keys_from(
                at, keys, order, which, skip, step, e, piece == FLAT, N, UNEVEN, KIND, SIZE, COLUMNS
            )
            k_NE = tl.load(k + theirs, mask=here, other=0.0)
            v_NE = tl.load(v + theirs, mask=here, other=0.0)
            p = tl.exp2(tl.dot(q_ME, tl.trans(k_NE)) * (scale * LOG2E) - total_M[:, None])
            if piece != FLAT:
                seen, weight, raw = _seen(
                    x[:, None], y[None, :], i[:, None], j[None, :], z_M[:, None], queries, keys, which, place, alone, length,
                    ramp, back, skip, KIND, SIZE, COLUMNS, SOFT, ROUND, M,
                )  # fmt: skip
                p = tl.where(seen, p, 0.0)
            to_score = p * (tl.dot(slope_ME, tl.trans(v_NE)) - delta_M[:, None])
            if SOFT and piece != FLAT:
                acc_z += tl.sum(tl.where(raw <= 1.0, to_score, 0.0), 1)
                to_score *= weight
            acc += tl.dot(to_score.to(k_NE.dtype), k_NE)
    acc *= scale
    if not FIRST:
        acc += tl.load(to_q + mine, mask=real[:, None], other=0.0).to(tl.float32)
    tl.store(to_q + mine, acc.to(q_ME.dtype), mask=real[:, None])
    if SOFT:
        tl.store(to_z + stat, acc_z * (1.0 / ramp), mask=real)


@triton.jit
def to_keys(
    q, k, v, slope, total, delta, to_k, to_v, z, reach, order, place, alone,
    blocks, length, heads, turn, turns, rounds, scale, ramp, back, skip,
    KIND: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, SOFT: tl.constexpr, ROUND: tl.constexpr, FIRST: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, UNEVEN: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The slopes of keys and values. The few far ones are seen by all: several programs share the queries of a block of them,
    and each leaves what it finds in a place of its own, B H of the group, programs, keys, E, for `add_far`."""
    block, number, row, base, which, queries, keys, order, place, alone = _program(
        order, place, alone, blocks, length, heads, turn, turns, rounds, KIND, SIZE, COLUMNS, ROUND, E
    )
    step, e = heads * E, tl.arange(0, E)
    start = block * N
    y = start + tl.arange(0, N)
    j = _positions(y, keys, order, which, skip, True, KIND, SIZE, COLUMNS)
    mine, real = j[:, None] * step + e[None, :], (y < keys)[:, None]
    q, k, v, slope = q + base, k + base, v + base, slope + base
    total, delta = total + row * length, delta + row * length
    k_NE = tl.load(k + mine, mask=real, other=0.0)
    v_NE = tl.load(v + mine, mask=real, other=0.0)
    acc_k, acc_v = tl.zeros([N, E], tl.float32), tl.zeros([N, E], tl.float32)
    far, whole = 0, 0
    if SOFT:
        far, whole = tl.load(reach + row * 2), tl.load(reach + row * 2 + 1)

    bounds = _queries_of(start, queries, far, whole, back, M, N, KIND, SIZE, COLUMNS, SOFT)
    for piece in tl.static_range(LAST if KIND == BUCKET else 0, 3):
        many = M if piece == FLAT else UNEVEN
        for at in range(bounds[piece] + tl.program_id(1) * many, bounds[piece + 1], tl.num_programs(1) * many):
            x = at + tl.arange(0, M if piece == FLAT else UNEVEN)
            i = _positions(x, queries, order, which, skip, False, KIND, SIZE, COLUMNS)
            here, theirs = (x < queries) | (piece == FLAT), i[:, None] * step + e[None, :]
            q_ME = tl.load(q + theirs, mask=here[:, None], other=0.0)
            slope_ME = tl.load(slope + theirs, mask=here[:, None], other=0.0)
            total_M = tl.load(total + i, mask=here, other=0.0)
            delta_M = tl.load(delta + i, mask=here, other=0.0)
            # Keys along the first axis: what is computed then stays where it is for the next product.
            p = tl.exp2(tl.dot(k_NE, tl.trans(q_ME)) * (scale * LOG2E) - total_M[None, :])
            if piece != FLAT:
                z_M = tl.zeros([UNEVEN], tl.float32)
                if SOFT:
                    z_M = tl.load(z + row * length + i, mask=here, other=0.0)
                seen, weight, _ = _seen(
                    x[None, :], y[:, None], i[None, :], j[:, None], z_M[None, :], queries, keys, which, place, alone, length,
                    ramp, back, skip, KIND, SIZE, COLUMNS, SOFT, ROUND, M,
                )  # fmt: skip
                p = tl.where(seen, p, 0.0)
                if SOFT:
                    p *= weight
            acc_v += tl.dot(p.to(slope_ME.dtype), slope_ME)
            if KIND == FAR:  # a sum that begins at -delta: so no register has it besides
                begin = tl.zeros([N, M if piece == FLAT else UNEVEN], tl.float32) - delta_M[None, :]
                to_score = p * tl.dot(v_NE, tl.trans(slope_ME), begin)
            else:
                to_score = p * (tl.dot(v_NE, tl.trans(slope_ME)) - delta_M[None, :])
            acc_k += tl.dot(to_score.to(q_ME.dtype), q_ME)
    acc_k *= scale
    if KIND == FAR:
        base, mine = (number * tl.num_programs(1) + tl.program_id(1)) * keys * E, y[:, None] * E + e[None, :]
    to_k, to_v = to_k + base, to_v + base
    if KIND != FAR and not FIRST:
        acc_k += tl.load(to_k + mine, mask=real, other=0.0).to(tl.float32)
        acc_v += tl.load(to_v + mine, mask=real, other=0.0).to(tl.float32)
    tl.store(to_k + mine, acc_k.to(to_k.dtype.element_ty), mask=real)
    tl.store(to_v + mine, acc_v.to(to_v.dtype.element_ty), mask=real)


@triton.jit
def add_far(
    far_k, far_v, to_k, to_v, blocks, length, heads, turn, turns, skip,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, SHARED: tl.constexpr, N: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Add to the slopes of far keys and values what SHARED programs found."""
    block, row, _, base, _, _, keys, _, _, _ = _program(
        far_k, far_k, far_k, blocks, length, heads, turn, turns, 1, FAR, SIZE, COLUMNS, 0, E
    )
    y, e = block * N + tl.arange(0, N), tl.arange(0, E)
    j, real = _positions(y, keys, far_k, 0, skip, True, FAR, SIZE, COLUMNS), (y < keys)[:, None]
    mine, theirs = base + j[:, None] * heads * E + e[None, :], y[:, None] * E + e[None, :]
    sum_k = tl.load(to_k + mine, mask=real, other=0.0).to(tl.float32)
    sum_v = tl.load(to_v + mine, mask=real, other=0.0).to(tl.float32)
    for number in tl.static_range(SHARED):
        sum_k += tl.load(far_k + (row * SHARED + number) * keys * E + theirs, mask=real, other=0.0)
        sum_v += tl.load(far_v + (row * SHARED + number) * keys * E + theirs, mask=real, other=0.0)
    tl.store(to_k + mine, sum_k.to(to_k.dtype.element_ty), mask=real)
    tl.store(to_v + mine, sum_v.to(to_v.dtype.element_ty), mask=real)


@triton.jit
def buckets(
    k, rotation, found, length, heads, per_sequence, per_head, per_position,
    ROUNDS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """argmax([k R; -k R]) of M keys, in every round; HALF buckets are directions, as many their opposites."""
    row, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * M + tl.arange(0, M)
    b, h, e, n = row // heads, row % heads, tl.arange(0, E), tl.arange(0, N)
    mine = b * per_sequence + h * per_head + i[:, None] * per_position + e[None, :]
    k_ME = tl.load(k + mine, mask=(i < length)[:, None] & (e < WIDTH)[None, :], other=0.0).to(tl.float32)
    for number in tl.static_range(ROUNDS):
        theirs = ((number * heads + h) * WIDTH + e[:, None]) * HALF + n[None, :]
        turn_EN = tl.load(rotation + theirs, mask=(e < WIDTH)[:, None] & (n < HALF)[None, :], other=0.0)
        turned_MN = tl.dot(k_ME, turn_EN, input_precision="tf32x3")
        most, at = tl.max(turned_MN, 1, return_indices=True)
        least, opposite = tl.min(turned_MN, 1, return_indices=True)
        bucket = tl.where(most >= -least, at, opposite + HALF)
        tl.store(found + (row * length + i) * ROUNDS + number, bucket.to(tl.int64), mask=i < length)
