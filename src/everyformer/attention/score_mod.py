"""Score modifications: how strongly a query attends to a key, by their positions.

A score modification is a value (its numbers) that builds a module (its weights) with any of these hooks:

    transform(q, k, context)     -> q, k      changes queries and keys before their product; may make both wider
    bias(q, k, scale, context)   -> term      term(b, h, i, j) is added to the score of query i and key j
    output(weights, context)     -> BHQE      is added to the output; needs the weights, so only the kernel `reference` supports it
    penalty(context)             -> a scalar  is added to the loss, once for each attention
    visible_keys(context)        -> pattern   the pairs that the term leaves visible with the current weights; kernels skip the others
    sink()                       -> H         a logit of each head is added to the denominator of the softmax
    clamp_()                                  after each optimizer step: moves weights back into their range

and the attribute `soft_cap`, which bounds the products of queries and keys (attention/softmax.py has both).

A term is elementwise like a pattern, so the same body serves a dense bias, a FlexAttention score_mod and a gathered block. i and j are
indices into q and k; `context.positions.query_at(b, i)` and `key_at(b, j)` return their positions.
A score modification with `shared` True has one module for all layers of a stack.

Papers: Su et al. 2021 (rotary), Press et al. 2021 (ALiBi), Shaw et al. 2018, Raffel et al. 2019 (T5), Wu et al. 2021
(image-relative bias).
Departures: T5 omits the 1/sqrt(d) scale; here the scale belongs to the projection (`Standard(scale=1.0)` has none), and T5's bias is
added to scaled scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from everyformer.attention.context import Context
from everyformer.attention.has_data import can_read, is_exporting, is_recorded
from everyformer.attention.pattern import Pattern
from everyformer.attention.rotary import RotaryScaling, angles, positions_of, sin_cos_of
from everyformer.value import Count, Positive, Size, Value

Term = Callable[[Any, Any, Any, Any], Tensor]


class ScoreMod:
    """How strongly a query attends to a key: a value that builds the module of one attention.

    Example: `class Decay(ScoreMod, Value, frozen=True)`.
    """

    __slots__ = ()
    shared = False

    def build(self, heads: int, key_width: int, value_width: int) -> ScoreModModule:
        """Returns the module of an attention with these heads and widths of a head."""
        raise NotImplementedError


class ScoreModModule(nn.Module):
    """The hooks. Each one does nothing unless a subclass defines it. Example: `class DecayModule(ScoreModModule)`."""

    needs_weights = False  # whether `output` does anything
    transforms_keys_once = (
        False  # whether `transform` makes each key from that key and its position alone, so that it can be cached
    )
    reads_inputs = False  # whether it reads `context.side.query_inputs`
    soft = False  # whether its term is a `SoftMask`, which a GPU kernel reads on the device
    soft_cap: float | None = None  # c in c tanh(score / c) of the scaled products, before terms are added
    grouped_keys = False  # whether its hooks take keys with fewer heads than the queries; otherwise they are repeated

    def transform(self, q_BHQE: Tensor, k_BHKE: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Returns the queries and keys whose product is the score."""
        return q_BHQE, k_BHKE

    def bias(self, q_BHQE: Tensor, k_BHKE: Tensor, scale: float, context: Context) -> Term | None:
        """Returns a function of b, h, i, j that is added to the score of query i and key j, or None."""
        return None

    def output(self, weights_BHQK: Tensor, context: Context) -> Tensor | None:
        """Returns what is added to the output of the attention, or None."""
        return None

    def penalty(self, context: Context) -> Tensor | None:
        """Returns a loss of this attention, or None."""
        return None

    def visible_keys(self, context: Context | None) -> Pattern | None:
        """Returns the pairs that the term leaves visible, or None for all; without a context those that are visible in any."""
        return None

    def sink(self) -> Tensor | None:
        """Returns a logit of each head that is added to the denominator of its softmax, or None."""
        return None

    def clamp_(self) -> None:
        """Moves weights back into their range, after a step of the optimizer."""
        return None


def narrow_pattern(pattern: Pattern, score_mods: Iterable[ScoreModModule], context: Context | None = None) -> Pattern:
    """Returns the pairs of a pattern that all score modifications leave visible; where weights cannot be read, because
    torch.compile traces or a CUDA graph records the call, the whole pattern."""
    if not is_recorded():
        for score_mod in score_mods:
            visible = score_mod.visible_keys(context)
            pattern = pattern if visible is None else _both(pattern, visible)
    return pattern


