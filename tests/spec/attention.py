"""Attention as its sources write it, one token at a time.

Sources: T (Thickstun), M (multi-head report), B (Bloem), W (Weng), K (Turner). Rows are tokens, except where a function
says that it follows K, whose X is D x N with tokens as columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def softmax(score_K: Tensor) -> Tensor:
    """exp(s_j) / sum_r exp(s_r), shifted by the largest score, which cancels."""
    share_K = torch.exp(score_K - score_K.max())
    return share_K / share_K.sum()


def parameter_free(x_TD: Tensor) -> Tensor:
    """B: w'_ij = x_i . x_j, w = row softmax of w', y_i = sum_j w_ij x_j. No scale."""
    rows = []
    for x_i in x_TD:
        w_T = softmax(torch.stack([x_i @ x_j for x_j in x_TD]))
        rows.append(sum(w * x_j for w, x_j in zip(w_T, x_TD, strict=True)))
    return torch.stack(rows)


def parameter_free_columns(x_DN: Tensor) -> Tensor:
    """K: y_n = sum_n' x_n' A_{n',n} with A normalised over its columns; Y = X A."""
    size = x_DN.shape[1]
    a_NN = x_DN.new_zeros(size, size)
    for n in range(size):
        total = sum(torch.exp(x_DN[:, m] @ x_DN[:, n]) for m in range(size))
        for other in range(size):
            a_NN[other, n] = torch.exp(x_DN[:, other] @ x_DN[:, n]) / total
    return x_DN @ a_NN


def weights(q_QE: Tensor, k_KE: Tensor, scale: float) -> Tensor:
    """alpha_ij = softmax_j(scale <q_i, k_j>), the softmax over the keys (T says 'd-dimensional'; it is p keys)."""
    return torch.stack([softmax(torch.stack([scale * (q @ k) for k in k_KE])) for q in q_QE])


def weights_scaled_outside(q_QE: Tensor, k_KE: Tensor) -> Tensor:
    """W's second form, which is wrong: exp(q . k) / (sqrt(d_k) sum_r exp(q . k_r))."""
    rows = []
    for q in q_QE:
        share_K = torch.stack([torch.exp(q @ k) for k in k_KE])
        rows.append(share_K / (math.sqrt(q_QE.shape[1]) * share_K.sum()))
    return torch.stack(rows)


def scaled_dot_product(q_QE: Tensor, k_KE: Tensor, v_KE: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(d_k)) V."""
    rows = []
    for w_K in weights(q_QE, k_KE, 1 / math.sqrt(q_QE.shape[1])):
        rows.append(sum(w * v for w, v in zip(w_K, v_KE, strict=True)))
    return torch.stack(rows)


def scale_split(q_QE: Tensor, k_KE: Tensor, v_KE: Tensor) -> Tensor:
    """B's code: q and k are each divided by k^(1/4) before their product."""
    root = q_QE.shape[1] ** (1 / 4)
    return torch.stack([w_K @ v_KE for w_K in weights(q_QE / root, k_KE / root, 1.0)])


def over_sets(q_QE: Tensor, k_KE: Tensor, v_KE: Tensor, sets: Sequence[Iterable[int]]) -> Tensor:
    """W: a(x_i, S_i), the scaled dot product of query i with the keys in S_i only; an empty S_i answers zero."""
    rows = []
    for q, members in zip(q_QE, sets, strict=True):
        keys = sorted(members)
        answer = scaled_dot_product(q[None], k_KE[keys], v_KE[keys])[0] if keys else v_KE.new_zeros(v_KE.shape[1])
        rows.append(answer)
    return torch.stack(rows)


def symmetric(x_TD: Tensor, u_RD: Tensor) -> Tensor:
    """K: A ~ exp(x_n^T U^T U x_n' / sqrt(K)), K the projected width (K's slide prints sqrt(D)); the values are x."""
    metric_DD = u_RD.T @ u_RD
    rows = []
    for x_i in x_TD:
        w_T = softmax(torch.stack([x_j @ metric_DD @ x_i / math.sqrt(u_RD.shape[0]) for x_j in x_TD]))
        rows.append(w_T @ x_TD)
    return torch.stack(rows)


def asymmetric(x_TD: Tensor, u_q_RD: Tensor, u_k_RD: Tensor) -> Tensor:
    """K eq. 3: A ~ exp(x_n^T U_k^T U_q x_n'), here with the 1 / sqrt(K) that K absorbs into U; the values are x."""
    rows = []
    for x_i in x_TD:
        w_T = softmax(torch.stack([x_j @ u_k_RD.T @ u_q_RD @ x_i / math.sqrt(u_q_RD.shape[0]) for x_j in x_TD]))
        rows.append(w_T @ x_TD)
    return torch.stack(rows)


def head_answers(x_TD: Tensor, source_SD: Tensor, w_q_HDE: Tensor, w_k_HDE: Tensor, w_v_HDE: Tensor) -> list[Tensor]:
    """T eq. 1 and 2 and the sum over j, head by head: Q = W_q^T x and so on. The source is x itself or another."""
    answers = []
    for w_q, w_k, w_v in zip(w_q_HDE, w_k_HDE, w_v_HDE, strict=True):
        q_TE = torch.stack([w_q.T @ x for x in x_TD])
        k_SE = torch.stack([w_k.T @ x for x in source_SD])
        v_SE = torch.stack([w_v.T @ x for x in source_SD])
        answers.append(scaled_dot_product(q_TE, k_SE, v_SE))
    return answers


def equation_3(answers: Sequence[Tensor], w_c_HED: Tensor) -> Tensor:
    """T eq. 3, missing in its text: u'_i = sum_h W_{c,h}^T sum_j alpha_ij V(x_j)."""
    rows = []
    for i in range(len(answers[0])):
        rows.append(sum(w_c.T @ answer[i] for w_c, answer in zip(w_c_HED, answers, strict=True)))
    return torch.stack(rows)


def concat_form(answers: Sequence[Tensor], w_o_FD: Tensor) -> Tensor:
    """W, M: [head_1; ..; head_h] W^O, the heads side by side (M draws them on top of each other)."""
    return torch.stack([torch.cat([answer[i] for answer in answers]) @ w_o_FD for i in range(len(answers[0]))])


def sum_form(x_DN: Tensor, u_q_HED: Tensor, u_k_HED: Tensor, v_HDD: Tensor) -> Tensor:
    """K eq. 4-6 in K's orientation: Y = sum_h V_h X A_h, A_h normalised over columns, scaled by 1 / sqrt(K)."""
    y_DN = torch.zeros_like(x_DN)
    for u_q, u_k, v in zip(u_q_HED, u_k_HED, v_HDD, strict=True):
        score_NN = x_DN.T @ u_k.T @ u_q @ x_DN / math.sqrt(u_q.shape[0])
        a_NN = torch.stack([softmax(column) for column in score_NN.T], dim=1)
        y_DN = y_DN + v @ x_DN @ a_NN
    return y_DN


def wide(x_BTK: Tensor, queries: Tensor, keys: Tensor, values: Tensor, unify: Tensor, bias: Tensor) -> Tensor:
    """B's code, line by line; the weights are those of its nn.Linear layers: hk x k, hk x k, hk x k and k x hk."""
    b, t, k = x_BTK.shape
    h = queries.shape[0] // k
    q = (x_BTK @ queries.T).view(b, t, h, k).transpose(1, 2).reshape(b * h, t, k)
    s = (x_BTK @ keys.T).view(b, t, h, k).transpose(1, 2).reshape(b * h, t, k)
    v = (x_BTK @ values.T).view(b, t, h, k).transpose(1, 2).reshape(b * h, t, k)
    dot = torch.bmm(q / k ** (1 / 4), (s / k ** (1 / 4)).transpose(1, 2))
    out = torch.bmm(torch.softmax(dot, dim=2), v).view(b, h, t, k)
    return out.transpose(1, 2).reshape(b, t, h * k) @ unify.T + bias


def sliced(x_TD: Tensor, w_q_HEE: Tensor, w_k_HEE: Tensor, w_v_HEE: Tensor) -> Tensor:
    """B's text: x is cut into h chunks; chunk r goes through matrices of its own. The heads stand side by side.

    With the same matrices in every head this is former's narrow form.
    """
    size = w_q_HEE.shape[-1]
    chunks = [x_TD[:, start : start + size] for start in range(0, x_TD.shape[1], size)]
    answers = [
        scaled_dot_product(chunk @ w_q, chunk @ w_k, chunk @ w_v)
        for chunk, w_q, w_k, w_v in zip(chunks, w_q_HEE, w_k_HEE, w_v_HEE, strict=True)
    ]
    return torch.cat(answers, dim=1)
