"""The equations around attention, literally: one number, vector or row at a time, nothing shared with the library.

T = Thickstun, Transformer Networks; K = Turner, lecture slides; B = Bloem, Transformers from scratch; W = Weng, The
Transformer Family. Rows of x are tokens. Weights have the sources' shapes: a map from d to m numbers is d x m, used as
W^T x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Rows = list[Tensor]
Sees = Callable[[int, int], bool]
OutputHead = tuple[Tensor, Tensor, Tensor, Tensor]  # W_q, W_k: d x k; W_v: d x k'; W_c: k' x d
Sublayer = tuple[Callable[[Rows], Rows], Tensor, Tensor]  # f, gamma, beta


def softmax(a: Tensor) -> Tensor:
    """T eq. 9, with the sum over all the classes: exp(a) / sum_k exp(a)_k."""
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
    """x Phi(x), Phi the normal distribution function (Hendrycks & Gimpel 2016)."""
    return torch.stack([n * 0.5 * (1 + math.erf(n.item() / math.sqrt(2))) for n in x])


def gelu_tanh(x: Tensor) -> Tensor:
    """The same paper's approximation by tanh."""
    return torch.stack([0.5 * n * (1 + torch.tanh(math.sqrt(2 / math.pi) * (n + 0.044715 * n**3))) for n in x])


def gelu_sigmoid(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x), Child et al. 2019."""
    return x / (1 + torch.exp(-1.702 * x))


def silu(x: Tensor) -> Tensor:
    return torch.stack([n / (1 + (-n).exp()) for n in x])


# Norms


def moments(numbers: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """T eq. 8: mean and variance, both with 1/k."""
    z = list(numbers)
    mean = sum(z, torch.zeros(())) / len(z)
    return mean, sum(((n - mean) ** 2 for n in z), torch.zeros(())) / len(z)


def layer_norm(z: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """T eq. 7, gamma (z - mu) / sigma + beta, with an epsilon added to the variance."""
    mean, variance = moments(z)
    return torch.stack([gamma[d] * (z[d] - mean) / (variance + eps).sqrt() + beta[d] for d in range(len(z))])


def rms_norm(z: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Zhang & Sennrich 2019: gamma z / sqrt(mean z^2)."""
    square = sum((n**2 for n in z), torch.zeros(())) / len(z)
    return torch.stack([gamma[d] * z[d] / (square + eps).sqrt() for d in range(len(z))])


def kin(kind: str, visible: list[list[bool]], width: int, b: int, d: int) -> list[tuple[int, int, int]]:
    """The numbers (sequence, position, feature) that share mean and variance with feature d of sequence b (K)."""
    return [
        (i, t, e)
        for i in range(len(visible))
        for t in range(len(visible[i]))
        for e in range(width)
        if visible[i][t]
        and (kind == "batch" or i == b)  # instance and sequence norms stay within a sequence
        and (kind == "sequence" or e == d)  # batch and instance norms are per feature
    ]


