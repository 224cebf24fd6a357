"""The four terms of Transformer-XL: content and distance, each with the query and with a learned vector of the head.

Paper: Dai et al. 2019, section 3.3 (Weng 2020, source W). Equation:
    A_ij = scale (q_i . k_j + q_i . W_R r_{i-j} + u . k_j + v . W_R r_{i-j})
r_n is the sinusoid of the distance n: the sines of all frequencies, then the cosines. `four_term_scores` computes it as written.
Symbols: `width` is the size d of r, `max_distance` the clamp_len of the published code.
Departures: Weng 2020 (source W) leaves out the scale, and that every head has its own u and v. The published PyTorch code shares u
and v between layers and has dropout on r; here each layer has its own, as in its TensorFlow code, and r has no dropout.

How it is fast: with W_R^T (q_i + v) = (s, c), one number each for the sine and the cosine of a frequency w,
    s sin w(i-j) + c cos w(i-j) = (s sin wi + c cos wi) cos wj + (c sin wi - s cos wi) sin wj,
which is an inner product of a vector of i and a vector of j. So queries and keys that are wider by `width` have all four terms in
their product, and any kernel computes them without a bias. A clamped distance is no such product; it is a term of the score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from everyformer.attention.context import Context
from everyformer.attention.has_data import is_exporting, is_transformed
from everyformer.attention.rotary import sin_cos, sin_cos_of
from everyformer.attention.score_mod import ScoreMod, ScoreModModule, Term, look_up
from everyformer.value import Size, Value

BASE = 10000.0  # of the frequencies


def four_term_scores(
    q_BHQE: Tensor, k_BHKE: Tensor, u_HE: Tensor, v_HE: Tensor, w_r_HED: Tensor, distance_QK: Tensor, scale: float
) -> Tensor:
    """Returns the scores A_ij as Dai et al. 2019 write them, B, H, Q, K. Tests hold the folded form below to this one."""
    r_QKD = torch.cat(sin_cos(distance_QK, w_r_HED.shape[-1], BASE, q_BHQE.dtype), dim=-1)[:, 0]
    content_content = torch.einsum("bhqe,bhke->bhqk", q_BHQE, k_BHKE)
    content_distance = torch.einsum("bhqe,hed,qkd->bhqk", q_BHQE, w_r_HED, r_QKD)
    global_content = torch.einsum("he,bhke->bhk", u_HE, k_BHKE)[:, :, None]
    global_distance = torch.einsum("he,hed,qkd->hqk", v_HE, w_r_HED, r_QKD)
    return scale * (content_content + content_distance + global_content + global_distance)  # eq. W13


class FourTerm(ScoreMod, Value, frozen=True):
    """Transformer-XL's relative positions, with sinusoids that are `width` wide.

    Distances beyond `max_distance` count as `max_distance`. Default: not clamped.
    Example: `Attention(Standard(8), Causal(), (FourTerm(width=64),))`.
    """

    width: Size
    max_distance: Size | None = None

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.width % 2:
            raise ValueError(
                f"four_term.width is {self.width}: it has a sine and a cosine of each frequency; make it even"
            )

    def build(self, heads: int, key_width: int, value_width: int) -> ScoreModModule:
        return FourTermModule(self, heads, key_width)


class FourTermModule(ScoreModModule):
    def __init__(self, value: FourTerm, heads: int, key_width: int):
        super().__init__()
        self.width, self.max_distance = value.width, value.max_distance
        self.u_HE, self.v_HE = (nn.Parameter(torch.randn(heads, key_width) * 0.02) for _ in range(2))
        self.w_r = nn.Linear(value.width, heads * key_width, bias=False)  # W_R of every head

    def transform(self, q_BHQE: Tensor, k_BHKE: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        if self.max_distance is not None:
            return q_BHQE, k_BHKE
        dtype = q_BHQE.dtype
        sin_cos_i, sin_cos_j = (sin_cos_of(context, of, self.width, BASE, dtype) for of in ("queries", "keys"))
        weights = self.u_HE.to(dtype), self.v_HE.to(dtype), self._w_r_HED(dtype)
        if is_transformed() or is_exporting():
            return fold(q_BHQE, k_BHKE, *weights, *sin_cos_i, *sin_cos_j)
        folded: tuple[Tensor, Tensor] = Fold.apply(q_BHQE, k_BHKE, *weights, *sin_cos_i, *sin_cos_j)  # type: ignore[no-untyped-call]
        return folded

    def bias(self, q_BHQE: Tensor, k_BHKE: Tensor, scale: float, context: Context) -> Term | None:
        end, dtype = self.max_distance, q_BHQE.dtype
        if end is None:
            return None
        distance_R = torch.arange(-end, end + 1, device=q_BHQE.device)
        r_RD = torch.cat(sin_cos(distance_R[None], self.width, BASE, dtype), dim=-1)[0, 0]
        distance_BHQR = scale * (q_BHQE + self.v_HE.to(dtype)[:, None]) @ (self._w_r_HED(dtype) @ r_RD.T)
        content_BHK = scale * (k_BHKE @ self.u_HE.to(dtype)[:, :, None])[..., 0]

        def term(b: Any, h: Any, i: Any, j: Any) -> Tensor:
            row = (context.positions.query_at(b, i) - context.positions.key_at(b, j)).clamp(-end, end) + end
            return content_BHK[b, h, j] + look_up(distance_BHQR, b, h, i, row)

        return term

    def _w_r_HED(self, dtype: torch.dtype) -> Tensor:
        return self.w_r.weight.to(dtype).unflatten(0, self.u_HE.shape)


def fold(
    q: Tensor, k: Tensor, u: Tensor, v: Tensor, w_r: Tensor, sin_i: Tensor, cos_i: Tensor, sin_j: Tensor, cos_j: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the wide queries and keys, in operations that torch.func can transform."""
    s, c = ((q + v[:, None]) @ w_r).chunk(2, dim=-1)
    wide_q = torch.cat((q + u[:, None], s * sin_i + c * cos_i, c * sin_i - s * cos_i), dim=-1)
    distance = torch.cat((cos_j, sin_j), dim=-1)
    return wide_q, torch.cat((k, distance.expand(*k.shape[:3], -1)), dim=-1)


