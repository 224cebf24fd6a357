"""Which combinations are refused: one row for each reason; following the remedy removes the reason."""

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
    AuxiliaryPredictions,
    BatchNorm,
    Causal,
    Classify,
    Concatenated,
    Convolution,
    CrossAttention,
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
    Ngrams,
    ParameterFree,
    PerToken,
    PostNorm,
    Prefix,
    PreNorm,
    Repeat,
    Reversible,
    RMSNorm,
    Rotary,
    RoundCounts,
    SegmentMemory,
    SequenceNorm,
    Shared,
    Sinks,
    Sinusoidal,
    Sliced,
    SoftCap,
    Stack,
    Standard,
    Sum,
    Symmetric,
    TimePosition,
    Tokens,
    Wide,
    member,
    parse,
)
from everyformer.attention import legal as attention_legal
from everyformer.network import legal, lstm, multi_head_attention
from tests.network import model, stack

ATTENTION, CROSS, LANGUAGE = Attention(Standard(2)), CrossAttention(Standard(2)), (Language(),)
BESIDE = Concatenated(Sinusoidal(), 2)
FEATURES = Features(5)
SHORTCUT = Layer((ATTENTION,), shortcut=True)


def single(layer: Layer) -> Model:
    return Model(width=8, embed=Tokens(17), body=Stack(1, (layer,), PreNorm()))


def repeated(residual: Any, position: Any = None) -> Model:
    return replace(single(Layer((ATTENTION,))), body=Halt(2, (Layer((ATTENTION,)),), residual, position))


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


def two_prefixes(*lengths: int | None) -> Any:
    """A language model with a layer for each of these prefixes."""
    layers = tuple(Layer((Attention(Standard(2), Causal() | Prefix(length)),)) for length in lengths)
    return Model(width=8, embed=Tokens(17), body=Stack(2, layers, PreNorm()), outputs=(Language(),))


