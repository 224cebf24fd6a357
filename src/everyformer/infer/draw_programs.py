"""The Triton programs of drawing tokens (infer/draw.py): `choose` without filters, in two programs instead of some twenty.

    scan_blocks   of every block of N logits: the largest one, its token, and the sum of exp((l - largest) / T)
    draw_token    of every row: the block in which the cumulative sum exceeds u times the whole, then the token in that block

Sums are in float64, as in `choose`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scan_blocks(logits, temperature, tops, tokens, sums, vocabulary, blocks, N: tl.constexpr):
    """Writes the largest logit of a block, inf if one is NaN, its token and the sum of exponentials."""
    row, block = tl.program_id(0), tl.program_id(1)
    n = block * N + tl.arange(0, N)
    ok = n < vocabulary
    l_N = tl.load(logits + row * vocabulary + n, mask=ok, other=float("-inf")).to(tl.float64)
    broken = tl.max((l_N != l_N).to(tl.int32), 0) != 0
    l_N = tl.where(l_N == l_N, l_N, float("-inf"))
    top = tl.max(l_N, 0)
    t = tl.load(temperature + row)
    t = tl.where(t == 0.0, 1.0, t)
    safe = tl.where((top > float("-inf")) & (top < float("inf")), top, 0.0)
    share_N = tl.where(l_N > float("-inf"), tl.exp((l_N - safe) / t), 0.0)
    at = row * blocks + block
    tl.store(tops + at, tl.where(broken, float("inf"), top))
    tl.store(tokens + at, tl.min(tl.where(l_N == top, n, vocabulary), 0))
    tl.store(sums + at, tl.sum(share_N, 0))


@triton.jit
def draw_token(
    logits, temperature, tops, tokens, sums, uniform, step, drawn, finite, rows, vocabulary, blocks,
    N: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Writes the token of a row, and 0 into `finite` if its logits are NaN or infinite."""
    row = tl.program_id(0)
    i = tl.arange(0, BLOCKS)
    ok = i < blocks
    top_M = tl.load(tops + row * blocks + i, mask=ok, other=float("-inf"))
    top = tl.max(top_M, 0)
    broken = (top == float("inf")) | (top == float("-inf"))
    best = tl.min(tl.where(top_M == top, tl.load(tokens + row * blocks + i, mask=ok, other=vocabulary), vocabulary), 0)
    temperature_ = tl.load(temperature + row)
    t = tl.where(temperature_ == 0.0, 1.0, temperature_)
    safe = tl.where(broken, 0.0, top)
    share_M = tl.load(sums + row * blocks + i, mask=ok, other=0.0)
    share_M = tl.where(top_M > float("-inf"), share_M * tl.exp(tl.where(broken, 0.0, (top_M - safe) / t)), 0.0)
    sum_M = tl.cumsum(share_M, 0)
    threshold = tl.load(uniform + tl.load(step) * rows + row) * tl.max(sum_M, 0)
    last = tl.max(tl.where(share_M > 0.0, i, 0), 0)
    block = tl.min(tl.where((sum_M > threshold) & (share_M > 0.0), i, last), 0)
    before = tl.max(tl.where(i < block, sum_M, 0.0), 0)
    n = block * N + tl.arange(0, N)
    l_N = tl.load(logits + row * vocabulary + n, mask=n < vocabulary, other=float("-inf")).to(tl.float64)
    l_N = tl.where(l_N == l_N, l_N, float("-inf"))
    share_N = tl.where(l_N > float("-inf"), tl.exp((l_N - safe) / t), 0.0)
    sum_N = before + tl.cumsum(share_N, 0)
    last_token = tl.max(tl.where(share_N > 0.0, n, 0), 0)  # rounding may leave the sum of the block at the threshold
    token = tl.min(tl.where((sum_N > threshold) & (share_N > 0.0), n, last_token), 0)
    token = tl.where(temperature_ == 0.0, best, token)
    token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)  # of broken logits too
    tl.store(drawn + row, token)
    tl.store(finite + row, 0, mask=broken)
