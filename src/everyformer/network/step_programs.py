"""The Triton programs of one decoding step (network/fused_step.py). Each computes rows of one token each.

    few_rows, many_rows   y = act(scale W norm(x) + b) + residual; gated, act(W_1 x + b_1) * (W_3 x + b_3)
    attend_one            norm and rotation of queries and keys, the new key and value in their slot, attention over the slots

`few_rows` holds whole rows of W in registers and multiplies them with one vector after the other; `many_rows` multiplies tiles. The
slots may be split among programs: then each writes its output and the logarithm of its sum, and the map that follows merges them.
Sums are in float32, in an order that the shapes decide. Products are computed in DOT, the precision of the run.
"""

from __future__ import annotations

import triton
import triton.language as tl

LAYER_NORM = tl.constexpr(1)  # NORM; 2 is RMSNorm, 0 none
INTERLEAVED = tl.constexpr(1)  # ROTARY; 2 is halves, 0 none
RELU = tl.constexpr(1)  # ACT, in the order of fused_step.ACTIVATIONS; 0 is none
GELU = tl.constexpr(2)
GELU_TANH = tl.constexpr(3)
GELU_SIGMOID = tl.constexpr(4)
SILU = tl.constexpr(5)
RELU_SQUARED = tl.constexpr(6)
CAP = tl.constexpr(7)


@triton.jit
def _capped(x, cap):
    """cap tanh(x / cap)."""
    return cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0)


@triton.jit
def _activate(x, cap, ACT: tl.constexpr):
    if ACT == RELU:
        x = tl.where(x < 0.0, 0.0, x)
    elif ACT == GELU:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == GELU_TANH:  # (1 + tanh z) / 2 = sigmoid(2 z)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == GELU_SIGMOID:
        x = x * tl.sigmoid(1.702 * x)
    elif ACT == SILU:
        x = x * tl.sigmoid(x)
    elif ACT == RELU_SQUARED:
        x = tl.where(x < 0.0, 0.0, x * x)
    elif ACT == CAP:
        x = _capped(x, cap)
    return x