def electra(generator: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A small model with a generator."""
    value: Any = member("electra", "tiny")
    return replace(value, generator=replace(value.generator, **generator or {}), **changes)


ROWS: list[tuple[str, Any, list[Any]]] = [
    (
        "the embedding is 16 wide and the head's last layer 64, so they cannot share the table; give Masked(width=16)",
        electra(outputs=(Masked(),)),
        [electra(outputs=(Masked(width=16),))],
    ),
    (
        "a generator predicts masked tokens; give it the output head Masked",
        electra({"outputs": (PerToken(2),)}),
        [electra()],
    ),
    (
        "a generator shares the embedding of tokens, segments and positions, and its norm; make them and embed_width equal",
        electra({"segments": 1}),
        [electra(), electra({"segments": 1}, segments=1)],
    ),
    (
        "some layers have a prefix with a length and others one that the call gives; use one of the two in all layers",
        two_prefixes(None, 2),
        [two_prefixes(3, 2), two_prefixes(None, None)],
    ),
    (
        "positions take 8 of 8 features and leave none for the token; widen the model",
        model(position=Concatenated(Sinusoidal(), 8)),
        [model(position=Concatenated(Sinusoidal(), 4))],
    ),
    (
        "a width of 8 does not divide into 3 heads; take for example heads=2",
        model(form=Standard(3)),
        [model(form=Standard(2)), model(form=Standard(3, key_width=2, value_width=2))],
    ),
    (
        "a width of 8 does not divide into 3 heads; take for example heads=2",
        model(cross=CrossAttention(Standard(3))),
        [model(cross=CROSS)],
    ),
    (
        "by_head assigns 3 patterns to 2 heads in turn; give a number of patterns that divides the number of heads",
        model("by_head(causal, causal & window(2), causal & window(3))"),
        [model("by_head(causal, causal & window(2))")],
    ),
    (
        "rotary rotates pairs of features, but a head is 3 wide; make it even",
        model(form=Standard(2, key_width=3), score_mods=(Rotary(),)),
        [model(form=Standard(2, key_width=4), score_mods=(Rotary(),))],
    ),
    (
        "rotary.width is 6, but a head is 4 wide; make it 4 at most",
        model(score_mods=(Rotary(width=6),)),
        [model(score_mods=(Rotary(width=4),)), model(score_mods=(Rotary(width=2),))],
    ),
    (
        "rotary.width is 3, but rotary rotates pairs of features; make it even",
        model(score_mods=(Rotary(width=3),)),
        [model(score_mods=(Rotary(width=2),))],
    ),
    (
        "two soft_cap change the same softmax; keep one",
        model(score_mods=(SoftCap(2.0), SoftCap(3.0))),
        [model(score_mods=(SoftCap(2.0), Sinks()))],
    ),
    (
        "heads=4 cannot share key_heads=3 equally; take a divisor, for example key_heads=2",
        model(form=Standard(4, key_heads=3)),
        [model(form=Standard(4, key_heads=2)), model(form=Standard(6, 2, 2, key_heads=3))],
    ),
    (
        "SequenceNorm mixes positions, but queries and keys are normed one by one; use RMSNorm or LayerNorm",
        model(form=Standard(2, qk_norm=SequenceNorm())),
        [model(form=Standard(2, qk_norm=RMSNorm())), model(form=Standard(2, qk_norm=LayerNorm()))],
    ),
    (
        "the pattern hashed(2, 4, 2) hashes the keys of each head, but heads share keys; leave key_heads out",
        model("hashed(2, 4, 2)", form=Standard(2, key_heads=1)),
        [model("hashed(2, 4, 2)", form=Standard(2)), model("hashed(2, 4, 2)", form=Standard(2, key_heads=2))],
    ),
    (
        "in the pattern chunked(2, 4, 3) later positions decide who attends to whom, so a language head would learn "
        "from the future; use hashed, or set leaks=True to have it as published",
        model("chunked(2, 4, 3)", outputs=LANGUAGE),
        [
            model("hashed(2, 4, 3)", outputs=LANGUAGE),
            model("chunked(2, 4, 3, False, True)", outputs=LANGUAGE),
            model("chunked(2, 4, 3)", outputs=(PerToken(3),)),
        ],
    ),
    (
        "the pattern hashed(2, 4, 3) | hashed(1, 4, 3) hashes the keys in two ways; use one hashed or chunked for the "
        "heads of a layer",
        model("hashed(2, 4, 3) | hashed(1, 4, 3)"),
        [model("hashed(2, 4, 3) | window(2)")],
    ),
    (
        "round_counts reads the chunks of chunked, which is not in the pattern hashed(2, 4, 2); leave it out",
        model("hashed(2, 4, 2)", score_mods=(RoundCounts(),)),
        [model("hashed(2, 4, 2)"), model("chunked(2, 4, 2)", score_mods=(RoundCounts(),))],
    ),
    (
        "the encoder concatenates its streams, and the decoder attends to one; merge them by their mean",
        pair(model("full", residual=Reversible(merge="concatenate"))),
        [pair(model("full", residual=Reversible()))],
    ),
    (
        "two image biases add the same terms twice; keep one",
        model("full", score_mods=(ImageBias(2, 2), ImageBias(3, 3))),
        [model("full", score_mods=(ImageBias(2, 2),))],
    ),
    (
        "four_term, rotary and shaw each make the product of query and key depend on the distance; keep one of them",
        model(score_mods=(FourTerm(4), Rotary())),
        [model(score_mods=(FourTerm(4),)), model(score_mods=(Rotary(),))],
    ),
    (
        "a segment memory holds earlier positions, but the model sees later ones and needs its whole sequence in one call; "
        "add causal &, or leave memory out",
        model("full", memory=SegmentMemory(4)),
        [model(memory=SegmentMemory(4)), model("full")],
    ),
    (
        "Learned has a last position, but with a segment memory positions have no end; use four_term, rotary, alibi or sinusoids",
        model(memory=SegmentMemory(4), position=Learned(8)),
        [
            model(memory=SegmentMemory(4), score_mods=(FourTerm(4),)),
            model(memory=SegmentMemory(4), position=Sinusoidal()),
            model(position=Learned(8)),
        ],
    ),
    (
        "dynamic_span reads the input of the attention and is 6 wide, the model 8; make them equal",
        model(score_mods=(DynamicSpan(6, 4),)),
        [model(score_mods=(DynamicSpan(8, 4),))],
    ),
    (
        "parameter-free attention has nothing to regularise; leave its dropout out",
        single(Layer((Attention(ParameterFree(), dropout=0.1),))),
        [single(Layer((Attention(ParameterFree()),)))],
    ),
    (
        "Convolution sees the future, and a language head would learn to copy it; use a causal one",
        model(net=Convolution(4, causal=False), outputs=LANGUAGE),
        [model(net=Convolution(4), outputs=LANGUAGE)],
    ),
    (
        "Convolution reads across the ends of documents, which same_document is to prevent; use attention and FeedForward only",
        model("causal & same_document", net=Convolution(4)),
        [model("causal & same_document", net=FeedForward(4))],
    ),
    (
        "a reversible stack has two streams, but the steps of a repeated depth pass on one; use PostNorm or PreNorm",
        repeated(Reversible()),
        [repeated(PostNorm()), repeated(PreNorm())],
    ),
    (
        "Learned cannot be added in every step; use TimePosition or Sinusoidal, or give it to the model",
        repeated(PreNorm(), Learned(8)),
        [repeated(PreNorm(), TimePosition()), repeated(PreNorm(), Sinusoidal())],
    ),
    (
        "Lstm reads across the ends of documents, which same_document is to prevent; use attention and FeedForward only",
        single(Layer((Lstm(), Attention(Standard(2), parse("causal & same_document"))))),
        [single(Layer((Lstm(), Attention(Standard(2), parse("causal"))))), model("causal & same_document")],
    ),
    (
        "the pattern causal compares positions of two different sequences; use full in cross-attention",
        model(cross=CrossAttention(Standard(2), parse("causal"))),
        [model(cross=CROSS)],
    ),
    (
        "the pattern window(3) attends to the future, or does not state that it is causal; a language head would learn to copy it",
        model("window(3)", outputs=LANGUAGE),
        [model("causal & window(3)", outputs=LANGUAGE)],
    ),
    (
        "the pattern full attends to the future, or does not state that it is causal; a logistics head would learn to copy it",
        model("full", embed=Features(3), outputs=(Logistics(),)),
        [model("causal", embed=Features(3), outputs=(Logistics(),))],
    ),
    (
        "a class token comes before the text and has no next token to predict; use it with Classify",
        model(outputs=LANGUAGE, class_token=True),
        [model("full", outputs=(Classify(3, "first"),), class_token=True)],
    ),
    (
        "a class token has no segment, document or node; leave it out, and read the mean",
        model("full & same_document", outputs=(Classify(3, "first"),), class_token=True),
        [
            model("full & same_document", outputs=(Classify(3),)),
            model("full", outputs=(Classify(3),), class_token=True),
        ],
    ),
    (
        "a tied language head has the vocabulary of the embedding; leave its own out, or set tied=False",
        model(outputs=(Language(vocabulary=5),)),
        [model(outputs=LANGUAGE), model(outputs=(Language(vocabulary=5, tied=False),))],
    ),
    (
        "a language head needs a vocabulary and the inputs are not tokens; give Language(vocabulary=..., tied=False)",
        model(embed=FEATURES, outputs=LANGUAGE),
        [model(embed=FEATURES, outputs=(Language(vocabulary=5, tied=False),))],
    ),
    (
        "a masked head predicts tokens and the inputs are not tokens; use PerToken",
        model("full", embed=FEATURES, outputs=(Masked(),)),
        [model("full", embed=FEATURES, outputs=(PerToken(3),))],
    ),
    (
        "so its weights cannot be shared with the head; set tied=False, or add the positions",
        model(position=BESIDE, outputs=LANGUAGE),
        [model(position=BESIDE, outputs=(Language(tied=False),)), model(position=Sinusoidal(), outputs=LANGUAGE)],
    ),
    (
        "so its weights cannot be shared with the head; set tied=False, or add the positions",
        model("full", position=BESIDE, outputs=(Masked(),)),
        [model("full", position=Sinusoidal(), outputs=(Masked(),))],
    ),
    *(
        (
            "the first token of a causal model sees only itself; read the last one or the mean",
            model(outputs=(Classify(3, "first"),), class_token=class_token),
            [model(outputs=(Classify(3, reading),), class_token=class_token) for reading in ("last", "mean")],
        )
        for class_token in (False, True)
    ),
    (
        "a distilled head reads two class tokens; give the model class_token=2 and the head reading='first'",
        model("full", outputs=(Classify(3, "first", distilled=True),), class_token=True),
        [model("full", outputs=(Classify(3, "first", distilled=True),), class_token=2)],
    ),
    *(
        (
            f"{type(norm).__name__} mixes positions, so earlier outputs would change with later tokens in a causal model; use",
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
        "auxiliary.every_layer needs one output of each layer, which only a Stack has that is not reversible; set it to false",
        model(residual=Reversible(), outputs=LANGUAGE, auxiliary=AuxiliaryPredictions()),
        [
            model(residual=Reversible(), outputs=LANGUAGE, auxiliary=AuxiliaryPredictions(1, every_layer=False)),
            model(residual=PreNorm(), outputs=LANGUAGE, auxiliary=AuxiliaryPredictions()),
        ],
    ),
    (
        "auxiliary predictions are those of a language head, and the model has none; add Language()",
        model(outputs=(Classify(3, "last"),), auxiliary=AuxiliaryPredictions()),
        [model(outputs=(Classify(3, "last"),)), model(outputs=LANGUAGE, auxiliary=AuxiliaryPredictions())],
    ),
    (
        "cannot be added to the input of each layer, because it takes features of its own or the stack is reversible",
        single(Layer((ATTENTION,), position=BESIDE)),
        [single(Layer((ATTENTION,), position=Sinusoidal())), single(Layer((ATTENTION,), position=Learned(4)))],
    ),
    (
        "InstanceNorm of the embedding mixes positions, so earlier outputs would change with later tokens in a causal model",
        model(norm=InstanceNorm()),
        [model(norm=LayerNorm()), model(norm=RMSNorm())],
    ),
    (
        "the parts of a mixed sequence have positions of their own; give none to the model, or none to the parts",
        model("full", embed=parts(Learned(9)), position=Learned(9)),
        [model("full", embed=parts(Learned(9))), model("full", embed=parts(None), position=Learned(9))],
    ),
    (
        "each of two directions has half the width, but the width is 7; make it even, or leave bidirectional out",
        recurrent(7, bidirectional=True),
        [recurrent(8, bidirectional=True), recurrent(7)],
    ),
    (
        "Lstm sees the future, and a language head would learn to copy it; use a causal one",
        recurrent(8, LANGUAGE, bidirectional=True),
        [recurrent(8, LANGUAGE), recurrent(8, (Classify(3),), bidirectional=True)],
    ),
    (
        "the encoder has width 16, the decoder 8; make them equal",
        pair(encoder=model("full", width=16)),
        [pair()],
    ),
    (
        "the encoder passes its last layer to the decoder, not logits; leave its outputs out",
        pair(encoder=model("full", outputs=(Classify(3),))),
        [pair()],
    ),
    (
        "the decoder does not attend to the encoder; add CrossAttention to its layers",
        pair(decoder=model(outputs=LANGUAGE)),
        [pair(decoder=model(outputs=LANGUAGE, cross=CROSS))],
    ),
    (
        "token_values and ngrams look up tokens, and the inputs are none; use Tokens, or leave them out",
        model(net=Ngrams(), embed=Features(5)),
        [model(net=Ngrams()), model(embed=Features(5))],
    ),
    (
        "token_values and ngrams know the tokens of a call, but not of a class token or a segment memory; leave these out",
        model(net=Ngrams(), memory=SegmentMemory(4)),
        [model(net=Ngrams())],
    ),
    (
        "Ngrams reads across the ends of documents, which same_document is to prevent; use attention and FeedForward only",
        model("causal & same_document", net=Ngrams()),
        [model("causal & same_document"), model(net=Ngrams())],
    ),
    (
        "token_values has 5 tokens, the model 17; make them equal",
        model(net=Attention(Standard(2), Causal(), token_values=5)),
        [model(net=Attention(Standard(2), Causal(), token_values=17))],
    ),
    (
        "a shortcut reads the input of a Stack with one stream; leave it out of Repeat, Halt and reversible stacks",
        replace(model(), body=Repeat(2, (SHORTCUT,), PreNorm())),
        [replace(model(), body=Stack(2, (SHORTCUT,), PreNorm()))],
    ),
    (
        "the encoder has cross-attention and nothing to attend to; leave it out",
        pair(encoder=model("full", cross=CROSS)),
        [pair()],
    ),
    (
        "a shared embedding needs equal embeddings on both sides; make them equal, or set share_embedding=False",
        pair(encoder=model("full", embed=Tokens(9)), share=True),
        [pair(share=True), pair(encoder=model("full", embed=Tokens(9)))],
    ),
]


def reasons(value: Any) -> Iterator[str]:
    return legal.illegal_pair_reasons(value) if isinstance(value, EncoderDecoder) else legal.illegal_reasons(value)


@pytest.mark.parametrize("reason, wrong, right", ROWS, ids=[reason[:50] for reason, _, _ in ROWS])
def test_a_refusal_gives_the_reason_and_its_remedy_removes_it(reason, wrong, right):
    assert [found for found in reasons(wrong) if reason in found]
    with pytest.raises(ValueError, match="this combination is refused") as caught:
        wrong.build()
    assert reason in str(caught.value)
    for value in right:
        assert list(reasons(value)) == []
        value.build()


FILES = [legal, attention_legal, multi_head_attention, lstm]  # in which reasons are given


def lines(value: Any) -> Iterator[tuple[str, int]]:
    """The files and lines that give the reasons against a value."""
    models = (value.encoder, value.decoder) if isinstance(value, EncoderDecoder) else (value,)
    generators: list[Any] = [reasons(value)]
    generators += [
        attention_legal.head_reasons(one.width, sublayer.heads, sublayer.pattern)
        for one in models
        for sublayer in one.body.sublayers()
        if isinstance(sublayer, Attention)
    ]
    for generator in generators:
        for _ in generator:
            inner = generator
            while hasattr(inner.gi_yieldfrom, "gi_frame"):
                inner = inner.gi_yieldfrom
            yield inner.gi_frame.f_code.co_filename, inner.gi_frame.f_lineno


def given(module: Any) -> Iterator[tuple[str, range]]:
    """The file and lines of every reason that a module can give."""
    for function in ast.walk(ast.parse(getsource(module))):
        if isinstance(function, ast.FunctionDef) and function.name.endswith("reasons"):
            for node in ast.walk(function):
                if isinstance(node, ast.Yield):
                    yield module.__file__, range(node.lineno, (node.end_lineno or 0) + 1)


def test_every_reason_has_its_row():
    found = [reason for module in FILES for reason in given(module)]
    met = {line for _, wrong, _ in ROWS for line in lines(wrong)}
    missing = [(file, span[0]) for file, span in found if not any((file, line) in met for line in span)]
    assert len(found) > 30 and not missing, f"no row meets the reasons at {missing}"


@pytest.mark.parametrize(
    "form, width",
    [(Wide(2), 9), (Symmetric(3), 8), (Asymmetric(3), 8), (ParameterFree(), 9)]
    + [(kind(2), 6) for kind in (Standard, Shared, Sum, Sliced, Narrow)],
)
def test_the_width_of_a_head_is_known_for_every_form(form, width):
    """What rotary needs is refused by the value as it would be by the module."""
    assert any(
        "rotary rotates pairs" in reason for reason in reasons(model(form=form, width=width, score_mods=(Rotary(),)))
    )
    with pytest.raises(ValueError, match=r"rotary \w+ pairs of"):
        module = form.build(width)
        Rotary().build(module.heads, module.key_width, module.value_width)


def test_all_reasons_are_given_at_once():
    wrong = model("full", outputs=LANGUAGE, class_token=True, residual=PreNorm(), form=Standard(3))
    with pytest.raises(ValueError) as caught:
        wrong.build()
    for reason in ("does not divide into 3 heads", "to the future", "has no next token"):
        assert reason in str(caught.value)


def test_a_pair_is_refused_for_what_is_wrong_with_its_sides():
    with pytest.raises(ValueError, match="to the future"):
        pair(decoder=model("full", cross=CROSS, outputs=LANGUAGE)).build()
    with pytest.raises(ValueError, match="does not divide into 3 heads"):
        pair(encoder=model("full", form=Standard(3))).build()
