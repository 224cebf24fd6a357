"""Which combinations are refused, and why: pure functions over values, one reason a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from everyformer.attention.four_term import FourTerm
from everyformer.attention.hashing import hashing
from everyformer.attention.pattern import And, ByHead, Full, SameDocument, Visible
from everyformer.attention.projection import Narrow, ParameterFree, Shared, Sliced, Standard, Sum, head_width
from everyformer.attention.score_mod import ImageBias, Rotary, ScoreMod, Shaw
from everyformer.attention.span import DynamicSpan
from everyformer.network.depth import Attention, Layer, Stack
from everyformer.network.embed import Mixed, Tokens
from everyformer.network.feedforward import Convolution
from everyformer.network.halting import Halt, Repeat
from everyformer.network.norm import BatchNorm
from everyformer.network.output_head import Classify, Language, Logistics, Masked
from everyformer.network.recurrent import Recurrent
from everyformer.network.residual import Reversible

if TYPE_CHECKING:
    from everyformer.network.model import EncoderDecoder, Model


def refuse(reasons: Iterator[str]) -> None:
    """Raise a ValueError with every objection there is."""
    if found := list(reasons):
        raise ValueError("this combination is refused: " + "; ".join(found))


def illegal_reasons(value: Model) -> Iterator[str]:
    """The reasons why a model must not be built, each with a remedy."""
    layers, residual = value.body.each, value.body.residual
    for layer in layers:
        yield from _layer_reasons(value.width, layer)
    bidirectional = isinstance(value.body, Recurrent) and value.body.bidirectional
    if bidirectional and value.width % 2:
        yield f"each of two directions has half the width, but that is {value.width}; make it even, or leave both_ways out"
    for head in value.outputs:
        if isinstance(head, Language | Logistics):
            kind = type(head).__name__.lower()
            for pattern in {layer.attention.pattern for layer in layers if layer.attention}:
                if any(not getattr(part, "leaks", False) for part in pattern.walk() if not part.stable):
                    yield (
                        f"in the pattern {pattern} positions to come decide who sees whom, so a {kind} head would learn from "
                        "the future; use hashed, or say leaks=True to have it as published"
                    )
                if pattern.superset().attends_to_future(heads=_heads(layers)):
                    yield (
                        f"the pattern {pattern} sees the future, or cannot be shown not to, and a {kind} head would learn to copy it; "
                        "add causal &"
                    )
            if bidirectional:
                yield f"a layer that reads both ways sees the future, and a {kind} head would learn to copy it; leave both_ways out"
            if any(layer.spreads() for layer in layers):
                yield f"a convolution to both sides sees the future, and a {kind} head would learn to copy it; use a causal one"
            if value.class_token:
                yield "a class token stands before the text and has no next token to learn; use it with Classify"
        if isinstance(head, Language):
            if head.vocabulary and head.tied:
                yield "a tied language head has the embedding's vocabulary; leave its own out or give tied=False"
            if not head.vocabulary and not isinstance(value.embed, Tokens):
                yield "a language head needs a vocabulary and the inputs are no tokens; give Language(vocabulary=..., tied=False)"
            if head.every_layer and (not isinstance(value.body, Stack) or isinstance(residual, Reversible)):
                yield "every_layer needs one state after each layer, which only a Stack keeps that is not reversible; leave it out"
        if isinstance(head, Masked) and not isinstance(value.embed, Tokens):
            yield "a masked head predicts tokens and the inputs are none; use PerToken"
        if head.uses_table and value.position and value.position.content_width(value.width) != value.width:
            yield (
                "concatenated positions make the embedding narrower than the model, so its weights cannot be the head's; "
                "untie it, or add the positions"
            )
        if isinstance(head, Classify) and head.reading == "first" and value.body.is_causal():
            yield "the first token of a causal model has seen nothing but itself; read the last one or the mean"
    told = {part.needs for part in value.body.parts()}
    if value.class_token and (value.segments or told & {"document_BP", "edges_BNN"}):
        yield "a class token has no segment, document or node of its own; leave it out, and read the mean"
    writes = any(isinstance(head, Language | Logistics) for head in value.outputs)
    if residual.norm is not None and residual.norm.mixes_positions and (writes or value.body.is_causal()):
        yield (
            f"{type(residual.norm).__name__} mixes positions, so the past would change with the future in a causal model; "
            "use LayerNorm or RMSNorm"
        )
    if isinstance(value.body, Repeat | Halt):
        yield from _repeat_reasons(value.width, value.body)
    if isinstance(residual, Reversible) and isinstance(residual.norm, BatchNorm):
        yield "a reversible stack computes every sublayer twice, and BatchNorm would count each batch twice; use LayerNorm"
    for place in {layer.position for layer in layers if layer.position}:
        if isinstance(residual, Reversible) or place.content_width(value.width) != value.width:
            yield (
                f"{type(place).__name__} cannot be added to what enters each layer, because it takes features of its own or the "
                "stack is reversible and has two streams; give it to the model"
            )
    if value.norm is not None and value.norm.mixes_positions and (writes or value.body.is_causal()):
        yield f"{type(value.norm).__name__} of the embedding mixes positions in a causal model; use LayerNorm or RMSNorm"
    if value.memory and not value.body.is_causal():
        yield "a memory is of what came before, but the model looks ahead and reads its sequence at once; add causal &, or leave memory out"
    bounded: list[object] = [score_mod for score_mod in _score_mods(layers) if isinstance(score_mod, ImageBias)]
    places = (value.position, *(layer.position for layer in layers))
    bounded += {place for place in places if place is not None and place.limit() is not None}
    for one in bounded if value.memory else []:
        yield (
            f"{type(one).__name__} ends at its last position, and with a memory a text has no end; "
            "use four_term, rotary, alibi or sinusoids"
        )
    if value.position is not None and isinstance(value.embed, Mixed) and any(place for _, place in value.embed.parts):
        yield "the parts of a mixed sequence have positions of their own; give none to the model, or none to the parts"


def _repeat_reasons(width: int, body: Repeat | Halt) -> Iterator[str]:
    if isinstance(body.residual, Reversible):
        yield "between the steps of a repeated depth there is one state, in a reversible stack two; use PostNorm or PreNorm"
    place = body.position
    if place is not None and (place.limit() is not None or place.content_width(width) != width):
        yield f"{type(place).__name__} cannot be added in every step; use TimePosition or Sinusoidal, or give it to the model"


def _score_mods(layers: tuple[Layer, ...]) -> set[ScoreMod]:
    return {score_mod for layer in layers for one in layer.attentions() for score_mod in one.score_mods}


def _heads(layers: tuple[Layer, ...]) -> int:
    return max((one.heads.heads for layer in layers for one in layer.attentions()), default=1)


def _layer_reasons(width: int, layer: Layer) -> Iterator[str]:
    if not (layer.attention or layer.cross or layer.feedforward):
        yield "a layer has no sublayers; give it attention or a feed-forward net"
    for attention in layer.attentions():
        yield from _attention_reasons(width, attention)
    parts = [part for one in layer.attentions() for part in one.pattern.walk()]
    if isinstance(layer.feedforward, Convolution) and any(isinstance(part, SameDocument) for part in parts):
        yield "a convolution reads across the ends of documents, and same_document promises that nothing does; use FeedForward"
    if layer.cross is not None:
        if layer.cross.score_mods:
            yield "rules speak of distances, and the two sequences of cross-attention share no positions; leave its rules out"
        if not all(isinstance(part, Full | Visible | And) for part in layer.cross.pattern.walk()):
            yield f"the pattern {layer.cross.pattern} compares positions of two different sequences; use full in cross-attention"


def _attention_reasons(width: int, attention: Attention) -> Iterator[str]:
    heads = attention.heads
    derived = isinstance(heads, Sliced | Narrow | Sum) or (
        isinstance(heads, Standard | Shared) and not (heads.key_width and heads.value_width)
    )
    if derived:
        try:
            head_width(width, heads.heads)
        except ValueError as error:
            yield str(error)
            return
    for pattern in attention.pattern.walk():
        if isinstance(pattern, ByHead) and heads.heads % len(pattern.patterns):
            yield f"by_head deals {len(pattern.patterns)} patterns out to {heads.heads} heads; give a number that divides them"
    if len(hashing(attention.pattern)) > 1:
        yield f"the pattern {attention.pattern} hashes the keys in two ways; give the heads of a layer one hashed or chunked"
    key_width = _key_width(width, attention)
    for score_mod in attention.score_mods:
        if isinstance(score_mod, Rotary) and key_width % 2:
            yield f"rotary turns pairs of numbers, but a head is {key_width} wide; make it even"
        if isinstance(score_mod, DynamicSpan) and score_mod.width != width:
            yield f"dynamic_span reads what enters the attention and is {score_mod.width} wide, the model {width}; make them equal"
    if sum(isinstance(score_mod, ImageBias) for score_mod in attention.score_mods) > 1:
        yield "two image biases say the same thing twice; keep one"
    folded = [score_mod for score_mod in attention.score_mods if isinstance(score_mod, FourTerm | Rotary | Shaw)]
    if len(folded) > 1 and any(isinstance(score_mod, FourTerm) for score_mod in folded):
        yield "four_term, rotary and shaw each make the product of query and key one of distances; keep one of them"
    if isinstance(heads, ParameterFree) and attention.dropout:
        yield "parameter-free attention has nothing to regularise; leave its dropout out"


def _key_width(width: int, attention: Attention) -> int:
    heads = attention.heads
    given = getattr(heads, "key_width", None) or getattr(heads, "rank", None)
    if isinstance(heads, Standard | Shared | Sliced | Narrow | Sum):
        return getattr(heads, "key_width", None) or head_width(width, heads.heads)
    return given or width


def illegal_pair_reasons(pair: EncoderDecoder) -> Iterator[str]:
    if pair.encoder.width != pair.decoder.width:
        yield f"the encoder is {pair.encoder.width} wide, the decoder {pair.decoder.width}; make them equal"
    if pair.encoder.outputs:
        yield "the encoder of a pair gives its last layer to the decoder, not logits; leave its heads out"
    if not any(layer.cross for layer in pair.decoder.body.each):
        yield "the decoder never looks at the encoder; give its layers cross-attention"
    if any(layer.cross for layer in pair.encoder.body.each):
        yield "the encoder has cross-attention and nothing to attend to; leave it out"
    if pair.share_embedding and pair.encoder.embed != pair.decoder.embed:
        yield "a shared embedding needs equal embeddings on both sides; make them equal or do not share"
    yield from illegal_reasons(pair.encoder)
    yield from illegal_reasons(pair.decoder)
