"""The equations of norms, sublayers, residuals, positions, pooling and generation, one number, vector or row at a time.

The sources are listed in everyformer/sources.py. Rows of x are tokens. Weights have the sources' shapes: a linear map from d to m
numbers is d x m, used as W^T x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Rows = list[Tensor]
Allows = Callable[[int, int], bool]
AttentionHead = tuple[Tensor, Tensor, Tensor, Tensor]  # W_q, W_k: d x k; W_v: d x k'; W_c: k' x d
Sublayer = tuple[Callable[[Rows], Rows], Tensor, Tensor]  # f, gamma, beta


def softmax(a: Tensor) -> Tensor:  # eq. T9, K6g
    """Thickstun (source T), eq. 9: exp(a) / sum_k exp(a)_k."""
    e = torch.stack([number.exp() for number in a])
    return e / e.sum()


def unit(i: int, length: int) -> Tensor:
    """e_i, the i-th standard basis vector."""
    e = torch.zeros(length, dtype=torch.float64)
    e[i] = 1
    return e


# Activations


def relu(x: Tensor) -> Tensor:
    return torch.stack([number if number > 0 else 0 * number for number in x])


def gelu(x: Tensor) -> Tensor:
    """Hendrycks & Gimpel 2016: x Phi(x), Phi the normal distribution function."""
    return torch.stack([n * 0.5 * (1 + math.erf(n.item() / math.sqrt(2))) for n in x])


def gelu_tanh(x: Tensor) -> Tensor:
    """Hendrycks & Gimpel 2016: the approximation with tanh."""
    return torch.stack([0.5 * n * (1 + torch.tanh(math.sqrt(2 / math.pi) * (n + 0.044715 * n**3))) for n in x])


def gelu_sigmoid(x: Tensor) -> Tensor:
    """Child et al. 2019: x sigmoid(1.702 x)."""
    return x / (1 + torch.exp(-1.702 * x))


def relu_squared(x: Tensor) -> Tensor:
    """So et al. 2021: max(0, x)^2."""
    return torch.stack([n * n if n > 0 else n * 0 for n in x])


def silu(x: Tensor) -> Tensor:
    return torch.stack([n / (1 + (-n).exp()) for n in x])


# Norms


def moments(numbers: Iterable[Tensor]) -> tuple[Tensor, Tensor]:  # eq. T8
    """Thickstun (source T), eq. 8: mean and variance, both with 1/k."""
    z = list(numbers)
    mean = sum(z, torch.zeros(())) / len(z)
    return mean, sum(((n - mean) ** 2 for n in z), torch.zeros(())) / len(z)


def layer_norm(z: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:  # eq. T7, K6c
    """Thickstun (source T), eq. 7: gamma (z - mu) / sigma + beta, with an epsilon added to the variance."""
    mean, variance = moments(z)
    return torch.stack([gamma[d] * (z[d] - mean) / (variance + eps).sqrt() + beta[d] for d in range(len(z))])


def rms_norm(z: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Zhang & Sennrich 2019: gamma z / sqrt(mean z^2)."""
    square = sum((n**2 for n in z), torch.zeros(())) / len(z)
    return torch.stack([gamma[d] * z[d] / (square + eps).sqrt() for d in range(len(z))])


