"""Rules of relative position as their papers write them, pair by pair.

Every function gives the scores or weights of one head: i runs over the queries, j over the keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.spec.attention import softmax


def shaw(
    q_TE: Tensor, k_TE: Tensor, v_TE: Tensor, a_k_RE: Tensor, a_v_RE: Tensor | None, reach: int, first: int = 0
) -> Tensor:
    """Shaw et al. 2018, eq. 3 and 4: e_ij = q_i (k_j + a^K_ij) / sqrt(d), z_i = sum_j alpha_ij (v_j + a^V_ij).

    a_ij = w_clip(j - i, reach); row 0 of a table is w_{-reach}. Query number 0 stands at position `first`.
    """
    rows = []
    for i, q in enumerate(q_TE, first):
        row = [max(-reach, min(reach, j - i)) + reach for j in range(len(k_TE))]
        score = torch.stack([q @ (k_TE[j] + a_k_RE[r]) / math.sqrt(len(q)) for j, r in enumerate(row)])
        values = [v_TE[j] if a_v_RE is None else v_TE[j] + a_v_RE[r] for j, r in enumerate(row)]
        rows.append(sum(w * v for w, v in zip(softmax(score), values, strict=True)))
    return torch.stack(rows)


def alibi(q_TE: Tensor, k_TE: Tensor, v_TE: Tensor, slope: float) -> Tensor:
    """Press et al. 2021: softmax(q_i K^T / sqrt(d) + m [-(i-1), .., -1, 0]) over the keys up to i."""
    rows = []
    for i, q in enumerate(q_TE):
        score = torch.stack([q @ k_TE[j] / math.sqrt(len(q)) - slope * (i - j) for j in range(i + 1)])
        rows.append(softmax(score) @ v_TE[: i + 1])
    return torch.stack(rows)


def t5_bucket(relative_position: Tensor, bidirectional: bool, num_buckets: int, max_distance: int) -> Tensor:
    """Raffel et al. 2019, `_relative_position_bucket` of the published code; relative_position = key - query."""
    ret = torch.zeros_like(relative_position)
    n = -relative_position
    if bidirectional:
        num_buckets //= 2
        ret += (n < 0).long() * num_buckets
        n = n.abs()
    else:
        n = n.clamp(min=0)
    max_exact = num_buckets // 2
    is_small = n < max_exact
    val_if_large = (
        max_exact
        + (torch.log(n.float() / max_exact) / math.log(max_distance / max_exact) * (num_buckets - max_exact))
        .clamp(min=0)
        .long()
    )  # log 0, which is_small leaves out below, has no whole number
    val_if_large = val_if_large.clamp(max=num_buckets - 1)
    return ret + torch.where(is_small, n, val_if_large)


def rotate(x_E: Tensor, position: int, base: float) -> Tensor:
    """Su et al. 2021: the pair (x_2m, x_2m+1), as a complex number, times e^{i position theta_m}."""
    turned = []
    for m in range(0, len(x_E), 2):
        theta = base ** (-m / len(x_E))
        number = complex(float(x_E[m]), float(x_E[m + 1])) * complex(
            math.cos(position * theta), math.sin(position * theta)
        )
        turned += [number.real, number.imag]
    return torch.tensor(turned, dtype=x_E.dtype)


def sinusoid(position: int, width: int, dtype: torch.dtype) -> Tensor:
    """Dai et al. 2019, code: the sines of all frequencies, then the cosines."""
    frequency = 10000 ** (-torch.arange(0, width, 2, dtype=dtype) / width)
    return torch.cat((torch.sin(position * frequency), torch.cos(position * frequency)))


def transformer_xl_scores(
    q_QE: Tensor, k_KE: Tensor, w_r_ED: Tensor, u_E: Tensor, v_E: Tensor, first: int = 0, reach: int | None = None
) -> Tensor:
    """Dai et al. 2019, the four terms of one head, with the 1 / sqrt(d) and the head's own u, v that W leaves out.

    A_ij = q_i . k_j + q_i . W_R r_{i-j} + u . k_j + v . W_R r_{i-j}. Query number 0 stands at position `first`.
    `reach` is the code's clamp_len: a longer distance counts as that one.
    """
    rows = []
    for i, q in enumerate(q_QE, first):
        row = []
        for j, k in enumerate(k_KE):
            distance = i - j if reach is None else max(-reach, min(reach, i - j))
            r_E = w_r_ED @ sinusoid(distance, w_r_ED.shape[1], q.dtype)
            row.append((q @ k + q @ r_E + u_E @ k + v_E @ r_E) / math.sqrt(len(q)))
        rows.append(torch.stack(row))
    return torch.stack(rows)


def distances(keys: int, width: int, reach: int | None) -> Tensor:
    """The code's pos_emb: the sinusoids of keys - 1, .., 1, 0, the farthest first."""
    far = [distance if reach is None else min(distance, reach) for distance in reversed(range(keys))]
    return torch.stack([sinusoid(distance, width, torch.get_default_dtype()) for distance in far])


def relative_shift(x_BHQK: Tensor) -> Tensor:
    """The code's _rel_shift: a column of zeros before, read in rows one shorter. What is above the diagonal is junk."""
    zero_BHQ1 = x_BHQK.new_zeros(*x_BHQK.shape[:3], 1)
    padded = torch.cat((zero_BHQ1, x_BHQK), dim=3)
    padded = padded.view(*x_BHQK.shape[:2], x_BHQK.shape[3] + 1, x_BHQK.shape[2])
    return padded[:, :, 1:].reshape(x_BHQK.shape)


def soft_mask(z: Tensor, ramp: int, distance: int) -> Tensor:
    """Sukhbaatar et al. 2019, eq. 4: m_z(x) = min(max((R + z - x) / R, 0), 1)."""
    return ((ramp + z - distance) / ramp).clamp(0, 1)


def adaptive_span(
    q_QE: Tensor,
    k_KE: Tensor,
    v_KE: Tensor,
    z: Tensor,
    ramp: int,
    longest: int,
    first: int = 0,
    nearest: int = 0,
    p_RE: Tensor | None = None,
) -> Tensor:
    """Sukhbaatar et al. 2019, eq. 1 and 5, the keys `nearest` to `longest` positions back (the paper: 1 to S).

    s_ij = q_i . (k_j + p_{i-j}) / sqrt(d), a_ij = m_z(i-j) exp(s_ij) / sum_r m_z(i-r) exp(s_ir); z is one number, or one for
    each query. Query number 0 stands at position `first`; one that sees nothing answers zero.
    """
    rows = []
    for i, q, z_i in zip(range(first, first + len(q_QE)), q_QE, z.expand(len(q_QE)), strict=True):
        total, answer = torch.zeros(()), torch.zeros(v_KE.shape[1])
        for distance in range(nearest, min(longest, i) + 1):
            k = k_KE[i - distance] if p_RE is None else k_KE[i - distance] + p_RE[distance]
            share = soft_mask(z_i, ramp, distance) * torch.exp(q @ k / math.sqrt(len(q)))
            total, answer = total + share, answer + share * v_KE[i - distance]
        rows.append(answer / total if total > 0 else answer)
    return torch.stack(rows)


def dynamic_span(x_D: Tensor, v_D: Tensor, b: Tensor, longest: int) -> Tensor:
    """Sukhbaatar et al. 2019, eq. 7: z_t = S sigma(v . x_t + b)."""
    return longest / (1 + torch.exp(-(v_D @ x_D + b)))
