"""Which models are refused, and why: pure functions over values. Each reason names the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from everyformer.attention.prefix import prefix_of
from everyformer.network.depth import Stack
from everyformer.network.embed import Mixed, Tokens
from everyformer.network.norm import BatchNorm, Norm
from everyformer.network.output_head import Classify, Language, Logistics, Masked, OutputHead, Regress
from everyformer.network.repeat import Halt, Repeat
from everyformer.network.residual import Reversible

if TYPE_CHECKING:
    from everyformer.network.model import EncoderDecoder, Model
    from everyformer.network.position import Position


def refuse(reasons: Iterator[str]) -> None:
    """Raises ValueError with all reasons, if there are any."""
    if found := dict.fromkeys(reasons):  # the layers often have the same ones
        raise ValueError("this combination is refused: " + "; ".join(found))


def illegal_reasons(value: Model) -> Iterator[str]:
    """The reasons why a model must not be built."""
    yield from _width_reasons(value)
    for sublayer in value.body.sublayers():
        yield from sublayer.illegal_reasons(value.width)
    yield from value.body.illegal_reasons(value.width)
    for head in value.outputs:
        yield from _head_reasons(value, head)
    yield from _generator_reasons(value)
    yield from _future_reasons(value)
    yield from _norm_reasons(value)
    yield from _depth_reasons(value)
    yield from _position_reasons(value)
    yield from _memory_reasons(value)
    reads = set[str]().union(*(sublayer.reads() for sublayer in value.body.sublayers()))
    if value.class_token and (value.segments or reads & {"documents", "edges"}):
        yield "a class token has no segment, document or node; leave it out, and read the mean"
    yield from _token_reasons(value, reads)
    mixing = [one for one in value.body.sublayers() if one.mixes_positions() and not one.patterns()]
    if "documents" in reads and mixing:
        yield (
            f"{type(mixing[0]).__name__} reads across the ends of documents, which same_document is to prevent; use attention and "
            "FeedForward only"
        )


def _token_reasons(value: Model, reads: set[str]) -> Iterator[str]:
    """Why sublayers cannot read the tokens of a call, or layers the input of the stack."""
    if "tokens" in reads and not isinstance(value.embed, Tokens):
        yield "token_values and ngrams look up tokens, and the inputs are none; use Tokens, or leave them out"
    if "tokens" in reads and (value.class_token or value.memory is not None):
        yield "token_values and ngrams know the tokens of a call, but not of a class token or a segment memory; leave these out"
    sizes = {size for one in value.body.sublayers() if (size := getattr(one, "token_values", None))}
    if isinstance(value.embed, Tokens) and sizes - {value.embed.vocabulary}:
        yield f"token_values has {max(sizes)} tokens, the model {value.embed.vocabulary}; make them equal"
    plain = isinstance(value.body, Stack) and not isinstance(value.body.residual, Reversible)
    if any(layer.shortcut for layer in value.body.layers) and not plain:
        yield "a shortcut reads the input of a Stack with one stream; leave it out of Repeat, Halt and reversible stacks"


def _width_reasons(value: Model) -> Iterator[str]:
    """Why the width of the model does not suffice for its positions."""
    for position in (value.position, *(layer.position for layer in value.body.layers)):
        try:
            if position is not None:
                position.content_width(
                    (value.embed_width or value.width) if position is value.position else value.width
                )
        except ValueError as error:
            yield str(error)


def _takes_features(position: Position, width: int) -> bool:
    """Whether the embedding is narrower than the model because of these positions."""
    try:
        return position.content_width(width) != width
    except ValueError:
        return True


def _predicts_next(value: Model) -> list[OutputHead]:
    return [head for head in value.outputs if isinstance(head, Language | Logistics)]


def _future_reasons(value: Model) -> Iterator[str]:
    """A head that predicts the next token must not see it."""
    for head in _predicts_next(value):
        kind = type(head).__name__.lower()
        for pattern in dict.fromkeys(p for sublayer in value.body.sublayers() for p in sublayer.patterns()):
            if any(not getattr(part, "leaks", False) for part in pattern.walk() if not part.stable):
                yield (
                    f"in the pattern {pattern} later positions decide who attends to whom, so a {kind} head would learn from the "
                    "future; use hashed, or set leaks=True to have it as published"
                )
            allowed = prefix_of(pattern) is not None if isinstance(head, Language) else not pattern.attends_to_future()
            if pattern.superset().attends_to_future() and not allowed:
                yield (
                    f"the pattern {pattern} attends to the future, or does not state that it is causal; a {kind} head would learn to "
                    "copy it; add causal &, or write causal | prefix(8) if the first tokens are given and not predicted"
                )
        if isinstance(head, Language) and value.body.prefix() is None and not _sees_future(value):
            yield "some layers have a prefix with a length and others one that the call gives; use one of the two in all layers"
        for sublayer in dict.fromkeys(value.body.sublayers()):
            if sublayer.attends_to_future() and not sublayer.patterns():
                yield f"{type(sublayer).__name__} sees the future, and a {kind} head would learn to copy it; use a causal one"
        if value.class_token:
            yield "a class token comes before the text and has no next token to predict; use it with Classify"


def _sees_future(value: Model) -> bool:
    """Whether a sublayer has no prefix at all: another reason refuses that."""
    sublayers = list(value.body.sublayers())
    return any(prefix_of(pattern) is None for one in sublayers for pattern in one.patterns()) or any(
        one.attends_to_future() and not one.patterns() for one in sublayers
    )


def _head_reasons(value: Model, head: OutputHead) -> Iterator[str]:
    if isinstance(head, Language):
        if head.vocabulary and head.tied:
            yield "a tied language head has the vocabulary of the embedding; leave its own out, or set tied=False"
        if not head.vocabulary and not isinstance(value.embed, Tokens):
            yield "a language head needs a vocabulary and the inputs are not tokens; give Language(vocabulary=..., tied=False)"
    if isinstance(head, Masked) and not isinstance(value.embed, Tokens):
        yield "a masked head predicts tokens and the inputs are not tokens; use PerToken"
    inner = value.embed_width or value.width
    table_width = (head.width or value.output_width) if isinstance(head, Masked) else value.output_width
    if head.uses_table and table_width != inner:
        yield (
            f"the embedding is {inner} wide and the head's last layer {table_width}, so they cannot share the table; give "
            f"Masked(width={inner}), or a head with tied=False"
        )
    if head.uses_table and value.position and _takes_features(value.position, inner):
        yield (
            "concatenated positions make the embedding narrower than the model, so its weights cannot be shared with the head; "
            "set tied=False, or add the positions"
        )
    if isinstance(head, Classify | Regress) and head.reading == "first" and value.body.is_causal():
        yield "the first token of a causal model sees only itself; read the last one or the mean"
    if isinstance(head, Classify) and head.distilled and (value.class_token != 2 or head.reading != "first"):
        yield "a distilled head reads two class tokens; give the model class_token=2 and the head reading='first'"


def _generator_reasons(value: Model) -> Iterator[str]:
    """Why the model cannot share its embedding with its generator."""
    one = value.generator
    if one is None:
        return
    if not any(isinstance(head, Masked) for head in one.outputs):
        yield "a generator predicts masked tokens; give it the output head Masked"
    parts = ("embed", "segments", "position", "norm")
    inner = [model.embed_width or model.width for model in (value, one)]
    if inner[0] != inner[1] or any(getattr(value, name) != getattr(one, name) for name in parts):
        yield "a generator shares the embedding of tokens, segments and positions, and its norm; make them and embed_width equal"


def _norm_reasons(value: Model) -> Iterator[str]:
    causal = bool(_predicts_next(value)) or value.body.is_language_model()
    norms: list[tuple[Norm | None, str]] = [(value.body.residual.norm, ""), (value.norm, " of the embedding")]
    for norm, where in norms:
        if norm is not None and norm.mixes_positions and causal:
            yield (
                f"{type(norm).__name__}{where} mixes positions, so earlier outputs would change with later tokens in a causal model; "
                "use LayerNorm or RMSNorm"
            )
    if isinstance(value.body.residual, Reversible) and isinstance(value.body.residual.norm, BatchNorm):
        yield "a reversible stack computes every sublayer twice, and BatchNorm would count each batch twice; use LayerNorm"


def _depth_reasons(value: Model) -> Iterator[str]:
    body, reversible = value.body, isinstance(value.body.residual, Reversible)
    if isinstance(body, Repeat | Halt):
        if reversible:
            yield "a reversible stack has two streams, but the steps of a repeated depth pass on one; use PostNorm or PreNorm"
        position = body.position
        if position is not None and (position.limit() is not None or _takes_features(position, value.width)):
            yield (
                f"{type(position).__name__} cannot be added in every step; use TimePosition or Sinusoidal, or give it to the model"
            )
    for position in {layer.position for layer in body.layers if layer.position}:
        if reversible or _takes_features(position, value.width):
            yield (
                f"{type(position).__name__} cannot be added to the input of each layer, because it takes features of its own or the "
                "stack is reversible and has two streams; give it to the model"
            )
    if value.auxiliary is not None:
        if not any(isinstance(head, Language) for head in value.outputs):
            yield "auxiliary predictions are those of a language head, and the model has none; add Language()"
        if value.auxiliary.every_layer and (not isinstance(body, Stack) or reversible):
            yield (
                "auxiliary.every_layer needs one output of each layer, which only a Stack has that is not reversible; set it to false"
            )


def _position_reasons(value: Model) -> Iterator[str]:
    if value.position is not None and isinstance(value.embed, Mixed) and any(place for _, place in value.embed.parts):
        yield "the parts of a mixed sequence have positions of their own; give none to the model, or none to the parts"


def _memory_reasons(value: Model) -> Iterator[str]:
    if value.memory is None:
        return
    if not value.body.is_causal():
        yield (
            "a segment memory holds earlier positions, but the model sees later ones and needs its whole sequence in one call; "
            "add causal &, or leave memory out"
        )
    positions = (value.position, *(layer.position for layer in value.body.layers))
    limited: list[object] = [one for one in dict.fromkeys(positions) if one is not None and one.limit() is not None]
    limited += [one for one in value.body.sublayers() if one.position_limit() is not None]
    for one in limited:
        yield (
            f"{type(one).__name__} has a last position, but with a segment memory positions have no end; use four_term, rotary, alibi or "
            "sinusoids"
        )


def illegal_pair_reasons(pair: EncoderDecoder) -> Iterator[str]:
    """The reasons why an encoder and a decoder must not be built together."""
    if pair.encoder.width != pair.decoder.width:
        yield f"the encoder has width {pair.encoder.width}, the decoder {pair.decoder.width}; make them equal"
    if pair.encoder.output_width != pair.encoder.width:
        yield "the encoder concatenates its streams, and the decoder attends to one; merge them by their mean"
    if pair.encoder.outputs:
        yield "the encoder passes its last layer to the decoder, not logits; leave its outputs out"
    if not any("encoder_output" in sublayer.reads() for sublayer in pair.decoder.body.sublayers()):
        yield "the decoder does not attend to the encoder; add CrossAttention to its layers"
    if any("encoder_output" in sublayer.reads() for sublayer in pair.encoder.body.sublayers()):
        yield "the encoder has cross-attention and nothing to attend to; leave it out"
    if pair.share_embedding and pair.encoder.embed != pair.decoder.embed:
        yield "a shared embedding needs equal embeddings on both sides; make them equal, or set share_embedding=False"
    yield from illegal_reasons(pair.encoder)
    yield from illegal_reasons(pair.decoder)