@lru_cache(maxsize=256)
def _both(one: Pattern, two: Pattern) -> Pattern:
    return one & two


class Rotary(ScoreMod, Value, frozen=True):
    """Rotates pair m of the first W (`width`) features of a query or key at position i by i / `base`^(2m/W). Default W: all.

    The pair is (2m, 2m+1) in the `layout` interleaved (Su et al. 2021), (m, m + W/2) in halves (GPT-NeoX, Llama as transformers
    stores it). `scaling` changes the angles for longer contexts.
    Example: `Attention(Standard(8), Causal(), (Rotary(500000.0, "halves", scaling=Llama3Scaling(8.0)),))`.
    """

    base: Positive = 10000.0
    layout: Literal["interleaved", "halves"] = "interleaved"
    width: Size | None = None
    scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.scaling is not None and self.base <= 1:
            raise ValueError(
                f"rotary.base is {self.base}, but scaling lowers frequencies that fall; give a base above 1"
            )

    def width_reason(self, key_width: int) -> str | None:
        """Why it cannot rotate keys of this width, with a remedy, or None."""
        if self.width and self.width > key_width:
            return f"rotary.width is {self.width}, but a head is {key_width} wide; make it {key_width} at most"
        if self.width and self.width % 2:
            return f"rotary.width is {self.width}, but rotary rotates pairs of features; make it even"
        if not self.width and key_width % 2:
            return f"rotary rotates pairs of features, but a head is {key_width} wide; make it even"
        return None

    def build(self, heads: int, key_width: int, value_width: int) -> ScoreModModule:
        if reason := self.width_reason(key_width):
            raise ValueError(reason)
        return RotaryModule(self, self.width or key_width)