class Fold(torch.autograd.Function):
    """`fold`, faster. Computes the wide queries and keys and their gradients, each number written to its final address:
    concatenating pieces took twice as long. The distance features are rotated by an angle and their gradients back. There are no
    second derivatives."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, u: Tensor, v: Tensor, w_r: Tensor, *sin_cos: Tensor
    ) -> tuple[Tensor, Tensor]:
        width, half = w_r.shape[1], w_r.shape[2] // 2
        sin_i, cos_i, sin_j, cos_j = sin_cos
        wide_q = q.new_empty(*q.shape[:3], width + 2 * half)
        content, *rotated = wide_q.split((width, half, half), dim=-1)
        _write(content, torch.add, q, v[:, None])  # scratch: overwritten below
        _rotate((content @ w_r).chunk(2, dim=-1), sin_i, cos_i, rotated)
        _write(content, torch.add, q, u[:, None])
        wide_k = k.new_empty(k.shape[0], k.shape[2], k.shape[1], width + 2 * half).transpose(1, 2)
        for columns, x in zip(wide_k.split((width, half, half), dim=-1), (k, cos_j, sin_j), strict=True):
            columns.copy_(x)
        ctx.save_for_backward(q, v, w_r, sin_i, cos_i)
        return wide_q, wide_k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_q: Tensor, gradient_k: Tensor) -> tuple[Tensor | None, ...]:
        q, v, w_r, sin_i, cos_i = ctx.saved_tensors
        width, half = w_r.shape[1], w_r.shape[2] // 2
        content, *rotated = gradient_q.split((width, half, half), dim=-1)
        to_features = q.new_empty(*q.shape[:3], 2 * half)
        _rotate(rotated, sin_i, -cos_i, to_features.chunk(2, dim=-1))
        sums = _write(q.new_empty(q.shape), torch.add, q, v[:, None])
        to_w_r = (sums.mT @ to_features).sum(0)
        to_sums = _write(sums, torch.matmul, to_features, w_r.mT)
        to_u_and_v = content.sum((0, 2)), to_sums.sum((0, 2))
        return content + to_sums, gradient_k[..., :width], *to_u_and_v, to_w_r, None, None, None, None


def _rotate(pair: Sequence[Tensor], sin: Tensor, cos: Tensor, into: Sequence[Tensor]) -> None:
    """Writes (s sin + c cos, c sin - s cos) of a pair (s, c) into two tensors."""
    for one, other, sign, target in ((pair[0], pair[1], 1, into[0]), (pair[1], pair[0], -1, into[1])):
        _write(target, torch.mul, one, sin).addcmul_(other, cos, value=sign)


def _write(into: Tensor, operation: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Writes the result of an operation into a tensor. Compiled code stores no intermediate result, and has no `out` with gaps."""
    return into.copy_(operation(*inputs)) if torch.compiler.is_compiling() else operation(*inputs, out=into)
