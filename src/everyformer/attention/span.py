"""Adaptive span: every head learns how far back it looks.

Paper: Sukhbaatar et al. 2019, Adaptive Attention Span in Transformers (W).
Equations: m_z(x) = min(max((R + z - x) / R, 0), 1), a_ij = m_z(i-j) exp(s_ij) / sum_r m_z(i-r) exp(s_ir) over the keys at most S
away, loss + lambda / M sum_h z_h. Dynamic span: z_i = S sigma(v . x_i + b), of head h with its own v and b.
Symbols: `longest` S, `ramp` R, `cost` lambda, M the heads of an attention; the weight is z / S, as in the published code, so
that one rate of learning suits it and the others. x is what enters the attention.
Departures: none from the equations. The published code counts the distance from the nearest key, so that its z is ours less
1; it lets empty memory take a part of the weights. A key with m = 0 passes nothing back, which is the slope of shrinking.

How it is fast: m exp(s) / sum m exp(s) is softmax(s + log m), so the soft mask is one more term of the score. What no head
can see with the weights as they are is told to the kernels as a window for each head (`sight`), in coarse steps, so that
their plans serve for many steps of training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor, nn

from everyformer.attention.context import Context
from everyformer.attention.pattern import ByHead, Pattern, Window
from everyformer.attention.score_mod import ScoreMod, ScoreModModule, Term
from everyformer.value import NotNegative, Part, Size, Value

GRAIN = 64  # windows are multiples of this, and of an eighth of the next power of two


class Span(ScoreMod, Value, frozen=True):
    """One span for each head. It begins at a part of the longest."""

    longest: Size
    ramp: Size = 32
    cost: NotNegative = 5e-7  # of each position, in nats a target
    start: Part = 0.0

    def build(self, heads: int, key_width: int, value_width: int) -> ScoreModModule:
        return SpanModule(self, heads)


class DynamicSpan(ScoreMod, Value, frozen=True):
    """A span for each head and query, by what the query is made of. `width` is the model's."""

    width: Size
    longest: Size
    ramp: Size = 32
    cost: NotNegative = 5e-7
    start: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.1

    def build(self, heads: int, key_width: int, value_width: int) -> ScoreModModule:
        return DynamicSpanModule(self, heads)


class SpanModule(ScoreModModule):
    soft = True

    def __init__(self, value: Span, heads: int):
        super().__init__()
        self.grows = grows(value)
        self.value = value
        self.assumed_span: float | None = None  # what a plan assumes; None: the weights' own spans
        self.part_H = nn.Parameter(torch.full((heads,), float(value.start)))

    def bias(self, q_BHQE: Tensor, k_BHKE: Tensor, scale: float, context: Context) -> Term:
        z_H = self._spans()
        if context.call.probe is not None:
            context.call.probe.spans.append(z_H.detach()[None, :, None].expand(q_BHQE.shape[:3]))
        return SoftMask(z_H[None, :, None], self.value, context, q_BHQE.dtype)

    def penalty(self, context: Context) -> Tensor:
        return self.value.cost * self._spans().mean()

    def visible_keys(self, context: Context | None) -> Pattern:
        part_H = self.part_H.full_tensor() if hasattr(self.part_H, "full_tensor") else self.part_H
        return windows(part_H * self.value.longest, self.value, self.assumed_span)

    def clamp_(self) -> None:
        with torch.no_grad():
            self.part_H.clamp_(0, 1)

    def _spans(self) -> Tensor:
        return at_least_single(self.part_H) * self.value.longest


class DynamicSpanModule(ScoreModModule):
    reads_inputs = True
    soft = True

    def __init__(self, value: DynamicSpan, heads: int):
        super().__init__()
        self.value = value
        self.grows = grows(value)
        self.assumed_span: float | None = None
        self.v_HD = nn.Parameter(torch.randn(heads, value.width) * 0.02)
        self.b_H = nn.Parameter(torch.full((heads,), math.log(value.start / (1 - value.start))))

    def bias(self, q_BHQE: Tensor, k_BHKE: Tensor, scale: float, context: Context) -> Term:
        z_BHQ = self._spans(context)
        if context.call.probe is not None:
            context.call.probe.spans.append(z_BHQ.detach())
        return SoftMask(z_BHQ, self.value, context, q_BHQE.dtype)

    def penalty(self, context: Context) -> Tensor:
        z_BHQ, visible_BQ = self._spans(context), context.positions.visible_BQ()
        if visible_BQ is None:
            return self.value.cost * z_BHQ.mean()
        real_BHQ = visible_BQ[:, None].expand_as(z_BHQ)
        return self.value.cost * (z_BHQ * real_BHQ).sum() / real_BHQ.sum()

    def visible_keys(self, context: Context | None) -> Pattern:
        if context is None:
            return Window(self.value.longest + 1)
        with torch.no_grad():
            return windows(self._spans(context).amax((0, 2)), self.value, self.assumed_span)

    def _spans(self, context: Context) -> Tensor:
        if context.side.query_inputs is None:
            raise ValueError(
                "a dynamic span reads what the queries are made of; give attend a scene with query_inputs="
            )
        x_BQD = at_least_single(context.side.query_inputs)
        logit_BQH = x_BQD @ self.v_HD.to(x_BQD.dtype).T + self.b_H.to(x_BQD.dtype)
        return self.value.longest * logit_BQH.sigmoid().transpose(1, 2)


@dataclass(frozen=True, eq=False)  # torch.compile asks a callable for its hash before it has its values
class SoftMask:
    """The term log m_z of the distance, -inf where m is 0 or the key further away than the longest span."""

    z_BHQ: Tensor  # axes that make no difference are 1 long
    value: Span | DynamicSpan
    context: Context
    dtype: torch.dtype

    def __call__(self, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        away = (self.context.positions.query_at(b, i) - self.context.positions.key_at(b, j)).abs()
        z = self.z_BHQ[b % self.z_BHQ.shape[0], h, i % self.z_BHQ.shape[2]]
        m = ((self.value.ramp + z - away) / self.value.ramp).clamp(0, 1)
        seen = (m > 0) & (away <= self.value.longest)
        # The slope of log m at 0 is infinite, and infinity times the weight 0 is no number: no slope there.
        return torch.where(seen, m, 1).log().masked_fill(~seen, -torch.inf).to(self.dtype)


def windows(z_H: Tensor, value: Span | DynamicSpan, assumed: float | None = None) -> Pattern:
    """Returns the windows that cover these spans. With `assumed`, all spans have this length and `z_H` is not read."""
    most = value.longest + 1
    spans = z_H.tolist() if assumed is None else [assumed] * len(z_H)
    ends = [z + value.ramp if math.isfinite(z) else most for z in spans]  # a step gone wrong is told by its loss
    return _windows(tuple(min(most, coarse(math.ceil(end))) for end in ends))


def grows(value: Span | DynamicSpan) -> str:
    """What may take more memory when it has learned."""
    return f"spans of {value.start * value.longest:.0f}, at most {value.longest}"


def coarse(size: int) -> int:
    """A size rounded up to one of a few."""
    step = max(GRAIN, (1 << (size - 1).bit_length()) // 8)
    return max(1, -(-size // step)) * step


@lru_cache(maxsize=256)
def _windows(sizes: tuple[int, ...]) -> Pattern:
    return Window(sizes[0]) if len(set(sizes)) == 1 else ByHead(tuple(map(Window, sizes)))


def at_least_single(x: Tensor) -> Tensor:
    """In float32 or better: bfloat16 cannot tell a distance of 256 from 257."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
