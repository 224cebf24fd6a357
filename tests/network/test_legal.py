"""Which combinations are refused: one row for each reason, and that following its remedy makes the reason go away."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from inspect import getsource
from typing import Any

import pytest
from msgspec.structs import replace

from everyformer import (
    Asymmetric,
    Attention,
    BatchNorm,
    Classify,
    Concatenated,
    Convolution,
    DynamicSpan,
    EncoderDecoder,
    Features,
    FeedForward,
    FourTerm,
    Halt,
    ImageBias,
    InstanceNorm,
    Language,
    Layer,
    LayerNorm,
    Learned,
    Logistics,
    Lstm,
    Masked,
    Mixed,
    Model,
    Narrow,
    ParameterFree,
    PerToken,
    PostNorm,
    PreNorm,
    Reversible,
    RMSNorm,
    Rotary,
    SequenceNorm,
    Shared,
    Sinusoidal,
    Sliced,
    Stack,
    Standard,
    Sum,
    Symmetric,
    TimePosition,
    Tokens,
    Wide,
)
from everyformer.network import legal
from tests.network import model, stack

CROSS, LANGUAGE = Attention(Standard(2)), (Language(),)
BESIDE = Concatenated(Sinusoidal(), 2)
FEATURES = Features(5)


def single(layer: Layer) -> Model:
    return Model(width=8, embed=Tokens(17), body=Stack(1, (layer,), PreNorm()))


def repeated(residual: Any, position: Any = None) -> Model:
    return replace(single(Layer(CROSS)), body=Halt(2, (Layer(CROSS),), residual, position))


def parts(position: Any) -> Mixed:
    return Mixed(((FEATURES, position), (Tokens(17), position)))


def pair(encoder: Model | None = None, decoder: Model | None = None, share: bool = False) -> EncoderDecoder:
    return EncoderDecoder(
        encoder=encoder or model("full"),
        decoder=decoder or model("causal", cross=CROSS, outputs=LANGUAGE),
        share_embedding=share,
    )


# The reason: a refused combination, and those that its remedy leads to.
def recurrent(width: int, heads: Any = (), bidirectional: bool = False) -> Model:
    return Model(width=width, embed=Tokens(9), body=stack(1, Lstm(bidirectional=bidirectional)), outputs=heads)


ROWS: list[tuple[str, Any, list[Any]]] = [
    (
        "a width of 8 does not divide into 3 heads; take for example 2 heads",
        model(form=Standard(3)),
        [model(form=Standard(2)), model(form=Standard(3, key_width=2, value_width=2))],
    ),
    (
        "by_head deals 3 patterns out to 2 heads; give a number that divides them",
        model("by_head(causal, causal & window(2), causal & window(3))"),
        [model("by_head(causal, causal & window(2))")],
    ),
    (
        "rotary turns pairs of numbers, but a head is 3 wide; make it even",
        model(form=Standard(2, key_width=3), score_mods=(Rotary(),)),
        [model(form=Standard(2, key_width=4), score_mods=(Rotary(),))],
    ),
    (
        "in the pattern chunked(2, 4, 3) positions to come decide who sees whom, so a language head would learn "
        "from the future; use hashed, or say leaks=True to have it as published",
        model("chunked(2, 4, 3)", outputs=LANGUAGE),
        [
            model("hashed(2, 4, 3)", outputs=LANGUAGE),
            model("chunked(2, 4, 3, False, True)", outputs=LANGUAGE),
            model("chunked(2, 4, 3)", outputs=(PerToken(3),)),
        ],
    ),
    (
        "the pattern hashed(2, 4, 3) | hashed(1, 4, 3) hashes the keys in two ways; give the heads of a layer one hashed or "
        "chunked",
        model("hashed(2, 4, 3) | hashed(1, 4, 3)"),
        [model("hashed(2, 4, 3) | window(2)")],
    ),
    (
        "two image biases say the same thing twice; keep one",
        model("full", score_mods=(ImageBias(2, 2), ImageBias(3, 3))),
        [model("full", score_mods=(ImageBias(2, 2),))],
    ),
    (
        "four_term, rotary and shaw each make the product of query and key one of distances; keep one of them",
        model(score_mods=(FourTerm(4), Rotary())),
        [model(score_mods=(FourTerm(4),)), model(score_mods=(Rotary(),))],
    ),
    (
        "a memory is of what came before, but the model looks ahead and reads its sequence at once; add causal &, or leave "
        "memory out",
        model("full", memory=4),
        [model(memory=4), model("full")],
    ),
    (
        "Learned ends at its last position, and with a memory a text has no end; use four_term, rotary, alibi or sinusoids",
        model(memory=4, position=Learned(8)),
        [
            model(memory=4, score_mods=(FourTerm(4),)),
            model(memory=4, position=Sinusoidal()),
            model(position=Learned(8)),
        ],
    ),
    (
        "dynamic_span reads what enters the attention and is 6 wide, the model 8; make them equal",
        model(score_mods=(DynamicSpan(6, 4),)),
        [model(score_mods=(DynamicSpan(8, 4),))],
    ),
    (
        "parameter-free attention has nothing to regularise; leave its dropout out",
        single(Layer(Attention(ParameterFree(), dropout=0.1))),
        [single(Layer(Attention(ParameterFree())))],
    ),
    (
        "a convolution to both sides sees the future, and a language head would learn to copy it; use a causal one",
        model(net=Convolution(4, causal=False), outputs=LANGUAGE),
        [model(net=Convolution(4), outputs=LANGUAGE)],
    ),
    (
        "a convolution reads across the ends of documents, and same_document promises that nothing does; use FeedForward",
        model("causal & same_document", net=Convolution(4)),
        [model("causal & same_document", net=FeedForward(4))],
    ),
    (
        "between the steps of a repeated depth there is one state, in a reversible stack two; use PostNorm or PreNorm",
        repeated(Reversible()),
        [repeated(PostNorm()), repeated(PreNorm())],
    ),
    (
        "Learned cannot be added in every step; use TimePosition or Sinusoidal, or give it to the model",
        repeated(PreNorm(), Learned(8)),
        [repeated(PreNorm(), TimePosition()), repeated(PreNorm(), Sinusoidal())],
    ),
    (
        "a layer has no sublayers; give it attention or a feed-forward net",
        single(Layer(None)),
        [single(Layer(CROSS)), single(Layer(None, FeedForward(4)))],
    ),
    (
        "rules speak of distances, and the two sequences of cross-attention share no positions; leave its rules out",
        model(cross=Attention(Standard(2), score_mods=(Rotary(),))),
        [model(cross=CROSS)],
    ),
    (
        "the pattern causal compares positions of two different sequences; use full in cross-attention",
        model(cross=Attention(Standard(2), model().body.layers[0].sublayers[0].pattern)),
        [model(cross=CROSS)],
    ),
    (
        "the pattern window(3) sees the future, or cannot be shown not to, and a language head would learn to copy it; add causal &",
        model("window(3)", outputs=LANGUAGE),
        [model("causal & window(3)", outputs=LANGUAGE)],
    ),
    (
        "the pattern full sees the future, or cannot be shown not to, and a logistics head would learn to copy it; add causal &",
        model("full", embed=Features(3), outputs=(Logistics(),)),
        [model("causal", embed=Features(3), outputs=(Logistics(),))],
    ),
    (
        "a class token stands before the text and has no next token to learn; use it with Classify",
        model(outputs=LANGUAGE, class_token=True),
        [model("full", outputs=(Classify(3, "first"),), class_token=True)],
    ),
    (
        "a class token has no segment, document or node of its own; leave it out, and read the mean",
        model("full & same_document", outputs=(Classify(3, "first"),), class_token=True),
        [
            model("full & same_document", outputs=(Classify(3),)),
            model("full", outputs=(Classify(3),), class_token=True),
        ],
    ),
    (
        "a tied language head has the embedding's vocabulary; leave its own out or give tied=False",
        model(outputs=(Language(vocabulary=5),)),
        [model(outputs=LANGUAGE), model(outputs=(Language(vocabulary=5, tied=False),))],
    ),
    (
        "a language head needs a vocabulary and the inputs are no tokens; give Language(vocabulary=..., tied=False)",
        model(embed=FEATURES, outputs=LANGUAGE),
        [model(embed=FEATURES, outputs=(Language(vocabulary=5, tied=False),))],
    ),
    (
        "a masked head predicts tokens and the inputs are none; use PerToken",
        model("full", embed=FEATURES, outputs=(Masked(),)),
        [model("full", embed=FEATURES, outputs=(PerToken(3),))],
    ),
    (
        "its weights cannot be the head's; untie it, or add the positions",
        model(position=BESIDE, outputs=LANGUAGE),
        [model(position=BESIDE, outputs=(Language(tied=False),)), model(position=Sinusoidal(), outputs=LANGUAGE)],
    ),
    (
        "its weights cannot be the head's; untie it, or add the positions",
        model("full", position=BESIDE, outputs=(Masked(),)),
        [model("full", position=Sinusoidal(), outputs=(Masked(),))],
    ),
    *(
        (
            "the first token of a causal model has seen nothing but itself; read the last one or the mean",
            model(outputs=(Classify(3, "first"),), class_token=class_token),
            [model(outputs=(Classify(3, reading),), class_token=class_token) for reading in ("last", "mean")],
        )
        for class_token in (False, True)
    ),
    *(
        (
            f"{type(norm).__name__} mixes positions, so the past would change with the future in a causal model",
            model(residual=residual(norm)),
            [
                model(residual=residual(LayerNorm())),
                model(residual=residual(RMSNorm())),
                model("full", residual=residual(norm)),
            ],
        )
        for norm in (BatchNorm(), InstanceNorm(), SequenceNorm())
        for residual in (PreNorm, PostNorm)
    ),
    (
        "a reversible stack computes every sublayer twice, and BatchNorm would count each batch twice; use LayerNorm",
        model("full", residual=Reversible(BatchNorm())),
        [model("full", residual=Reversible(norm)) for norm in (LayerNorm(), InstanceNorm())],
    ),
    (
        "every_layer needs one state after each layer, which only a Stack keeps that is not reversible; leave it out",
        model(residual=Reversible(), outputs=(Language(every_layer=True),)),
        [
            model(residual=Reversible(), outputs=(Language(ahead=1),)),
            model(residual=PreNorm(), outputs=(Language(every_layer=True),)),
        ],
    ),
    (
        "cannot be added to what enters each layer, because it takes features of its own or the stack is reversible",
        single(Layer(CROSS, position=BESIDE)),
        [single(Layer(CROSS, position=Sinusoidal())), single(Layer(CROSS, position=Learned(4)))],
    ),
    (
        "InstanceNorm of the embedding mixes positions in a causal model; use LayerNorm or RMSNorm",
        model(norm=InstanceNorm()),
        [model(norm=LayerNorm()), model(norm=RMSNorm())],
    ),
    (
        "the parts of a mixed sequence have positions of their own; give none to the model, or none to the parts",
        model("full", embed=parts(Learned(9)), position=Learned(9)),
        [model("full", embed=parts(Learned(9))), model("full", embed=parts(None), position=Learned(9))],
    ),
    (
        "each of two directions has half the width, but that is 7; make it even, or leave both_ways out",
        recurrent(7, bidirectional=True),
        [recurrent(8, bidirectional=True), recurrent(7)],
    ),
    (
        "a layer that reads both ways sees the future, and a language head would learn to copy it; leave both_ways out",
        recurrent(8, LANGUAGE, bidirectional=True),
        [recurrent(8, LANGUAGE), recurrent(8, (Classify(3),), bidirectional=True)],
    ),
    (
        "the encoder is 16 wide, the decoder 8; make them equal",
        pair(encoder=model("full", width=16)),
        [pair()],
    ),
    (
        "the encoder of a pair gives its last layer to the decoder, not logits; leave its heads out",
        pair(encoder=model("full", outputs=(Classify(3),))),
        [pair()],
    ),
    (
        "the decoder never looks at the encoder; give its layers cross-attention",
        pair(decoder=model(outputs=LANGUAGE)),
        [pair(decoder=model(outputs=LANGUAGE, cross=CROSS))],
    ),
    (
        "the encoder has cross-attention and nothing to attend to; leave it out",
        pair(encoder=model("full", cross=CROSS)),
        [pair()],
    ),
    (
        "a shared embedding needs equal embeddings on both sides; make them equal or do not share",
        pair(encoder=model("full", embed=Tokens(9)), share=True),
        [pair(share=True), pair(encoder=model("full", embed=Tokens(9)))],
    ),
]


def reasons(value: Any) -> Iterator[str]:
    return legal.illegal_pair_reasons(value) if isinstance(value, EncoderDecoder) else legal.illegal_reasons(value)


@pytest.mark.parametrize("reason, wrong, right", ROWS, ids=[reason[:50] for reason, _, _ in ROWS])
def test_a_refusal_says_why_and_its_remedy_helps(reason, wrong, right):
    assert [found for found in reasons(wrong) if reason in found]
    with pytest.raises(ValueError, match="this combination is refused") as caught:
        wrong.build()
    assert reason in str(caught.value)
    for value in right:
        assert list(reasons(value)) == []
        value.build()


def lines(value: Any) -> Iterator[int]:
    """The lines of legal.py at which the objections to a value are made."""
    generator: Any = reasons(value)
    for _ in generator:
        inner = generator
        while inner.gi_yieldfrom is not None:
            inner = inner.gi_yieldfrom
        yield inner.gi_frame.f_lineno


def test_every_reason_has_its_row():
    yields = [node for node in ast.walk(ast.parse(getsource(legal))) if isinstance(node, ast.Yield)]
    met = {line for _, wrong, _ in ROWS for line in lines(wrong)}
    missing = [node.lineno for node in yields if not met & set(range(node.lineno, (node.end_lineno or 0) + 1))]
    assert yields and not missing, f"no row meets the objections at lines {missing} of legal.py"


@pytest.mark.parametrize(
    "form, width",
    [(Wide(2), 9), (Symmetric(3), 8), (Asymmetric(3), 8), (ParameterFree(), 9)]
    + [(kind(2), 6) for kind in (Standard, Shared, Sum, Sliced, Narrow)],
)
def test_the_width_of_a_head_is_known_for_every_form(form, width):
    """What rotary needs is refused by the value as it would be by the module."""
    assert any(
        "rotary turns pairs" in reason for reason in reasons(model(form=form, width=width, score_mods=(Rotary(),)))
    )
    with pytest.raises(ValueError, match="rotary turns pairs of numbers"):
        module = form.build(width)
        Rotary().build(module.heads, module.key_width, module.value_width)


def test_all_reasons_are_told_at_once():
    wrong = model("full", outputs=LANGUAGE, class_token=True, residual=PreNorm(), form=Standard(3))
    with pytest.raises(ValueError) as caught:
        wrong.build()
    for reason in ("does not divide into 3 heads", "sees the future", "has no next token"):
        assert reason in str(caught.value)


def test_a_pair_is_refused_for_what_is_wrong_with_its_sides():
    with pytest.raises(ValueError, match="sees the future"):
        pair(decoder=model("full", cross=CROSS, outputs=LANGUAGE)).build()
    with pytest.raises(ValueError, match="does not divide into 3 heads"):
        pair(encoder=model("full", form=Standard(3))).build()
