"""The equations of attention, one token at a time.

The sources are listed in everyformer/sources.py. Rows are tokens, except in the functions that follow Katsaros (source K), whose X
is D x N with tokens as columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


def softmax(score_K: Tensor) -> Tensor:  # eq. B3, B6
    """exp(s_j) / sum_r exp(s_r); the largest score is subtracted first, which cancels."""
    exp_K = torch.exp(score_K - score_K.max())
    return exp_K / exp_K.sum()


def parameter_free(x_TD: Tensor) -> Tensor:  # eq. B1, B2, B3
    """Bloem 2019 (source B): w'_ij = x_i . x_j, w = row softmax of w', y_i = sum_j w_ij x_j, without a scale."""
    rows = []
    for x_i in x_TD:
        w_T = softmax(torch.stack([x_i @ x_j for x_j in x_TD]))
        rows.append(sum(w * x_j for w, x_j in zip(w_T, x_TD, strict=True)))
    return torch.stack(rows)


def parameter_free_columns(x_DN: Tensor) -> Tensor:  # eq. K1, K2, K2a
    """Katsaros (source K): y_n = sum_n' x_n' A_{n',n}, where the columns of A sum to 1; Y = X A."""
    size = x_DN.shape[1]
    a_NN = x_DN.new_zeros(size, size)
    for n in range(size):
        total = sum(torch.exp(x_DN[:, m] @ x_DN[:, n]) for m in range(size))
        for other in range(size):
            a_NN[other, n] = torch.exp(x_DN[:, other] @ x_DN[:, n]) / total
    return x_DN @ a_NN


def weights(q_QE: Tensor, k_KE: Tensor, scale: float) -> Tensor:  # eq. T2, M3, B5, B6, B8, W2
    """alpha_ij = softmax_j(scale <q_i, k_j>). The softmax is over the p keys; Thickstun (source T) writes 'd-dimensional'."""
    return torch.stack([softmax(torch.stack([scale * (q @ k) for k in k_KE])) for q in q_QE])


def weights_scaled_outside(q_QE: Tensor, k_KE: Tensor) -> Tensor:
    """The second form of Weng 2020 (source W), which is wrong: exp(q . k) / (sqrt(d_k) sum_r exp(q . k_r))."""
    rows = []
    for q in q_QE:
        exp_K = torch.stack([torch.exp(q @ k) for k in k_KE])
        rows.append(exp_K / (math.sqrt(q_QE.shape[1]) * exp_K.sum()))
    return torch.stack(rows)


def scaled_dot_product(q_QE: Tensor, k_KE: Tensor, v_KE: Tensor) -> Tensor:  # eq. M4, M5, B7, W1
    """Vaswani et al. 2017, eq. 1: softmax(Q K^T / sqrt(d_k)) V."""
    rows = []
    for w_K in weights(q_QE, k_KE, 1 / math.sqrt(q_QE.shape[1])):
        rows.append(sum(w * v for w, v in zip(w_K, v_KE, strict=True)))
    return torch.stack(rows)


def scale_split(q_QE: Tensor, k_KE: Tensor, v_KE: Tensor) -> Tensor:
    """The code of Bloem 2019 (source B): q and k are each divided by k^(1/4) before their product."""
    root = q_QE.shape[1] ** (1 / 4)
    return torch.stack([w_K @ v_KE for w_K in weights(q_QE / root, k_KE / root, 1.0)])


def over_sets(q_QE: Tensor, k_KE: Tensor, v_KE: Tensor, sets: Sequence[Iterable[int]]) -> Tensor:  # eq. W2, W20
    """Weng 2020 (source W): a(x_i, S_i), attention of query i to the keys in S_i only; 0 for an empty S_i."""
    rows = []
    for q, members in zip(q_QE, sets, strict=True):
        keys = sorted(members)
        rows.append(scaled_dot_product(q[None], k_KE[keys], v_KE[keys])[0] if keys else v_KE.new_zeros(v_KE.shape[1]))
    return torch.stack(rows)


def symmetric(x_TD: Tensor, u_RD: Tensor) -> Tensor:  # eq. K2b, K2c
    """Katsaros (source K): A ~ exp(x_n^T U^T U x_n' / sqrt(K)), K the projected width (the slide prints sqrt(D)); values are x."""
    metric_DD = u_RD.T @ u_RD
    rows = []
    for x_i in x_TD:
        w_T = softmax(torch.stack([x_j @ metric_DD @ x_i / math.sqrt(u_RD.shape[0]) for x_j in x_TD]))
        rows.append(w_T @ x_TD)
    return torch.stack(rows)


def asymmetric(x_TD: Tensor, u_q_RD: Tensor, u_k_RD: Tensor) -> Tensor:  # eq. K3
    """Katsaros (source K), eq. 3: A ~ exp(x_n^T U_k^T U_q x_n' / sqrt(K)); the source absorbs sqrt(K) into U. Values are x."""
    rows = []
    for x_i in x_TD:
        w_T = softmax(torch.stack([x_j @ u_k_RD.T @ u_q_RD @ x_i / math.sqrt(u_q_RD.shape[0]) for x_j in x_TD]))
        rows.append(w_T @ x_TD)
    return torch.stack(rows)


# eq. T1, M2a, M6, B4
def head_outputs(x_TD: Tensor, source_SD: Tensor, w_q_HDE: Tensor, w_k_HDE: Tensor, w_v_HDE: Tensor) -> list[Tensor]:
    """Thickstun (source T), eq. 1 and 2 and the sum over j, for each head: Q = W_q^T x. Keys and values come from `source_SD`."""
    outputs = []
    for w_q, w_k, w_v in zip(w_q_HDE, w_k_HDE, w_v_HDE, strict=True):
        q_TE = torch.stack([w_q.T @ x for x in x_TD])
        k_SE = torch.stack([w_k.T @ x for x in source_SD])
        v_SE = torch.stack([w_v.T @ x for x in source_SD])
        outputs.append(scaled_dot_product(q_TE, k_SE, v_SE))
    return outputs


def grouped_heads(
    x_TD: Tensor,
    w_q_HDE: Tensor,
    w_k_GDE: Tensor,
    w_v_GDE: Tensor,
    norm_q: Callable[[Tensor], Tensor] = lambda q: q,
    norm_k: Callable[[Tensor], Tensor] = lambda k: k,
    scale: float | None = None,
) -> list[Tensor]:
    """Ainslie et al. 2023: the query heads are divided into G groups, each of which shares one key head and one value head.

    Dehghani et al. 2023: the queries and keys of each head are normed before their product.
    """
    outputs, each = [], len(w_q_HDE) // len(w_k_GDE)
    for g, (w_k, w_v) in enumerate(zip(w_k_GDE, w_v_GDE, strict=True)):
        k_TE = torch.stack([norm_k(w_k.T @ x) for x in x_TD])
        v_TE = torch.stack([w_v.T @ x for x in x_TD])
        for w_q in w_q_HDE[g * each : (g + 1) * each]:
            q_TE = torch.stack([norm_q(w_q.T @ x) for x in x_TD])
            w_TT = weights(q_TE, k_TE, scale or 1 / math.sqrt(k_TE.shape[1]))
            outputs.append(torch.stack([sum(w * v for w, v in zip(w_T, v_TE, strict=True)) for w_T in w_TT]))
    return outputs


def sum_of_projected_heads(outputs: Sequence[Tensor], w_c_HED: Tensor) -> Tensor:  # eq. T3
    """Thickstun (source T), eq. 3, missing in its text: u'_i = sum_h W_{c,h}^T sum_j alpha_ij V(x_j)."""
    rows = []
    for i in range(len(outputs[0])):
        rows.append(sum(w_c.T @ output[i] for w_c, output in zip(w_c_HED, outputs, strict=True)))
    return torch.stack(rows)


def concat_form(outputs: Sequence[Tensor], w_o_FD: Tensor) -> Tensor:  # eq. M6a, W3
    """Weng 2020 (source W) and the report (source M): [head_1; ..; head_h] W^O, the heads concatenated along the width."""
    return torch.stack([torch.cat([output[i] for output in outputs]) @ w_o_FD for i in range(len(outputs[0]))])


def sum_form(x_DN: Tensor, u_q_HED: Tensor, u_k_HED: Tensor, v_HDD: Tensor) -> Tensor:  # eq. K4, K5, K6
    """Katsaros (source K), eq. 4-6, tokens as columns: Y = sum_h V_h X A_h; columns of A_h sum to 1; scale 1 / sqrt(K)."""
    y_DN = torch.zeros_like(x_DN)
    for u_q, u_k, v in zip(u_q_HED, u_k_HED, v_HDD, strict=True):
        score_NN = x_DN.T @ u_k.T @ u_q @ x_DN / math.sqrt(u_q.shape[0])
        a_NN = torch.stack([softmax(column) for column in score_NN.T], dim=1)
        y_DN = y_DN + v @ x_DN @ a_NN
    return y_DN


def wide(x_BTK: Tensor, queries: Tensor, keys: Tensor, values: Tensor, unify: Tensor, bias: Tensor) -> Tensor:
    """The code of Bloem 2019 (source B), line by line; the weights of its nn.Linear are hk x k, hk x k, hk x k and k x hk."""
    b, t, k = x_BTK.shape
    h = queries.shape[0] // k
    q = (x_BTK @ queries.T).view(b, t, h, k).transpose(1, 2).reshape(b * h, t, k)
    s = (x_BTK @ keys.T).view(b, t, h, k).transpose(1, 2).reshape(b * h, t, k)
    v = (x_BTK @ values.T).view(b, t, h, k).transpose(1, 2).reshape(b * h, t, k)
    dot = torch.bmm(q / k ** (1 / 4), (s / k ** (1 / 4)).transpose(1, 2))
    out = torch.bmm(torch.softmax(dot, dim=2), v).view(b, h, t, k)
    return out.transpose(1, 2).reshape(b, t, h * k) @ unify.T + bias


def sliced(x_TD: Tensor, w_q_HEE: Tensor, w_k_HEE: Tensor, w_v_HEE: Tensor) -> Tensor:
    """The text of Bloem 2019 (source B): x is split into h chunks, each with its own matrices; the heads are concatenated.

    With the same matrices in every head this is the narrow form of the code in pbloem/former.
    """
    size = w_q_HEE.shape[-1]
    chunks = [x_TD[:, start : start + size] for start in range(0, x_TD.shape[1], size)]
    outputs = [
        scaled_dot_product(chunk @ w_q, chunk @ w_k, chunk @ w_v)
        for chunk, w_q, w_k, w_v in zip(chunks, w_q_HEE, w_k_HEE, w_v_HEE, strict=True)
    ]
    return torch.cat(outputs, dim=1)
