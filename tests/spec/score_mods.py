"""The equations of relative positions and adaptive spans, one query-key pair at a time.

Each function computes one head: i is a query, j is a key. `first` is the position of the first query.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.spec.attention import softmax


def shaw(
    q_TE: Tensor, k_TE: Tensor, v_TE: Tensor, a_k_RE: Tensor, a_v_RE: Tensor | None, max_distance: int, first: int = 0
) -> Tensor:
    """Shaw et al. 2018, eq. 3 and 4: e_ij = q_i (k_j + a^K_ij) / sqrt(d), z_i = sum_j alpha_ij (v_j + a^V_ij).

    a_ij = w_clip(j - i, max_distance), the paper's k; row 0 of a table is w_{-k}.
    """
    rows = []
    for i, q in enumerate(q_TE, first):
        row = [max(-max_distance, min(max_distance, j - i)) + max_distance for j in range(len(k_TE))]
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
    )  # the clamp replaces log 0, which is_small excludes below
    val_if_large = val_if_large.clamp(max=num_buckets - 1)
    return ret + torch.where(is_small, n, val_if_large)


def rotate(x_E: Tensor, position: int, base: float) -> Tensor:
    """Su et al. 2021, section 3.2: the pair (x_2m, x_2m+1), as a complex number, times e^{i position theta_m}."""
    rotated = []
    for m in range(0, len(x_E), 2):
        theta = base ** (-m / len(x_E))
        number = complex(float(x_E[m]), float(x_E[m + 1])) * complex(
            math.cos(position * theta), math.sin(position * theta)
        )
        rotated += [number.real, number.imag]
    return torch.tensor(rotated, dtype=x_E.dtype)


def rotate_halves(x_E: Tensor, position: int, frequencies: list[float], factor: float = 1.0) -> Tensor:
    """The published code of GPT-NeoX and Llama: x cos + (-x2, x1) sin over the first features, of which each half has one frequency
    per feature; the features after them stay. YaRN (Peng et al. 2023) multiplies what is rotated by a factor."""
    half, y_E = len(frequencies), x_E.clone()
    for m, frequency in enumerate(frequencies):
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        y_E[m] = factor * (x_E[m] * cos - x_E[half + m] * sin)
        y_E[half + m] = factor * (x_E[half + m] * cos + x_E[m] * sin)
    return y_E


def ntk_frequencies(width: int, base: float, factor: float) -> list[float]:
    """bloc97 2023: base' = base factor^(d / (d - 2))."""
    return [(base * factor ** (width / (width - 2))) ** (-2 * m / width) for m in range(width // 2)]


def llama3_frequencies(width: int, base: float, factor: float, low: float, high: float, context: int) -> list[float]:
    """Llama Team 2024, `apply_scaling` of the published code, by wavelengths."""
    frequencies = []
    for m in range(width // 2):
        frequency = base ** (-2 * m / width)
        wavelength = 2 * math.pi / frequency
        if wavelength < context / high:
            frequencies.append(frequency)
        elif wavelength > context / low:
            frequencies.append(frequency / factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            frequencies.append((1 - smooth) * frequency / factor + smooth * frequency)
    return frequencies


def yarn_frequencies(width: int, base: float, factor: float, context: int, fast: float, slow: float) -> list[float]:
    """Peng et al. 2023, eq. 17-20: h(theta) = (1 - gamma) theta / s + gamma theta, gamma a ramp of the pair as in the published code,
    which puts its ends at the pairs that turn `fast` and `slow` times in the context, rounded outwards."""
    ends = [width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow)]
    first, last = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), width - 1)
    frequencies = []
    for m in range(width // 2):
        theta = base ** (-2 * m / width)
        gamma = 1 - min(max((m - first) / (last - first), 0), 1)
        frequencies.append((1 - gamma) * theta / factor + gamma * theta)
    return frequencies


def soft_cap_and_sink(
    q_TE: Tensor, k_TE: Tensor, v_TE: Tensor, cap: float | None, sink: float | None, bias_TT: Tensor, allowed_TT: Tensor
) -> Tensor:
    """Gemma Team 2024: the score is cap tanh(score / cap). OpenAI 2025: the softmax has one more logit, whose weight is dropped."""
    rows = []
    for i, q in enumerate(q_TE):
        score, total, output = {}, torch.zeros(()), torch.zeros(v_TE.shape[1])
        for j in range(len(k_TE)):
            product = q @ k_TE[j] / math.sqrt(len(q))
            score[j] = (product if cap is None else cap * torch.tanh(product / cap)) + bias_TT[i, j]
        keys = [j for j in score if allowed_TT[i, j]]
        for j in keys:
            total = total + torch.exp(score[j])
        if sink is not None:
            total = total + math.exp(sink)
        for j in keys:
            output = output + torch.exp(score[j]) / total * v_TE[j]
        rows.append(output)
    return torch.stack(rows)


def sinusoid(position: int, width: int, dtype: torch.dtype) -> Tensor:
    """Dai et al. 2019, published code: the sines of all frequencies, then the cosines."""
    frequency = 10000 ** (-torch.arange(0, width, 2, dtype=dtype) / width)
    return torch.cat((torch.sin(position * frequency), torch.cos(position * frequency)))


def transformer_xl_scores(  # eq. W13
    q_QE: Tensor,
    k_KE: Tensor,
    w_r_ED: Tensor,
    u_E: Tensor,
    v_E: Tensor,
    first: int = 0,
    max_distance: int | None = None,
) -> Tensor:
    """Dai et al. 2019, section 3.3: the four terms, with the 1 / sqrt(d) and the per-head u, v that Weng 2020 (source W) omits.

    A_ij = q_i . k_j + q_i . W_R r_{i-j} + u . k_j + v . W_R r_{i-j}.
    `max_distance` is the published code's clamp_len: a larger distance counts as this one.
    """
    rows = []
    for i, q in enumerate(q_QE, first):
        row = []
        for j, k in enumerate(k_KE):
            distance = i - j if max_distance is None else max(-max_distance, min(max_distance, i - j))
            r_E = w_r_ED @ sinusoid(distance, w_r_ED.shape[1], q.dtype)
            row.append((q @ k + q @ r_E + u_E @ k + v_E @ r_E) / math.sqrt(len(q)))
        rows.append(torch.stack(row))
    return torch.stack(rows)


def distances(keys: int, width: int, max_distance: int | None) -> Tensor:
    """pos_emb of the published code: the sinusoids of the distances keys - 1, .., 1, 0."""
    clamped = [n if max_distance is None else min(n, max_distance) for n in reversed(range(keys))]
    return torch.stack([sinusoid(distance, width, torch.get_default_dtype()) for distance in clamped])


def relative_shift(x_BHQK: Tensor) -> Tensor:
    """_rel_shift of the published code: prepends a column of zeros and reshapes. Entries above the diagonal are meaningless."""
    zero_BHQ1 = x_BHQK.new_zeros(*x_BHQK.shape[:3], 1)
    padded = torch.cat((zero_BHQ1, x_BHQK), dim=3)
    padded = padded.view(*x_BHQK.shape[:2], x_BHQK.shape[3] + 1, x_BHQK.shape[2])
    return padded[:, :, 1:].reshape(x_BHQK.shape)


def soft_mask(z: Tensor, ramp: int, distance: int) -> Tensor:  # eq. W15
    """Sukhbaatar et al. 2019, eq. 4: m_z(x) = min(max((R + z - x) / R, 0), 1)."""
    return ((ramp + z - distance) / ramp).clamp(0, 1)


def adaptive_span(  # eq. W14, W16
    q_QE: Tensor,
    k_KE: Tensor,
    v_KE: Tensor,
    z: Tensor,
    ramp: int,
    max_span: int,
    first: int = 0,
    nearest: int = 0,
    p_RE: Tensor | None = None,
) -> Tensor:
    """Sukhbaatar et al. 2019, eq. 1 and 5, over the keys `nearest` to `max_span` positions back (1 to S in the paper).

    s_ij = q_i . (k_j + p_{i-j}) / sqrt(d), a_ij = m_z(i-j) exp(s_ij) / sum_r m_z(i-r) exp(s_ir); z is one number, or one per
    query. The output of a query without visible keys is 0.
    """
    rows = []
    for i, q, z_i in zip(range(first, first + len(q_QE)), q_QE, z.expand(len(q_QE)), strict=True):
        total, output = torch.zeros(()), torch.zeros(v_KE.shape[1])
        for distance in range(nearest, min(max_span, i) + 1):
            k = k_KE[i - distance] if p_RE is None else k_KE[i - distance] + p_RE[distance]
            weight = soft_mask(z_i, ramp, distance) * torch.exp(q @ k / math.sqrt(len(q)))
            total, output = total + weight, output + weight * v_KE[i - distance]
        rows.append(output / total if total > 0 else output)
    return torch.stack(rows)


def dynamic_span(x_D: Tensor, v_D: Tensor, b: Tensor, max_span: int) -> Tensor:  # eq. W18
    """Sukhbaatar et al. 2019, eq. 7: z_t = S sigma(v . x_t + b)."""
    return max_span / (1 + torch.exp(-(v_D @ x_D + b)))