def offset_rms_norm(z: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Gemma Team 2024, published code: (1 + gamma) z / sqrt(mean z^2)."""
    square = sum((n**2 for n in z), torch.zeros(())) / len(z)
    return torch.stack([(1 + gamma[d]) * z[d] / (square + eps).sqrt() for d in range(len(z))])


def normalization_group(kind: str, visible: list[list[bool]], width: int, b: int, d: int) -> list[tuple[int, int, int]]:
    """Katsaros (source K): the indices (sequence, position, feature) whose mean and variance normalize feature d of sequence b."""
    return [
        (i, t, e)
        for i in range(len(visible))
        for t in range(len(visible[i]))
        for e in range(width)
        if visible[i][t]
        and (kind == "batch" or i == b)  # instance and sequence norms are per sequence
        and (kind == "sequence" or e == d)  # batch and instance norms are per feature
    ]


def shared_norm(x: Tensor, visible: list[list[bool]], kind: str, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """Batch, instance or sequence norm of x (B, T, D); padding becomes 0."""
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for d in range(x.shape[2]):
            mean, variance = moments(x[index] for index in normalization_group(kind, visible, x.shape[2], b, d))
            for t in range(x.shape[1]):
                if visible[b][t]:
                    y[b, t, d] = gamma[d] * (x[b, t, d] - mean) / (variance + eps).sqrt() + beta[d]
    return y


# Sublayers and blocks


def attention(x: Rows, y: Rows, heads: Sequence[AttentionHead], allows: Allows) -> Rows:  # eq. T1, T2, T3
    """Thickstun (source T), eq. 1-3: u'_i = sum_h W_c^T sum_j alpha_ij V(y_j), alpha_ij = softmax_j(Q(x_i) . K(y_j) / sqrt(k)).

    j runs over the keys that `allows(i, j)`.
    """
    outputs = []
    for i in range(len(x)):
        keys = [j for j in range(len(y)) if allows(i, j)]
        u = torch.zeros_like(x[i])
        for W_q, W_k, W_v, W_c in heads:
            score = torch.stack([(W_q.T @ x[i]) @ (W_k.T @ y[j]) / math.sqrt(W_q.shape[1]) for j in keys])
            alpha = softmax(score)
            for weight, j in zip(alpha, keys, strict=True):
                u = u + W_c.T @ (weight * (W_v.T @ y[j]))
        outputs.append(u)
    return outputs


def feed_forward(u: Rows, W_1: Tensor, W_2: Tensor) -> Rows:  # eq. T5, K6a
    """Thickstun (source T), eq. 5: W_2^T ReLU(W_1^T u_i)."""
    return [W_2.T @ relu(W_1.T @ u_i) for u_i in u]


def post_norm(x: Rows, sublayers: Sequence[Sublayer], eps: float) -> Rows:  # eq. T4, T6
    """Thickstun (source T), eq. 4 and 6: x_i <- LayerNorm(x_i + f(x)_i) for each sublayer in turn."""
    for f, gamma, beta in sublayers:
        x = [layer_norm(x_i + y_i, gamma, beta, eps) for x_i, y_i in zip(x, f(x), strict=True)]
    return x


def pre_norm(x: Rows, sublayers: Sequence[Sublayer], eps: float) -> Rows:  # eq. K6b, K6d
    """Katsaros (source K): X <- X + f(LayerNorm X) for each sublayer in turn, without the final norm of the stack."""
    for f, gamma, beta in sublayers:
        normed = [layer_norm(x_i, gamma, beta, eps) for x_i in x]
        x = [x_i + y_i for x_i, y_i in zip(x, f(normed), strict=True)]
    return x


def sandwich_norm(x: Rows, sublayers: Sequence[Sublayer], after: Sequence[Tensor], eps: float) -> Rows:
    """Gemma Team 2024: x <- x + RMSNorm'(f(RMSNorm x)) for each sublayer in turn; the weights are offsets from 1."""
    for (f, gamma, _), gamma_after in zip(sublayers, after, strict=True):
        normed = [offset_rms_norm(x_i, gamma, eps) for x_i in x]
        x = [x_i + offset_rms_norm(y_i, gamma_after, eps) for x_i, y_i in zip(x, f(normed), strict=True)]
    return x


def reversible(x1: Rows, x2: Rows, sublayers: Sequence[Sublayer], eps: float) -> tuple[Rows, Rows]:  # eq. W28, W30
    """Kitaev et al. 2020, eq. 9: Y1 = X1 + F(LN X2), Y2 = X2 + G(LN Y1), where F is attention and G the feed-forward net."""
    attention, net = sublayers
    y1 = add(x1, branch(x2, attention, eps))
    y2 = add(x2, branch(y1, net, eps))
    return y1, y2


def reversible_inverse(y1: Rows, y2: Rows, sublayers: Sequence[Sublayer], eps: float) -> tuple[Rows, Rows]:  # eq. W29
    """Kitaev et al. 2020, eq. 8: X2 = Y2 - G(LN Y1), X1 = Y1 - F(LN X2)."""
    attention, net = sublayers
    x2 = add(y2, [-y for y in branch(y1, net, eps)])
    x1 = add(y1, [-y for y in branch(x2, attention, eps)])
    return x1, x2


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def tanh(x: Tensor) -> Tensor:
    return (x.exp() - (-x).exp()) / (x.exp() + (-x).exp())


def gate(kind: str, x: Tensor, y: Tensor, w: dict[str, Tensor], b: Tensor | None) -> Tensor:  # eq. W34
    """Parisotto et al. 2019, section 3.2: g(x, y) of the residual stream x and the sublayer's output y."""
    if kind == "none":
        return x + y
    if kind == "input":
        return sigmoid(w["w"] @ x) * x + y
    assert b is not None
    if kind == "output":
        return x + sigmoid(w["w"] @ x - b) * y
    if kind == "highway":
        return sigmoid(w["w"] @ x + b) * x + (1 - sigmoid(w["w"] @ x + b)) * y
    if kind == "sigmoid_tanh":
        return x + sigmoid(w["w"] @ y - b) * tanh(w["u"] @ y)
    r = sigmoid(w["w_r"] @ y + w["u_r"] @ x)
    z = sigmoid(w["w_z"] @ y + w["u_z"] @ x - b)
    h = tanh(w["w_h"] @ y + w["u_h"] @ (r * x))
    return (1 - z) * x + z * h


def gated(
    x: Rows, sublayers: Sequence[Sublayer], gates: Sequence[Callable[[Tensor, Tensor], Tensor]], eps: float
) -> Rows:
    """Parisotto et al. 2019, section 3 and appendix C: x <- g(x, ReLU(f(LayerNorm x))) for each sublayer in turn."""
    for sublayer, g in zip(sublayers, gates, strict=True):
        x = [g(x_i, relu(y_i)) for x_i, y_i in zip(x, branch(x, sublayer, eps), strict=True)]
    return x


def branch(x: Rows, sublayer: Sublayer, eps: float) -> Rows:
    f, gamma, beta = sublayer
    return f([layer_norm(x_i, gamma, beta, eps) for x_i in x])


def add(x: Rows, y: Rows) -> Rows:
    return [x_i + y_i for x_i, y_i in zip(x, y, strict=True)]


def masked_weights(score: Tensor) -> Tensor:
    """Bloem 2019 (source B): adds -inf above the diagonal, then takes the softmax of each row."""
    bias = torch.zeros_like(score)
    for i in range(len(score)):
        for j in range(i + 1, len(score)):
            bias[i, j] = -torch.inf
    return torch.stack([softmax(row) for row in score + bias])


def masked_columns(score: Tensor) -> Tensor:  # eq. K6f
    """Katsaros (source K): A[n', n] is the weight of key n' for query n; columns sum to 1, and A is upper triangular."""
    weights = torch.zeros_like(score)
    for n in range(len(score)):
        weights[: n + 1, n] = softmax(score[: n + 1, n])
    return weights


# Positions


def sinusoid(k: float, width: int) -> list[float]:  # eq. T11a, M1, W4
    """Vaswani et al. 2017, section 3.5: p_{k,2i} = sin(k / 10000^(2i/d)), p_{k,2i+1} = cos(the same); k and i count from 0."""
    p = []
    for i in range(width // 2):
        p += [math.sin(k / 10000 ** (2 * i / width)), math.cos(k / 10000 ** (2 * i / width))]
    return p


def joint_mlp(x: Tensor, k: int, W_x: Tensor, W_e: Tensor, W_z: Tensor) -> Tensor:  # eq. T10
    """Thickstun (source T), eq. 10: W_z^T ReLU(W_x^T x_k + W_e^T e_k)."""
    return W_z.T @ relu(W_x.T @ x + W_e.T @ unit(k, W_e.shape[0]))


def separate_mlp(x: Tensor, k: int, W_x: Tensor, W_e: Tensor, W_zx: Tensor, W_ze: Tensor) -> Tensor:  # eq. T11
    """Thickstun (source T), eq. 11: W_zx^T ReLU(W_x^T x_k) + W_ze^T ReLU(W_e^T e_k)."""
    return W_zx.T @ relu(W_x.T @ x) + W_ze.T @ relu(W_e.T @ unit(k, W_e.shape[0]))


# Patches and pooling


def patches(image: Tensor, size: int) -> list[Tensor]:
    """Katsaros (source K): splits an image (channels, rows, columns) into squares, each flattened channel by channel, row by row."""
    channels, rows, columns = image.shape
    vectors = []
    for top in range(0, rows, size):
        for left in range(0, columns, size):
            numbers = [image[c, top + y, left + x] for c in range(channels) for y in range(size) for x in range(size)]
            vectors.append(torch.stack(numbers))
    return vectors


def pool(z: Rows, visible: list[bool], kind: str) -> Tensor:
    """One vector of a sequence, without padding: mean (source B), maximum (pbloem/former), last token (source T) or first (BERT)."""
    tokens = [z_i for z_i, is_visible in zip(z, visible, strict=True) if is_visible]
    if kind == "mean":
        return sum(tokens, torch.zeros_like(z[0])) / len(tokens)
    if kind == "max":
        return torch.stack([max(z_i[d] for z_i in tokens) for d in range(len(z[0]))])
    return tokens[-1] if kind == "last" else tokens[0]


# Graphs and generation


def reachable_nodes(node: int, edges: set[tuple[int, int]], hops: int) -> set[int]:
    """The nodes whose output depends on `node` after `hops` layers, where i attends to j for each edge (i, j)."""
    nodes = {node}
    for _ in range(hops):
        nodes |= {i for i, j in edges if j in nodes}
    return nodes


def continue_text(choose: Callable[[list[int]], int], prompt: list[int], tokens: int, context: int) -> list[int]:
    """Bloem 2019 (source B): repeatedly chooses the next token from the last `context` tokens."""
    text = list(prompt)
    for _ in range(tokens):
        text.append(choose(text[-context:]))
    return text


def softmax_with_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Bloem 2019 (source B): p_w = exp(l_w / T) / sum_v exp(l_v / T)."""
    return softmax(logits / temperature)


# Tokens inside the layers


def ngram_row(tokens: Sequence[int], i: int, order: int, rows: int) -> int:
    """The row of the `order` tokens that end at i: a polynomial of them, counted from 1, and 0 before the first."""
    value = tokens[i] + 1
    for back in range(1, order):
        earlier = tokens[i - back] + 1 if i - back >= 0 else 0
        value = (1000003 * value + earlier) % (2**31 - 1)
    return value % rows


def ngrams(x: Rows, tokens: Sequence[int], tables: dict[int, Tensor], W: Tensor) -> Rows:
    """y_i = W^T (x_i, sqrt(F) E_n[r_n(i)] for each order n)."""
    y = []
    for i, x_i in enumerate(x):
        parts = [x_i]
        for order, E_n in tables.items():
            rows, features = E_n.shape
            parts.append(math.sqrt(features) * E_n[ngram_row(tokens, i, order, rows)])
        y.append(W.T @ torch.cat(parts))
    return y


def token_values(v: Rows, tokens: Sequence[int], W: Tensor, a: Tensor, b: Tensor, width: int) -> Rows:
    """v_i <- a v_i + b sqrt(E) W[t_i], with the width E of a head."""
    return [a * v_i + b * math.sqrt(width) * W[token] for v_i, token in zip(v, tokens, strict=True)]


def with_shortcut(x: Rows, x_0: Rows, a: Tensor, b: Tensor) -> Rows:
    """a x_i + b x_0i."""
    return [a * one + b * first for one, first in zip(x, x_0, strict=True)]