@triton.jit
def _read(x, total, row, rows, k, ok, K: tl.constexpr, HEAD: tl.constexpr, SPLITS: tl.constexpr):
    """Returns features k of a row in float32. With splits, the mean of their outputs, weighted by their sums of exponentials."""
    if SPLITS == 1:
        value = tl.load(x + row * K + k, mask=ok, other=0.0).to(tl.float32)
    else:
        at = row * (K // HEAD) + k // HEAD
        top = tl.load(total + at, mask=ok, other=0.0)
        for split in tl.static_range(1, SPLITS):
            top = tl.maximum(top, tl.load(total + split * rows * (K // HEAD) + at, mask=ok, other=0.0))
        top = tl.where(top == float("-inf"), 0.0, top)  # no split has a key
        value = tl.zeros_like(top)
        weights = tl.zeros_like(top)
        for split in tl.static_range(SPLITS):
            weight = tl.exp(tl.load(total + split * rows * (K // HEAD) + at, mask=ok, other=0.0) - top)
            value += weight * tl.load(x + (split * rows + row) * K + k, mask=ok, other=0.0)
            weights += weight
        value = value / tl.where(weights == 0.0, 1.0, weights)
    return value


@triton.jit
def _scaled(x, gamma, beta, k, ok, NORM: tl.constexpr, OFFSET: tl.constexpr, BETA: tl.constexpr):
    """Returns a normed x times gamma, plus beta."""
    weight = tl.load(gamma + k, mask=ok, other=0.0).to(tl.float32)
    if OFFSET:
        weight += 1.0
    x = x * weight
    if BETA:
        x += tl.load(beta + k, mask=ok, other=0.0).to(tl.float32)
    return x


@triton.jit
def few_rows(
    x, total, weight, bias, gamma, beta, residual, normed, y, rows, outputs, eps, scale, cap,
    ROWS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, N: tl.constexpr, HEAD: tl.constexpr, SPLITS: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr, BETA: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    RESIDUAL: tl.constexpr, KEEP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """N outputs of all rows. With KEEP the first program also writes the normed rows."""
    n = tl.program_id(0) * N + tl.arange(0, N)
    k = tl.arange(0, KP)
    is_output, is_input = n < outputs, k < K
    at = n[:, None] * K + k[None, :]
    inside = is_output[:, None] & is_input[None, :]
    w_NK = tl.load(weight + at, mask=inside, other=0.0).to(DOT)
    if GATED:
        v_NK = tl.load(weight + outputs * K + at, mask=inside, other=0.0).to(DOT)
    for row in tl.static_range(ROWS):
        x_K = _read(x, total, row, rows, k, is_input, K, HEAD, SPLITS)
        if NORM > 0:
            if NORM == LAYER_NORM:
                x_K = tl.where(is_input, x_K - tl.sum(x_K, 0) / K, 0.0)
            x_K = x_K / tl.sqrt(tl.sum(x_K * x_K, 0) / K + eps)
            x_K = _scaled(x_K, gamma, beta, k, is_input, NORM, OFFSET, BETA)
            if KEEP:
                tl.store(normed + row * K + k, x_K, mask=is_input & (tl.program_id(0) == 0))
        x_1K = x_K.to(DOT).to(tl.float32)[None, :]
        y_N = tl.sum(w_NK.to(tl.float32) * x_1K, 1) * scale
        if BIAS:
            y_N += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)
        y_N = _activate(y_N, cap, ACT)
        if GATED:
            gate_N = tl.sum(v_NK.to(tl.float32) * x_1K, 1)
            if BIAS:
                gate_N += tl.load(bias + outputs + n, mask=is_output, other=0.0).to(tl.float32)
            y_N = y_N * gate_N
        if RESIDUAL:
            y_N += tl.load(residual + row * outputs + n, mask=is_output, other=0.0).to(tl.float32)
        tl.store(y + row * outputs + n, y_N, mask=is_output)


@triton.jit
def many_rows(
    x, total, weight, bias, gamma, beta, residual, normed, y, rows, outputs, eps, scale, cap,
    M: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr, N: tl.constexpr, HEAD: tl.constexpr,
    SPLITS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, BETA: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, KEEP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """N outputs of M rows, STEP features at a time; the statistics of a norm are taken over CHUNK features at a time."""
    row = (tl.program_id(1) * M + tl.arange(0, M))[:, None]
    n = (tl.program_id(0) * N + tl.arange(0, N))[None, :]
    is_row, is_output = row < rows, n < outputs
    mean = tl.zeros([M, 1], tl.float32)
    factor = tl.zeros([M, 1], tl.float32)
    if NORM > 0:
        if NORM == LAYER_NORM:
            for start in range(0, K, CHUNK):
                k = (start + tl.arange(0, CHUNK))[None, :]
                mean += tl.sum(_read(x, total, row, rows, k, is_row & (k < K), K, HEAD, SPLITS), 1)[:, None]
            mean = mean / K
        for start in range(0, K, CHUNK):
            k = (start + tl.arange(0, CHUNK))[None, :]
            x_MK = tl.where(k < K, _read(x, total, row, rows, k, is_row & (k < K), K, HEAD, SPLITS) - mean, 0.0)
            factor += tl.sum(x_MK * x_MK, 1)[:, None]
        factor = 1.0 / tl.sqrt(factor / K + eps)
    y_MN = tl.zeros([M, N], tl.float32)
    gate_MN = tl.zeros([M, N], tl.float32)
    at = weight + n * K
    for start in range(0, K, STEP):
        feature = start + tl.arange(0, STEP)
        k, inside = feature[None, :], is_row & (feature[None, :] < K)
        x_MK = _read(x, total, row, rows, k, inside, K, HEAD, SPLITS)
        if NORM > 0:
            x_MK = _scaled((x_MK - mean) * factor, gamma, beta, k, k < K, NORM, OFFSET, BETA)
            if KEEP:
                tl.store(normed + row * K + k, x_MK, mask=inside & (tl.program_id(0) == 0))
        of_weight = is_output & (feature[:, None] < K)
        w_KN = tl.load(at + feature[:, None], mask=of_weight, other=0.0).to(DOT)
        y_MN = tl.dot(x_MK.to(DOT), w_KN, y_MN, input_precision="ieee")
        if GATED:
            v_KN = tl.load(at + outputs * K + feature[:, None], mask=of_weight, other=0.0).to(DOT)
            gate_MN = tl.dot(x_MK.to(DOT), v_KN, gate_MN, input_precision="ieee")
    y_MN = y_MN * scale
    if BIAS:
        y_MN += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)
    y_MN = _activate(y_MN, cap, ACT)
    if GATED:
        if BIAS:
            gate_MN += tl.load(bias + outputs + n, mask=is_output, other=0.0).to(tl.float32)
        y_MN = y_MN * gate_MN
    of_output = is_row & is_output
    if RESIDUAL:
        y_MN += tl.load(residual + row * outputs + n, mask=of_output, other=0.0).to(tl.float32)
    tl.store(y + row * outputs + n, y_MN, mask=of_output)


@triton.jit
def _head(
    of_head, gamma, beta, sin, cos, e, eps,
    E: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, BETA: tl.constexpr, ROTARY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Returns the features e of a query or key, normed and rotated."""
    ok = e < E
    x_E = tl.load(of_head + e, mask=ok, other=0.0).to(tl.float32)
    if NORM > 0:
        mean = tl.sum(x_E, 0) / E if NORM == LAYER_NORM else 0.0
        centred_E = tl.where(ok, x_E - mean, 0.0)
        factor = 1.0 / tl.sqrt(tl.sum(centred_E * centred_E, 0) / E + eps)
        x_E = _scaled(centred_E * factor, gamma, beta, e, ok, NORM, OFFSET, BETA)
    if ROTARY > 0:
        turned = e < WIDTH
        if ROTARY == INTERLEAVED:
            pair, is_first, other = e // 2, e % 2 == 0, e + 1 - 2 * (e % 2)
        else:
            pair, is_first = e % (WIDTH // 2), e < WIDTH // 2
            other = tl.where(is_first, e + WIDTH // 2, e - WIDTH // 2)
        other_E = tl.load(of_head + other, mask=turned, other=0.0).to(tl.float32)
        if NORM > 0:
            other_E = _scaled((other_E - mean) * factor, gamma, beta, other, turned, NORM, OFFSET, BETA)
        sin_E, cos_E = tl.load(sin + pair, mask=turned, other=0.0), tl.load(cos + pair, mask=turned, other=1.0)
        x_E = x_E * cos_E + tl.where(is_first, -other_E, other_E) * sin_E
    return x_E


@triton.jit
def attend_one(
    qkv, q_gamma, q_beta, k_gamma, k_beta, sin, cos, keys, values, mask, slot, y, total,
    k_row, k_head, k_slot, v_row, v_head, v_slot, m_row, m_head, rows, slots, q_eps, k_eps, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr,
    PART: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, BETA: tl.constexpr,
    ROTARY: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """One query head of one row over PART slots. GROUP query heads share a key head; the first of them writes the new key and value."""
    row, head, split = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS, tl.program_id(1)
    key_head = head // GROUP
    e, f = tl.arange(0, EP), tl.arange(0, FP)
    KEYS: tl.constexpr = HEADS // GROUP
    of_row = qkv + row * (HEADS * E + KEYS * (E + F))
    of_sin, of_cos = sin, cos
    if ROTARY > 0:
        of_sin, of_cos = sin + row * (WIDTH // 2), cos + row * (WIDTH // 2)
    kept = keys.dtype.element_ty  # the slots hold numbers of this precision, and so does the query
    q_E = _head(of_row + head * E, q_gamma, q_beta, of_sin, of_cos, e, q_eps, E, NORM, OFFSET, BETA, ROTARY, WIDTH)
    k_E = _head(
        of_row + (HEADS + key_head) * E, k_gamma, k_beta, of_sin, of_cos, e, k_eps, E, NORM, OFFSET, BETA, ROTARY, WIDTH
    )
    v_F = tl.load(of_row + (HEADS + KEYS) * E + key_head * F + f, mask=f < F, other=0.0).to(kept)
    q_E, k_E = q_E.to(kept).to(tl.float32), k_E.to(kept)
    keys += row.to(tl.int64) * k_row + key_head.to(tl.int64) * k_head
    values += row.to(tl.int64) * v_row + key_head.to(tl.int64) * v_head
    mask += row.to(tl.int64) * m_row + head * m_head
    new = tl.load(slot + row)
    writes = (split == 0) & (head % GROUP == 0)
    tl.store(keys + new * k_slot + e, k_E, mask=(e < E) & writes)
    tl.store(values + new * v_slot + f, v_F, mask=(f < F) & writes)
    score = tl.sum(q_E * k_E.to(tl.float32), 0) * scale
    if CAPPED:
        score = _capped(score, cap)
    top = tl.where((split == 0) & (tl.load(mask + new) != 0), score, float("-inf"))
    weights = tl.where(top > float("-inf"), 1.0, 0.0)
    y_F = v_F.to(tl.float32) * weights
    for start in range(split * PART, tl.minimum(split * PART + PART, slots), BLOCK):
        s = start + tl.arange(0, BLOCK)
        ok = (s < slots) & (s != new)
        ok = ok & (tl.load(mask + s, mask=ok, other=0) != 0)
        k_SE = tl.load(keys + s[:, None] * k_slot + e[None, :], mask=ok[:, None] & (e < E)[None, :], other=0.0)
        v_SF = tl.load(values + s[:, None] * v_slot + f[None, :], mask=ok[:, None] & (f < F)[None, :], other=0.0)
        score_S = tl.sum(k_SE.to(tl.float32) * q_E[None, :], 1) * scale
        if CAPPED:
            score_S = _capped(score_S, cap)
        score_S = tl.where(ok, score_S, float("-inf"))
        new_top = tl.maximum(top, tl.max(score_S, 0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight_S, decay = tl.exp(score_S - safe), tl.exp(top - safe)
        weights = weights * decay + tl.sum(weight_S, 0)
        y_F = y_F * decay + tl.sum(weight_S[:, None] * v_SF.to(tl.float32), 0)
        top = new_top
    weights = tl.where(weights == 0.0, 1.0, weights)  # without keys the output is 0
    at = (split * rows + row) * HEADS + head
    tl.store(y + at * F + f, y_F / weights, mask=f < F)
    if SPLITS > 1:
        tl.store(total + at, top + tl.log(weights))
