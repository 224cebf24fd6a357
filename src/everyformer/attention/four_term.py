"""The four terms of Transformer-XL: content and distance, each with the query and with a vector of the head's own.

Paper: Dai et al. 2019, section 3.3 (W).
Equation: A_ij = scale (q_i . k_j + q_i . W_R r_{i-j} + u . k_j + v . W_R r_{i-j}), r_n the sinusoid of the distance n: the
sines of all frequencies, then the cosines. Symbols: `width` is the d of r, `reach` the clamp_len of the published code.
Departures: W leaves out the scale, and that every head has its own u and v. The published PyTorch code shares u and v
between layers and drops parts of r in training; here each layer has its own, as in its TensorFlow code, and r is whole.

How it is fast: with W_R^T (q_i + v) = (s, c), a number each for the sine and the cosine of a frequency w,
    s sin w(i-j) + c cos w(i-j) = (s sin wi + c cos wi) cos wj + (c sin wi - s cos wi) sin wj,
an inner product of a vector of i and one of j. So queries and keys that are wider by `width` have all four terms in their
product, and any kernel serves without a bias. A clamped distance is no such product; it is a term of the score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from everyformer.attention.context import Context
from everyformer.attention.score_mod import ScoreMod, ScoreModModule, Term, picked, sin_cos, sin_cos_of
from everyformer.value import Size, Value

BASE = 10000.0  # of the frequencies


class FourTerm(ScoreMod, Value, frozen=True):
    """Transformer-XL's relative positions. Distances beyond `reach` count as `reach`; None: as they are."""

    width: Size
    reach: Size | None = None

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
        self.width, self.reach = value.width, value.reach
        self.u_HE, self.v_HE = (nn.Parameter(torch.randn(heads, key_width) * 0.02) for _ in range(2))
        self.place = nn.Linear(value.width, heads * key_width, bias=False)  # W_R of every head

    def transform(self, q_BHQE: Tensor, k_BHKE: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        if self.reach is not None:
            return q_BHQE, k_BHKE
        dtype = q_BHQE.dtype
        waves_i, waves_j = (sin_cos_of(context, of, self.width, BASE, dtype) for of in ("queries", "keys"))
        weights = self.u_HE.to(dtype), self.v_HE.to(dtype), self._place(dtype)
        wide: tuple[Tensor, Tensor] = Wide.apply(q_BHQE, k_BHKE, *weights, *waves_i, *waves_j)  # type: ignore[no-untyped-call]
        return wide

    def bias(self, q_BHQE: Tensor, k_BHKE: Tensor, scale: float, context: Context) -> Term | None:
        reach, dtype = self.reach, q_BHQE.dtype
        if reach is None:
            return None
        distance_R = torch.arange(-reach, reach + 1, device=q_BHQE.device)
        r_RD = torch.cat(sin_cos(distance_R[None], self.width, BASE, dtype), dim=-1)[0, 0]
        place_BHQR = scale * (q_BHQE + self.v_HE.to(dtype)[:, None]) @ (self._place(dtype) @ r_RD.T)
        content_BHK = scale * (k_BHKE @ self.u_HE.to(dtype)[:, :, None])[..., 0]

        def term(b: Any, h: Any, i: Any, j: Any) -> Tensor:
            row = (context.positions.query_at(b, i) - context.positions.key_at(b, j)).clamp(-reach, reach) + reach
            return content_BHK[b, h, j] + picked(place_BHQR, b, h, i, row)

        return term

    def _place(self, dtype: torch.dtype) -> Tensor:
        return self.place.weight.to(dtype).unflatten(0, self.u_HE.shape)


class Wide(torch.autograd.Function):
    """The wide queries and keys, and their slopes, each number written where it belongs: joining them from pieces took twice as
    long. Places turn by an angle and slopes turn back; slopes of slopes there are none."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, u: Tensor, v: Tensor, place: Tensor, *sin_cos: Tensor
    ) -> tuple[Tensor, Tensor]:
        width, half = place.shape[1], place.shape[2] // 2
        sin_i, cos_i, sin_j, cos_j = sin_cos
        wide_q = q.new_empty(*q.shape[:3], width + 2 * half)
        content, *turned = wide_q.split((width, half, half), dim=-1)
        _write(content, torch.add, q, v[:, None])  # lent for a moment
        _turn((content @ place).chunk(2, dim=-1), sin_i, cos_i, turned)
        _write(content, torch.add, q, u[:, None])
        wide_k = k.new_empty(k.shape[0], k.shape[2], k.shape[1], width + 2 * half).transpose(1, 2)
        for part, given in zip(wide_k.split((width, half, half), dim=-1), (k, cos_j, sin_j), strict=True):
            part.copy_(given)
        ctx.save_for_backward(q, v, place, sin_i, cos_i)
        return wide_q, wide_k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_q: Tensor, slope_k: Tensor) -> tuple[Tensor | None, ...]:
        q, v, place, sin_i, cos_i = ctx.saved_tensors
        width, half = place.shape[1], place.shape[2] // 2
        content, *turned = slope_q.split((width, half, half), dim=-1)
        to_place = q.new_empty(*q.shape[:3], 2 * half)
        _turn(turned, sin_i, -cos_i, to_place.chunk(2, dim=-1))
        sums = _write(q.new_empty(q.shape), torch.add, q, v[:, None])
        to_weights = (sums.mT @ to_place).sum(0)
        to_sums = _write(sums, torch.matmul, to_place, place.mT)
        to_own = content.sum((0, 2)), to_sums.sum((0, 2))
        return content + to_sums, slope_k[..., :width], *to_own, to_weights, None, None, None, None


def _turn(pair: Sequence[Tensor], sin: Tensor, cos: Tensor, into: Sequence[Tensor]) -> None:
    """(s, c) to (s sin + c cos, c sin - s cos)."""
    for one, other, sign, place in ((pair[0], pair[1], 1, into[0]), (pair[1], pair[0], -1, into[1])):
        _write(place, torch.mul, one, sin).addcmul_(other, cos, value=sign)


def _write(into: Tensor, operation: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """What an operation gives, in place. Compiled code writes nothing in between, and knows no `out` that has gaps."""
    return into.copy_(operation(*given)) if torch.compiler.is_compiling() else operation(*given, out=into)
