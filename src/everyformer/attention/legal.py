"""Which combinations of heads, pattern and score modifications cannot be built, and why. One reason per combination."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from everyformer.attention.four_term import FourTerm
from everyformer.attention.hashing import hashing
from everyformer.attention.pattern import ByHead, Chunked, Pattern
from everyformer.attention.projection import (
    Narrow,
    ParameterFree,
    Projection,
    Shared,
    Sliced,
    Standard,
    Sum,
    few_key_heads,
    head_width,
)
from everyformer.attention.round_counts import RoundCounts
from everyformer.attention.score_mod import ImageBias, Rotary, ScoreMod, Shaw
from everyformer.attention.softmax import Sinks, SoftCap
from everyformer.attention.span import DynamicSpan
from everyformer.value import snake


def head_reasons(width: int, heads: Projection, pattern: Pattern) -> Iterator[str]:
    """Why these heads cannot be built at this width, or not with this pattern."""
    derived = isinstance(heads, Sliced | Narrow | Sum) or (
        isinstance(heads, Standard | Shared) and not (heads.key_width and heads.value_width)
    )
    if derived:
        try:
            head_width(width, heads.heads)
        except ValueError as error:
            yield str(error)
            return
    if isinstance(heads, Standard) and heads.key_heads and heads.heads % heads.key_heads:
        yield few_key_heads(heads.heads, heads.key_heads)
        return
    if isinstance(heads, Standard) and heads.qk_norm is not None and heads.qk_norm.mixes_positions:
        yield f"{type(heads.qk_norm).__name__} mixes positions, but queries and keys are normed one by one; use RMSNorm or LayerNorm"
    for part in pattern.walk():
        if isinstance(part, ByHead) and heads.heads % len(part.patterns):
            yield (
                f"by_head assigns {len(part.patterns)} patterns to {heads.heads} heads in turn; give a number of patterns that divides "
                "the number of heads"
            )


def attention_reasons(
    width: int, heads: Projection, pattern: Pattern, score_mods: Sequence[ScoreMod], dropout: float
) -> Iterator[str]:
    """Why an attention of these parts cannot be built at this width."""
    if reasons := list(head_reasons(width, heads, pattern)):
        yield from reasons
        return
    if len(hashing(pattern)) > 1:
        yield f"the pattern {pattern} hashes the keys in two ways; use one hashed or chunked for the heads of a layer"
    if hashing(pattern) and isinstance(heads, Standard) and heads.key_heads not in (None, heads.heads):
        yield f"the pattern {pattern} hashes the keys of each head, but heads share keys; leave key_heads out"
    key_width = _key_width(width, heads)
    for score_mod in score_mods:
        if isinstance(score_mod, Rotary) and (reason := score_mod.width_reason(key_width)):
            yield reason
        if isinstance(score_mod, DynamicSpan) and score_mod.width != width:
            yield f"dynamic_span reads the input of the attention and is {score_mod.width} wide, the model {width}; make them equal"
    if any(isinstance(one, RoundCounts) for one in score_mods) and not any(
        isinstance(part, Chunked) for part in hashing(pattern)
    ):
        yield f"round_counts reads the chunks of chunked, which is not in the pattern {pattern}; leave it out"
    if sum(isinstance(score_mod, ImageBias) for score_mod in score_mods) > 1:
        yield "two image biases add the same terms twice; keep one"
    for kind in (SoftCap, Sinks):
        if sum(isinstance(score_mod, kind) for score_mod in score_mods) > 1:
            yield f"two {snake(kind.__name__)} change the same softmax; keep one"
    relative = [score_mod for score_mod in score_mods if isinstance(score_mod, FourTerm | Rotary | Shaw)]
    if len(relative) > 1 and any(isinstance(score_mod, FourTerm) for score_mod in relative):
        yield "four_term, rotary and shaw each make the product of query and key depend on the distance; keep one of them"
    if isinstance(heads, ParameterFree) and dropout:
        yield "parameter-free attention has nothing to regularise; leave its dropout out"


def position_limit(score_mods: Sequence[ScoreMod]) -> int | None:
    """The number of positions that these score modifications can handle, or None if any."""
    limits = (one.before + one.rows * one.columns for one in score_mods if isinstance(one, ImageBias))
    return min(limits, default=None)


def _key_width(width: int, heads: Projection) -> int:
    explicit = getattr(heads, "key_width", None)
    if isinstance(heads, Standard | Shared | Sliced | Narrow | Sum):
        return explicit or head_width(width, heads.heads)
    return explicit or getattr(heads, "rank", None) or width
