"""Adaptive span: every head learns how many positions back it attends.

Paper: Sukhbaatar et al. 2019, Adaptive Attention Span in Transformers (Weng 2020, source W).
Equations: m_z(x) = min(max((R + z - x) / R, 0), 1), a_ij = m_z(i-j) exp(s_ij) / sum_r m_z(i-r) exp(s_ir) over the keys at most S
away, loss + lambda / M sum_h z_h. Dynamic span: z_i = S sigma(v . x_i + b), with v and b for each head h.
Symbols: `max_span` S, `ramp` R, `cost` lambda, M the heads of an attention; the weight is z / S, as in the published code, so that
one learning rate suits it and the other weights. x is the input of the attention.
Departures: none from the equations. The published code counts the distance from the nearest key, so its z is ours less 1, and
empty memory slots take part of its weights. A key with m = 0 passes no gradient back, which is the gradient of a shrinking span.

How it is fast: m exp(s) / sum m exp(s) is softmax(s + log m), so the soft mask is one more term of the score. `visible_keys` gives
the kernels a window for each head, outside of which the current weights hide everything. Its sizes are coarse, so that the plan of
a kernel serves many training steps.
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
from everyformer.attention.has_data import can_read
from everyformer.attention.pattern import ByHead, Pattern, Window
from everyformer.attention.score_mod import ScoreMod, ScoreModModule, Term
from everyformer.value import NotNegative, Part, Size, Value

GRAIN = 64  # windows are multiples of this, and of an eighth of the next power of two


class Span(ScoreMod, Value, frozen=True):
    """A learned span z for each head: the soft mask falls from 1 to 0 over `ramp` positions beyond z (Sukhbaatar et al. 2019).

    `max_span` is the largest z, and the initial one is the fraction `start` of it. The loss has `cost` nats per target for each
    position of the mean span. Example: `Attention(Standard(8), Causal(), (Span(max_span=256),))`.
    """

    max_span: Size
    ramp: Size = 32
    cost: NotNegative = 5e-7
    start: Part = 0.0

    def build(self, heads: int, key_width: int, value_width: int) -> ScoreModModule:
        return SpanModule(self, heads)


class DynamicSpan(ScoreMod, Value, frozen=True):
    """A span for each head and query, computed from the input vector of the query, which is `width` wide.

    `max_span`, `ramp`, `cost` and `start` are those of `Span`.
    Example: `Attention(Standard(8), Causal(), (DynamicSpan(width=64, max_span=256),))`.
    """

    width: Size
    max_span: Size
    ramp: Size = 32
    cost: NotNegative = 5e-7
    start: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.1

    def build(self, heads: int, key_width: int, value_width: int) -> ScoreModModule:
        return DynamicSpanModule(self, heads)


class SpanModule(ScoreModModule):
    soft = True
    grouped_keys = True

    def __init__(self, value: Span, heads: int):
        super().__init__()
        self.grows = grows(value)
        self.value = value
        self.assumed_span: float | None = None  # what a plan assumes; None: the weights' own spans
        self.fraction_H = nn.Parameter(torch.full((heads,), float(value.start)))

    def bias(self, q_BHQE: Tensor, k_BHKE: Tensor, scale: float, context: Context) -> Term:
        z_H = self._spans()
        if context.call.probe is not None:
            context.call.probe.spans.append(z_H.detach()[None, :, None].expand(q_BHQE.shape[:3]))
        return SoftMask(z_H[None, :, None], self.value, context, q_BHQE.dtype)

    def penalty(self, context: Context) -> Tensor:
        return self.value.cost * self._spans().mean()  # eq. W17

    def visible_keys(self, context: Context | None) -> Pattern:
        fraction_H = self.fraction_H.full_tensor() if hasattr(self.fraction_H, "full_tensor") else self.fraction_H
        return windows(fraction_H * self.value.max_span, self.value, self.assumed_span)

    def clamp_(self) -> None:
        with torch.no_grad():
            self.fraction_H.clamp_(0, 1)

    def _spans(self) -> Tensor:
        return at_least_float32(self.fraction_H) * self.value.max_span


class DynamicSpanModule(ScoreModModule):
    reads_inputs = True
    soft = True
    grouped_keys = True

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
        visible_BHQ = visible_BQ[:, None].expand_as(z_BHQ)
        return self.value.cost * (z_BHQ * visible_BHQ).sum() / visible_BHQ.sum()

    def visible_keys(self, context: Context | None) -> Pattern:
        # Which keys are computed must not depend on later tokens, not even by rounding; in training that does not matter.
        if context is None or not self.training:
            return Window(self.value.max_span + 1)
        with torch.no_grad():
            return windows(self._spans(context).amax((0, 2)), self.value, self.assumed_span)

    def _spans(self, context: Context) -> Tensor:
        if context.side.query_inputs is None:
            raise ValueError("a dynamic span reads the input vectors of the queries; give a context with query_inputs=")
        x_BQD = at_least_float32(context.side.query_inputs)
        logit_BQH = x_BQD @ self.v_HD.to(x_BQD.dtype).T + self.b_H.to(x_BQD.dtype)
        return self.value.max_span * logit_BQH.sigmoid().transpose(1, 2)  # eq. W18


@dataclass(frozen=True, eq=False)  # torch.compile asks a callable for its hash before its fields are set
class SoftMask:
    """The term log m_z of the distance: -inf if m is 0 or the key is farther away than `max_span`."""

    z_BHQ: Tensor  # an axis along which all values are equal has length 1
    value: Span | DynamicSpan
    context: Context
    dtype: torch.dtype

    def __call__(self, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        distance = (self.context.positions.query_at(b, i) - self.context.positions.key_at(b, j)).abs()
        z = self.z_BHQ[b % self.z_BHQ.shape[0], h, i % self.z_BHQ.shape[2]]
        m = ((self.value.ramp + z - distance) / self.value.ramp).clamp(0, 1)  # eq. W15
        visible = (m > 0) & (distance <= self.value.max_span)
        # The gradient of log m at 0 is infinite, and infinity times a weight of 0 is NaN: no gradient there.
        return torch.where(visible, m, 1).log().masked_fill(~visible, -torch.inf).to(self.dtype)  # eq. W16


def windows(z_H: Tensor, value: Span | DynamicSpan, assumed: float | None = None) -> Pattern:
    """Returns the windows that cover these spans. With `assumed`, all spans have this length and `z_H` is not read.

    Where the spans cannot be read, as inside vmap, the windows cover every span.
    """
    most = value.max_span + 1
    if assumed is None and not can_read(z_H):
        return Window(most)
    spans = z_H.tolist() if assumed is None else [assumed] * len(z_H)
    ends = [z + value.ramp if math.isfinite(z) else most for z in spans]  # a NaN shows in the loss of the step
    return _windows(tuple(min(most, coarse(math.ceil(end))) for end in ends))


def grows(value: Span | DynamicSpan) -> str:
    """Returns what may need more memory later in training, in words."""
    return f"spans of {value.start * value.max_span:.0f}, at most {value.max_span}"


def coarse(size: int) -> int:
    """Returns the size rounded up to one of a few."""
    step = max(GRAIN, (1 << (size - 1).bit_length()) // 8)
    return max(1, -(-size // step)) * step


@lru_cache(maxsize=256)
def _windows(sizes: tuple[int, ...]) -> Pattern:
    return Window(sizes[0]) if len(set(sizes)) == 1 else ByHead(tuple(map(Window, sizes)))


def at_least_float32(x: Tensor) -> Tensor:
    """Returns x in float32 or better: bfloat16 rounds a distance of 257 to 256."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