class RotaryModule(ScoreModModule):
    transforms_keys_once = True
    grouped_keys = True

    def __init__(self, value: Rotary, width: int):
        super().__init__()
        self.value, self.width, self.name = value, width, repr(value)

    def transform(self, q_BHQE: Tensor, k_BHKE: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        return self._rotate(q_BHQE, "queries", context), self._rotate(k_BHKE, "keys", context)

    def _rotate(self, x_BHTE: Tensor, of: Literal["queries", "keys"], context: Context) -> Tensor:
        return self.rotate(x_BHTE, *self._sin_cos(context, of, x_BHTE.dtype))

    def rotate(self, x_BHTE: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        """Returns queries or keys rotated by the angles with these sines and cosines."""
        turned, rest = x_BHTE[..., : self.width], x_BHTE[..., self.width :]
        if self.value.layout == "halves":
            one, two = turned.chunk(2, dim=-1)
            parts = (one * cos - two * sin, one * sin + two * cos)
            return torch.cat((*parts, rest) if rest.shape[-1] else parts, dim=-1)
        even, odd = turned[..., 0::2], turned[..., 1::2]
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
        return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated

    def _sin_cos(self, context: Context, of: Literal["queries", "keys"], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scaling = self.value.scaling
        if scaling is None:
            return sin_cos_of(context, of, self.width, self.value.base, dtype)

        def make() -> tuple[Tensor, Tensor]:
            at_BT = positions_of(context, of)
            frequency_N = scaling.frequencies(self.width, self.value.base, at_BT.device)
            return angles(at_BT, frequency_N, dtype, scaling.attention_factor())

        return context.memo((self.name, of, self.width, dtype), make)


def look_up(x_BHQR: Tensor, b: Any, h: Any, i: Any, row: Any) -> Tensor:
    """Returns x_BHQR[b, h, i, row]. If the last axis has the keys of one query, it uses `gather`, whose gradient needs no sorting;
    in float32, because that gradient is a sum over all keys with the same row."""
    if i.dim() == 0 or i.shape[-1] > 1:
        return x_BHQR[b, h, i, row]
    whole = i.dim() == 4  # all queries, as in `Positions.indices`
    of_query = x_BHQR if whole else x_BHQR[b, h, i][..., 0, :]
    exact = of_query.to(torch.promote_types(x_BHQR.dtype, torch.float32))
    return exact.gather(-1, row.expand(*of_query.shape[:-1], -1)).to(x_BHQR.dtype)


class Alibi(ScoreMod, Value, frozen=True):
    """Subtracts a slope times the distance: -m_h |i - j|, m_h = 2^(-8h/H) for h = 1..H.

    Example: `Attention(Standard(8), Causal(), (Alibi(),))`.
    """

    def build(self, heads: int, key_width: int, value_width: int) -> ScoreModModule:
        return AlibiModule(heads)


class AlibiModule(ScoreModModule):
    grouped_keys = True
    slope_H: Tensor

    def __init__(self, heads: int):
        super().__init__()
        self.register_buffer("slope_H", torch.tensor(alibi_slopes(heads), dtype=torch.float64), persistent=False)

    def bias(self, q_BHQE: Tensor, k_BHKE: Tensor, scale: float, context: Context) -> Term:
        slope_H = self.slope_H.to(q_BHQE.dtype)

        def term(b: Any, h: Any, i: Any, j: Any) -> Tensor:
            return -slope_H[h] * (context.positions.query_at(b, i) - context.positions.key_at(b, j)).abs()

        return term


def alibi_slopes(heads: int) -> list[float]:
    """Returns the paper's slopes; if H is not a power of two, some of the next power are added, as in the paper's code."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return slopes + [2 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)]


class Shaw(ScoreMod, Value, frozen=True):
    """Relative position representations: e_ij = q_i (k_j + a^K_r) / sqrt(E), with `values` z_i = sum_j w_ij (v_j + a^V_r).

    r = clip(j - i) to `max_distance`; the vectors a are learned and shared by the heads, as in the paper, with `shared` by all layers too.
    With `future` False there are none for r > 0, and such keys use r = 0.
    Example: `Attention(Standard(8), score_mods=(Shaw(max_distance=16),))`.
    """

    max_distance: Size = 16
    values: bool = False
    future: bool = True
    shared: bool = False

    def build(self, heads: int, key_width: int, value_width: int) -> ScoreModModule:
        return ShawModule(self, key_width, value_width if self.values else 0)


class ShawModule(ScoreModModule):
    grouped_keys = True

    def __init__(self, value: Shaw, key_width: int, value_width: int):
        super().__init__()
        self.back, self.future = value.max_distance, value.max_distance if value.future else 0
        self.needs_weights = value_width > 0
        rows = self.back + 1 + self.future
        self.key_RE = nn.Parameter(torch.randn(rows, key_width) * key_width**-0.5)
        self.value_RE = nn.Parameter(torch.randn(rows, value_width) * value_width**-0.5) if value_width else None

    def bias(self, q_BHQE: Tensor, k_BHKE: Tensor, scale: float, context: Context) -> Term:
        back, future = context.within(self.back), context.within(self.future)  # few of thousands of rows may be used
        used_RE = self.key_RE[self.back - back : self.back + future + 1]
        scaled_RE = (scale * used_RE).to(q_BHQE.dtype)  # not the term, which has a number for each query and distance
        return RelativeTerm(q_BHQE @ scaled_RE.T, back, future, context)

    def output(self, weights_BHQK: Tensor, context: Context) -> Tensor | None:
        if self.value_RE is None:
            return None
        back, future = context.within(self.back), context.within(self.future)
        used_RE = self.value_RE[self.back - back : self.back + future + 1].to(weights_BHQK.dtype)
        q_BQ, k_BK = context.positions.query_positions(), context.positions.key_positions()
        row_BQK = (k_BK[:, None, :] - q_BQ[:, :, None]).clamp(-back, future) + back
        has_row_BQKR = row_BQK[..., None] == torch.arange(len(used_RE), device=row_BQK.device)
        # A product: on a GPU, a scatter adds in an order that changes from run to run.
        return torch.einsum("bhqk,bqkr->bhqr", weights_BHQK, has_row_BQKR.to(weights_BHQK.dtype)) @ used_RE


@dataclass(frozen=True, eq=False)  # torch.compile asks a callable for its hash before its fields are set
class RelativeTerm:
    """The term of a query and the distance j - i, from `back` positions before the query to `future` after it."""

    term_BHQR: Tensor
    back: int
    future: int
    context: Context

    def __call__(self, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        positions = self.context.positions
        distance = positions.key_at(b, j) - positions.query_at(b, i)
        return look_up(self.term_BHQR, b, h, i, distance.clamp(-self.back, self.future) + self.back)


class T5Bias(ScoreMod, Value, frozen=True):
    """A learned number per head and one of `buckets` of distances, which widen logarithmically up to `max_distance`.

    `bidirectional` gives half of the buckets to the future (an encoder); otherwise the future has bucket 0. `shared`: one table for
    all layers, as in T5.
    Example: `Attention(Standard(8), Causal(), (T5Bias(),))`.
    """

    buckets: Size = 32
    max_distance: Size = 128
    bidirectional: bool = False
    shared: bool = False

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        exact = self.buckets // (4 if self.bidirectional else 2)  # distances with one bucket each
        if not 1 <= exact < self.max_distance:
            raise ValueError(
                f"t5_bias has {self.buckets} buckets and a max_distance of {self.max_distance}: {exact} distances have one bucket each, "
                "and that number must be at least 1 and less than max_distance; change one of the two"
            )

    def build(self, heads: int, key_width: int, value_width: int) -> ScoreModModule:
        return T5BiasModule(self, heads)


class T5BiasModule(ScoreModModule):
    grouped_keys = True

    def __init__(self, value: T5Bias, heads: int):
        super().__init__()
        self.buckets, self.max_distance, self.bidirectional = value.buckets, value.max_distance, value.bidirectional
        self.bias_RH = nn.Parameter(torch.randn(value.buckets, heads) * 0.02)

    def bucket(self, back: Tensor) -> Tensor:
        """Returns the bucket of a distance i - j."""
        half = self.buckets // 2 if self.bidirectional else self.buckets
        side = (back < 0) * half if self.bidirectional else torch.zeros_like(back)
        back = back.abs() if self.bidirectional else back.clamp(min=0)
        exact = half // 2
        ratio = (back.clamp(min=1).float() / exact).log() / math.log(self.max_distance / exact)
        distant = (exact + (ratio * (half - exact)).long()).clamp(max=half - 1)
        return side + torch.where(back < exact, back, distant)

    def bias(self, q_BHQE: Tensor, k_BHKE: Tensor, scale: float, context: Context) -> Term:
        bias_RH = self.bias_RH.to(q_BHQE.dtype)

        def term(b: Any, h: Any, i: Any, j: Any) -> Tensor:
            return bias_RH[self.bucket(context.positions.query_at(b, i) - context.positions.key_at(b, j)), h]

        return term


class ImageBias(ScoreMod, Value, frozen=True):
    """A learned number per head and 2-D offset (rows, columns) between two cells of a grid, `rows` x `columns` in raster order.

    `before` positions come before the grid (a class token); pairs with them share one learned number per head.
    Example: `Attention(Standard(8), score_mods=(ImageBias(rows=8, columns=8),))`.
    """

    rows: Size
    columns: Size
    before: Count = 0

    def build(self, heads: int, key_width: int, value_width: int) -> ScoreModModule:
        return ImageBiasModule(self, heads)


class ImageBiasModule(ScoreModModule):
    grouped_keys = True

    def __init__(self, value: ImageBias, heads: int):
        super().__init__()
        self.rows, self.columns, self.before = value.rows, value.columns, value.before
        self.bias_RH = nn.Parameter(torch.randn((2 * self.rows - 1) * (2 * self.columns - 1) + 1, heads) * 0.02)

    def _row(self, q: Tensor, k: Tensor) -> Tensor:
        cell_q, cell_k = q - self.before, k - self.before
        down = (cell_k // self.columns - cell_q // self.columns).clamp(1 - self.rows, self.rows - 1)
        right = cell_k % self.columns - cell_q % self.columns
        offset = (down + self.rows - 1) * (2 * self.columns - 1) + right + self.columns - 1
        return torch.where((cell_q < 0) | (cell_k < 0), self.bias_RH.shape[0] - 1, offset)

    def bias(self, q_BHQE: Tensor, k_BHKE: Tensor, scale: float, context: Context) -> Term:
        positions = context.positions
        last = positions.keys
        if is_exporting() and positions.queries != last:  # a graph limits each open size, not a sum of two
            last = 0
        elif context.positions.key_BK is not None:  # padding does not count
            last = int(context.positions.key_BK.max()) + 1 if can_read(context.positions.key_BK) else 0
        if last > self.before + self.rows * self.columns:
            raise ValueError(
                f"image_bias has {self.before} + {self.rows} x {self.columns} positions, but the input has {last}; "
                "make the grid larger or the input smaller"
            )
        bias_RH = self.bias_RH.to(q_BHQE.dtype)

        def term(b: Any, h: Any, i: Any, j: Any) -> Tensor:
            return bias_RH[self._row(context.positions.query_at(b, i), context.positions.key_at(b, j)), h]

        return term