def shared_norm(x: Tensor, visible: list[list[bool]], kind: str, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """Batch, instance or sequence norm of x (B, T, D); what is not visible is left at 0."""
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for d in range(x.shape[2]):
            mean, variance = moments(x[place] for place in kin(kind, visible, x.shape[2], b, d))
            for t in range(x.shape[1]):
                if visible[b][t]:
                    y[b, t, d] = gamma[d] * (x[b, t, d] - mean) / (variance + eps).sqrt() + beta[d]
    return y


# Sublayers and blocks


def attention(x: Rows, y: Rows, heads: Sequence[OutputHead], sees: Sees) -> Rows:
    """T eq. 1-3: u'_i = sum_h W_c^T sum_j alpha_ij V(y_j), alpha_ij = softmax_j(Q(x_i) . K(y_j) / sqrt(k)), j seen."""
    found = []
    for i in range(len(x)):
        seen = [j for j in range(len(y)) if sees(i, j)]
        u = torch.zeros_like(x[i])
        for W_q, W_k, W_v, W_c in heads:
            score = torch.stack([(W_q.T @ x[i]) @ (W_k.T @ y[j]) / math.sqrt(W_q.shape[1]) for j in seen])
            alpha = softmax(score)
            for weight, j in zip(alpha, seen, strict=True):
                u = u + W_c.T @ (weight * (W_v.T @ y[j]))
        found.append(u)
    return found


def feed_forward(u: Rows, W_1: Tensor, W_2: Tensor) -> Rows:
    """T eq. 5: W_2^T ReLU(W_1^T u_i)."""
    return [W_2.T @ relu(W_1.T @ u_i) for u_i in u]


def post_norm(x: Rows, sublayers: Sequence[Sublayer], eps: float) -> Rows:
    """T eq. 4 and 6: x_i <- LayerNorm(x_i + f(x)_i) for each sublayer in turn."""
    for f, gamma, beta in sublayers:
        x = [layer_norm(x_i + y_i, gamma, beta, eps) for x_i, y_i in zip(x, f(x), strict=True)]
    return x


def pre_norm(x: Rows, sublayers: Sequence[Sublayer], eps: float) -> Rows:
    """K: X <- X + f(LayerNorm X) for each sublayer in turn. The stack's last norm is not part of it."""
    for f, gamma, beta in sublayers:
        normed = [layer_norm(x_i, gamma, beta, eps) for x_i in x]
        x = [x_i + y_i for x_i, y_i in zip(x, f(normed), strict=True)]
    return x


def reversible(x1: Rows, x2: Rows, sublayers: Sequence[Sublayer], eps: float) -> tuple[Rows, Rows]:
    """Kitaev et al. 2020: Y1 = X1 + F(LN X2), Y2 = X2 + G(LN Y1), F being attention and G the feed-forward net."""
    attention, net = sublayers
    y1 = add(x1, branch(x2, attention, eps))
    y2 = add(x2, branch(y1, net, eps))
    return y1, y2


def reversed_back(y1: Rows, y2: Rows, sublayers: Sequence[Sublayer], eps: float) -> tuple[Rows, Rows]:
    """X2 = Y2 - G(LN Y1), X1 = Y1 - F(LN X2)."""
    attention, net = sublayers
    x2 = add(y2, [-y for y in branch(y1, net, eps)])
    x1 = add(y1, [-y for y in branch(x2, attention, eps)])
    return x1, x2


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def tanh(x: Tensor) -> Tensor:
    return (x.exp() - (-x).exp()) / (x.exp() + (-x).exp())


def gate(kind: str, x: Tensor, y: Tensor, w: dict[str, Tensor], b: Tensor | None) -> Tensor:
    """Parisotto et al. 2019, section 3.2: g(x, y) of the stream x and a sublayer's answer y, vectors both."""
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
    """The same, section 3 and appendix C: x <- g(x, ReLU(f(LayerNorm x))) for each sublayer in turn."""
    for sublayer, g in zip(sublayers, gates, strict=True):
        x = [g(x_i, relu(y_i)) for x_i, y_i in zip(x, branch(x, sublayer, eps), strict=True)]
    return x


def branch(x: Rows, sublayer: Sublayer, eps: float) -> Rows:
    f, gamma, beta = sublayer
    return f([layer_norm(x_i, gamma, beta, eps) for x_i in x])


def add(x: Rows, y: Rows) -> Rows:
    return [x_i + y_i for x_i, y_i in zip(x, y, strict=True)]


def masked_weights(score: Tensor) -> Tensor:
    """B: add -inf above the diagonal, then softmax over each row."""
    bias = torch.zeros_like(score)
    for i in range(len(score)):
        for j in range(i + 1, len(score)):
            bias[i, j] = -torch.inf
    return torch.stack([softmax(row) for row in score + bias])


def masked_columns(score: Tensor) -> Tensor:
    """K's convention: A[n', n] weighs n' for n, columns sum to one, and what is kept is upper triangular."""
    weights = torch.zeros_like(score)
    for n in range(len(score)):
        weights[: n + 1, n] = softmax(score[: n + 1, n])
    return weights


# Positions


def sinusoid(k: float, width: int) -> list[float]:
    """Vaswani et al. 2017: p_{k,2i} = sin(k / 10000^(2i/d)), p_{k,2i+1} = cos(the same); k and i count from 0."""
    p = []
    for i in range(width // 2):
        p += [math.sin(k / 10000 ** (2 * i / width)), math.cos(k / 10000 ** (2 * i / width))]
    return p


def joint_mlp(x: Tensor, k: int, W_x: Tensor, W_e: Tensor, W_z: Tensor) -> Tensor:
    """T eq. 10: W_z^T ReLU(W_x^T x_k + W_e^T e_k)."""
    return W_z.T @ relu(W_x.T @ x + W_e.T @ unit(k, W_e.shape[0]))


def separate_mlp(x: Tensor, k: int, W_x: Tensor, W_e: Tensor, W_zx: Tensor, W_ze: Tensor) -> Tensor:
    """T eq. 11: W_zx^T ReLU(W_x^T x_k) + W_ze^T ReLU(W_e^T e_k)."""
    return W_zx.T @ relu(W_x.T @ x) + W_ze.T @ relu(W_e.T @ unit(k, W_e.shape[0]))


# Inputs and readings


def patches(image: Tensor, size: int) -> list[Tensor]:
    """K: an image (channels, rows, columns) cut into squares, each made a vector channel by channel, row by row."""
    channels, rows, columns = image.shape
    found = []
    for top in range(0, rows, size):
        for left in range(0, columns, size):
            numbers = [image[c, top + y, left + x] for c in range(channels) for y in range(size) for x in range(size)]
            found.append(torch.stack(numbers))
    return found


def read(z: Rows, visible: list[bool], reading: str) -> Tensor:
    """One vector of a sequence: B's mean, former's maximum, T's last token, BERT's first; padding does not count."""
    here = [z_i for z_i, seen in zip(z, visible, strict=True) if seen]
    if reading == "mean":
        return sum(here, torch.zeros_like(z[0])) / len(here)
    if reading == "max":
        return torch.stack([max(z_i[d] for z_i in here) for d in range(len(z[0]))])
    return here[-1] if reading == "last" else here[0]


# Graphs and generation


def moved_by(node: int, edges: set[tuple[int, int]], hops: int) -> set[int]:
    """Who hears of a change of `node` within so many layers; (i, j) says that i sees j, and each keeps what it knows."""
    found = {node}
    for _ in range(hops):
        found |= {i for i, j in edges if j in found}
    return found


def continue_text(choose: Callable[[list[int]], int], prompt: list[int], tokens: int, context: int) -> list[int]:
    """B: the next token from the last `context` ones, again and again."""
    text = list(prompt)
    for _ in range(tokens):
        text.append(choose(text[-context:]))
    return text


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """B: p_w = exp(l_w / T) / sum_v exp(l_v / T)."""
    return softmax(logits / temperature)
