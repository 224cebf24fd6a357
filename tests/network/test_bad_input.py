"""Bad input: each row raises a ValueError with the value, the reason and the remedy. Nothing is broadcast silently."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch

from everyformer import (
    Alibi,
    Attention,
    Cache,
    Classify,
    Concatenated,
    CrossAttention,
    EncoderOutput,
    Features,
    FeedForward,
    Gated,
    Grid,
    Halt,
    Language,
    Layer,
    LayerNorm,
    Learned,
    Lstm,
    Mixed,
    Model,
    Nodes,
    OneHot,
    Patches,
    PerToken,
    PreNorm,
    Repeat,
    SegmentMemory,
    SideInputs,
    Sinusoidal,
    Stack,
    Standard,
    Sublayer,
    Tokens,
    Value,
    Window,
    build,
    generate,
    parse,
    sample,
)
from tests.network import model, stack, tokens

X = tokens()  # 2 sequences of 6
TRUE = torch.ones(2, 6, dtype=torch.bool)
KINDS = torch.zeros(2, 3, dtype=torch.long)


class Mutable(Sublayer, Value, frozen=False):
    scale: float


def source(length: int) -> EncoderOutput:
    return EncoderOutput(torch.zeros(2, length, 8))


NETWORKS: dict[str, Any] = {
    "state": Model(width=8, embed=Tokens(17), body=stack(1, Lstm())),
    "language": model(position=Learned(8), outputs=(Language(),)),
    "wide": model(width=16),
    "deep": model(layers=4),
    "full": model("full"),
    "graph": model("graph"),
    "documents": model("causal & same_document"),
    "segments": model("full", segments=2),
    "decoder": model(cross=CrossAttention(Standard(2))),
    "image": model("full", embed=Patches(4, 3), position=Learned(8), outputs=(Classify(3),)),
    "features": model("full", embed=Features(5)),
    "nodes": model("full", embed=Nodes(5, kinds=3)),
    "mixed": model("full", embed=Mixed(((Features(5), None), (Tokens(17), Learned(4))))),
    "class": model("full", outputs=(Classify(3, "first"),), class_token=True),
    "tokens": model("full", outputs=(PerToken(17),)),
}


@lru_cache
def net(name: str) -> Any:
    return NETWORKS[name].build().eval()


def call(name: str, *inputs: Any, **options: Any) -> Callable[[], Any]:
    return lambda: net(name)(*inputs, **options)


def after(name: str, *inputs: Any, of: str = "language", **options: Any) -> Callable[[], Any]:
    """A call that continues from a cache of six tokens."""
    return lambda: net(name)(*inputs, cache=net(of)(X, cache=Cache()).cache, **options)


def cache(change: Callable[[Cache], Any]) -> Callable[[], Any]:
    return lambda: change(net("language")(X, cache=Cache()).cache)


def generated(name: str, *arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: generate(net(name), *arguments, **options)


def built(position: Any, width: int = 9) -> Callable[[], Any]:
    return lambda: model(position=position, width=width, form=Standard(1)).build()


ROWS: list[tuple[Callable[[], Any], str]] = [
    # numbers and names of values
    (lambda: Window(-1), "window.size is -1: expected int >= 1"),
    (lambda: parse("causal & window(-3)"), "window.size is -3: expected int >= 1"),
    (lambda: Window(1.5), "window.size is 1.5: expected int, got float"),
    (lambda: Tokens("17"), "tokens.vocabulary is '17': expected int, got str"),
    (lambda: Standard(0), "standard.heads is 0: expected int >= 1"),
    (lambda: model(width=0), "model.width is 0: expected int >= 1"),
    (lambda: model(dropout=1.0), "model.dropout is 1.0: expected float < 1.0"),
    (lambda: LayerNorm(0.0), "layer_norm.eps is 0.0: expected float > 0.0"),
    (lambda: FeedForward(8, "rellu"), "feed_forward.activation is 'rellu': did you mean relu"),
    (lambda: Classify(3, "meen"), "classify.reading is 'meen': did you mean mean?"),
    (lambda: Sinusoidal("halfs"), "sinusoidal.layout is 'halfs': did you mean halves?"),
    (lambda: Attention(Standard(2), "causal"), "attention.pattern is 'causal': expected a pattern value, got str"),
    (
        lambda: Stack(2, Layer((FeedForward(8),)), PreNorm()),
        "stack.layers is one Layer, but a tuple is expected: write (Layer(...),)",
    ),
    (lambda: Stack(2, (Layer,), PreNorm()), "stack.layers is the class Layer, not a value: write Layer(...)"),
    (lambda: Layer((3,)), "layer.sublayers is (3,): expected a sublayer value, got int, at [0]"),
    (lambda: Mutable(2), "Mutable has frozen=False, but values do not change; write frozen=True"),
    (lambda: Attention(2), "attention.heads is 2: expected a projection value, got int"),
    (
        lambda: model(outputs=Language()),
        "model.outputs is one Language, but a tuple is expected: write (Language(...),)",
    ),
    (lambda: Stack(2, (), PreNorm()), "stack.layers is empty: give at least one Layer"),
    (lambda: Repeat(2, (), PreNorm()), "repeat.layers is empty: give at least one Layer"),
    (lambda: Halt(2, (), PreNorm()), "halt.layers is empty: give at least one Layer"),
    (lambda: Layer(()), "layer.sublayers is empty: give at least one sublayer, such as Attention or FeedForward"),
    (lambda: Mixed(((Tokens(17), 3),)), "expected a position value, got int, at [0][1]"),
    (lambda: Mixed(()), "mixed has no parts: give a tuple of (embed, position) pairs"),
    # widths that do not fit
    (built(Sinusoidal()), "sinusoids come in pairs, but there are 9 features; make it even"),
    (built(Grid(2, 2)), "a grid halves the features between row and column, but there are 9; make it even"),
    (built(Concatenated(OneHot(5), 4)), "one_hot of 5 positions is 5 wide; give it a width of 5, not 4"),
    (
        built(Concatenated(Sinusoidal(), 9)),
        "positions take 9 of 9 features and leave none for the token; widen the model",
    ),
    # tokens
    (
        call("language", X + 17),
        "is outside the vocabulary of 17 (0 to 16); use the tokenizer that the model was built for",
    ),
    (call("language", X * 0 - 1), "token -1 is outside the vocabulary of 17"),
    (
        call("language", X.float()),
        "tokens must be integers of the shape batch, time (int64 or int32), not torch.float32",
    ),
    (
        call("language", X.bool()),
        "tokens must be integers of the shape batch, time (int64 or int32), not torch.bool",
    ),
    (call("language", X[0]), "not torch.int64 of the shape (6,)"),
    (
        call("language", X.tolist()),
        "tokens must be integers of the shape batch, time (int64 or int32), not 'list'",
    ),
    (call("language", X[:, :0]), "tokens have the shape (2, 0): give at least one sequence of one token"),
    (call("language", X[:0]), "tokens have the shape (0, 6): give at least one sequence of one token"),
    (call("language", tokens(1, 9)), "position 8 is past the 8 positions of the model; give at most 8 tokens"),
    (call("language", X, kernel="sdap"), "no kernel is named 'sdap'; did you mean sdpa?"),
    # padding
    (
        call("language", X, visible=TRUE.float()),
        "visible is torch.float32 of the shape (2, 6): give booleans of the shape (2, 6)",
    ),
    (
        call("language", X, visible=TRUE[:1]),
        "visible is torch.bool of the shape (1, 6): give booleans of the shape (2, 6)",
    ),
    (call("language", X, visible=TRUE[:, :5]), "give booleans of the shape (2, 6), True where a token is real"),
    (call("language", X, visible=TRUE.tolist()), "visible is 'list': give booleans of the shape (2, 6)"),
    (
        call("language", X, visible=torch.tensor([[True] * 6, [False] * 6])),
        "sequence 1 of the batch is all padding; leave it out, or give it a token",
    ),
    # documents and segments
    (
        call("documents", X),
        "the pattern same_document has no documents: call the model with side_inputs=SideInputs(documents=...), one id per token",
    ),
    (
        call("documents", X, side_inputs=SideInputs(documents=X[:, :5])),
        "documents are torch.int64 of the shape (2, 5): give integers",
    ),
    (
        call("documents", X, side_inputs=SideInputs(documents=X.float())),
        "documents are torch.float32 of the shape (2, 6): give integers",
    ),
    (
        call("documents", X, side_inputs=SideInputs(documents=X.tolist())),
        "documents are 'list': give integers (int64 or int32) of the shape (2, 6)",
    ),
    (
        call("segments", X, side_inputs=SideInputs(segments=TRUE.long()[:1])),
        "segments are torch.int64 of the shape (1, 6): give integers",
    ),
    (
        call("segments", X, side_inputs=SideInputs(segments=TRUE.float())),
        "segments are torch.float32 of the shape (2, 6): give integers",
    ),
    (
        call("segments", X, side_inputs=SideInputs(segments=TRUE.long() * 2)),
        "segments go from 2 to 2, but the model has 0 to 1; build it with more",
    ),
    (
        call("language", X, side_inputs=SideInputs(segments=TRUE.long())),
        "segments are given, but the model has no segment embeddings; build it with segments=2",
    ),
    # edges
    (
        call("graph", X),
        "the pattern graph has no edges: give graph(((0, 1), ...)) or call the model with side_inputs=SideInputs(edges=...)",
    ),
    (
        call("graph", X, side_inputs=SideInputs(edges=torch.ones(6, 6))),
        "edges are torch.float32 of the shape (6, 6): give booleans of the shape N, N",
    ),
    (
        call("graph", X, side_inputs=SideInputs(edges=torch.ones(6, 7).bool())),
        "edges are torch.bool of the shape (6, 7): give booleans of the shape N, N",
    ),
    (
        call("graph", X, side_inputs=SideInputs(edges=torch.ones(6).bool())),
        "edges are torch.bool of the shape (6,): give booleans of the shape N, N",
    ),
    (
        call("graph", X, side_inputs=SideInputs(edges=torch.ones(5, 5).bool())),
        "of the shape N, N or 2, N, N, for N nodes, at least 6",
    ),
    (
        call("graph", X, side_inputs=SideInputs(edges=torch.ones(3, 6, 6).bool())),
        "edges are torch.bool of the shape (3, 6, 6): give booleans",
    ),
    # images, features, nodes, parts
    (
        call("image", torch.zeros(2, 3, 8, 9)),
        "an image of 8 x 9 does not divide into patches of 4 x 4; resize it to multiples of 4",
    ),
    (
        call("image", torch.zeros(2, 3, 9, 8)),
        "an image of 9 x 8 does not divide into patches of 4 x 4; resize it to multiples of 4",
    ),
    (
        call("image", torch.zeros(2, 1, 8, 8)),
        "images must be floats of the shape batch, 3, rows, columns, not torch.float32",
    ),
    (call("image", torch.zeros(3, 8, 8)), "images must be floats of the shape batch, 3, rows, columns"),
    (call("image", torch.zeros(2, 3, 0, 8)), "images must be floats of the shape batch, 3, rows, columns"),
    (call("image", torch.zeros(2, 3, 8, 8, dtype=torch.uint8)), "not torch.uint8 of the shape (2, 3, 8, 8)"),
    (
        call("image", torch.zeros(2, 3, 8, 8).double()),
        "the input is torch.float64, the model is torch.float32; give input.to",
    ),
    (
        call("image", torch.zeros(2, 3, 16, 16)),
        "the image has 16 tokens with the class token, but the model's positions are for 8",
    ),
    (
        call("features", torch.zeros(2, 3, 4)),
        "features must be floats of the shape batch, tokens, 5, not torch.float32",
    ),
    (
        call("features", torch.zeros(2, 3, 5).long()),
        "features must be floats of the shape batch, tokens, 5, not torch.int64",
    ),
    (call("features", torch.zeros(2, 0, 5)), "features must be floats of the shape batch, tokens, 5"),
    (call("features", torch.zeros(2, 3, 5).double()), "the input is torch.float64, the model is torch.float32"),
    (
        call("nodes", torch.zeros(2, 3, 5)),
        "nodes have 3 kinds: give (features, kinds) with kinds of the shape (2, 3), not 'NoneType'",
    ),
    (
        call("nodes", (torch.zeros(2, 3, 5), KINDS + 3)),
        "kinds of nodes are 3 to 3, but the model has 3 (0 to 2); build it with more kinds",
    ),
    (
        call("nodes", (torch.zeros(2, 3, 5), KINDS[:1])),
        "kinds of the shape (2, 3), not torch.int64 of the shape (1, 3)",
    ),
    (call("nodes", (torch.zeros(2, 3, 5), KINDS.bool())), "kinds of the shape (2, 3), not torch.bool"),
    (
        call("nodes", (torch.zeros(2, 3, 5), KINDS, KINDS)),
        "features must be floats of the shape batch, tokens, 5, not 'tuple'",
    ),
    (call("mixed", X), "a mixed sequence has 2 parts: give a tuple with one input per part"),
    (call("mixed", (torch.zeros(2, 3, 5), X)), "position 5 is past the 4 positions of the model"),
    (
        call("mixed", (torch.zeros(3, 3, 5), X[:, :4])),
        "part 0 of a mixed sequence has 3 sequences, part 1 has 2; give equal numbers",
    ),
    # the encoder output
    (call("decoder", X), "the model attends to an encoder output, but none is given; call it with encoder_output="),
    (
        call("decoder", X, encoder_output=EncoderOutput(torch.zeros(2, 3, 9))),
        "the encoder output has 2 sequences of width 9, the model's input 2 of width 8; make them equal",
    ),
    (
        call("decoder", X, encoder_output=EncoderOutput(torch.zeros(3, 3, 8))),
        "the encoder output has 3 sequences of width 8, the model's input 2 of width 8; make them equal",
    ),
    (call("decoder", X, encoder_output=EncoderOutput(torch.zeros(2, 0, 8))), "give at least one of each"),
    (
        call("decoder", X, encoder_output=EncoderOutput(torch.zeros(2, 3, 8).double())),
        "the encoder output is torch.float64, the model torch.float32; use one dtype",
    ),
    (
        call("decoder", X, encoder_output=torch.zeros(2, 3, 8)),
        "encoder_output is a Tensor: give an EncoderOutput, as encode() returns it",
    ),
    (lambda: EncoderOutput(torch.zeros(2, 3)), "an encoder output has the shape batch, time, width, not (2, 3)"),
    (
        lambda: EncoderOutput(torch.zeros(2, 3, 8), TRUE),
        "give booleans of the shape (2, 3), True where a token is real",
    ),
    # the cache
    (call("language", X, cache=True), "cache is a bool: give Cache() to start, then the last output's cache"),
    (
        call("language", X, cache=torch.zeros(2)),
        "cache is a Tensor: give Cache() to start, then the last output's cache",
    ),
    (
        call("class", X, cache=Cache()),
        "a model with a class token needs its whole sequence in one call; call it without cache=",
    ),
    (
        call("mixed", (torch.zeros(2, 3, 5), X[:, :4]), cache=Cache()),
        "a mixed sequence needs all its parts in one call; call it without cache=",
    ),
    (after("language", X), "position 11 is past the 8 positions of the model"),
    (after("language", X[:1, :1]), "the cache has 2 sequences, the input 1; reorder the cache, or start with Cache()"),
    (
        after("wide", X),
        "the cache has keys of the shape (2, 2, 6, 4) (batch, heads, positions, head width), the new keys have (2, 2, 6, 8)",
    ),
    (
        after("language", X, of="state"),
        "or they are of other kinds: it is the cache of another model; start with Cache()",
    ),
    (after("state", X), "or they are of other kinds: it is the cache of another model; start with Cache()"),
    (lambda: Cache(max_length=0), "a cache of at most 0 positions holds nothing; give 1 or more, or None"),
    (lambda: model(memory=0), "model.memory is 0"),
    (lambda: SegmentMemory(0), "segment_memory.length is 0: expected int >= 1"),
    (
        cache(lambda cache: cache.reorder(torch.tensor([], dtype=torch.long))),
        "reorder with no index leaves no sequence; stop when the last sequence has ended",
    ),
    (
        lambda: net("decoder")(
            X, cache=net("decoder")(X, cache=Cache(), encoder_output=source(4)).cache, encoder_output=source(5)
        ),
        "the cache is that of an encoder output of 4 positions, but this one has 5; start with Cache()",
    ),
    (lambda: Gated(bias=float("nan")), "gated.bias is nan: give a finite number"),
    (lambda: build("gpt2", 3), "gpt2 has no size 3; the names are"),
    (
        after("deep", X),
        "the cache has 2 entries, this model has 4, or they are of other kinds: it is the cache of another model; start with Cache()",
    ),
    (
        after("full", X, of="full"),
        "the pattern full lets cached positions attend to new ones; give the whole sequence in one call without cache=, or make",
    ),
    (
        after("documents", X, side_inputs=SideInputs(documents=X)),
        "these tokens have documents, the cache has none; give documents from the first call on",
    ),
    (
        lambda: net("documents")(
            X, cache=net("documents")(X, side_inputs=SideInputs(documents=X), cache=Cache()).cache
        ),
        "the cache has documents, these tokens have none; give documents with every call",
    ),
    (cache(lambda it: it.roll_back(7)), "cannot roll back 7 positions: the cache has 6; give 0 to 6"),
    (cache(lambda it: it.roll_back(-1)), "cannot roll back -1 positions: the cache has 6; give 0 to 6"),
    (cache(lambda it: it.roll_back(1.0)), "cannot roll back 1.0 positions: the cache has 6; give 0 to 6"),
    (cache(lambda it: it.roll_back(True)), "cannot roll back True positions: the cache has 6; give 0 to 6"),
    (cache(lambda it: it.trim(0)), "cannot trim a cache to 0 positions; keep at least 1"),
    (cache(lambda it: it.trim(2.0)), "cannot trim a cache to 2.0 positions; keep at least 1, a whole number"),
    (lambda: Cache("8"), "a cache of the length '8': start with Cache(), and continue with the last output's"),
    (lambda: net("language")(X, probe=True), "probe is a bool: give a Probe(), which records the pass"),
    (
        lambda: net("language")(X, side_inputs={"documents": X}),
        "side_inputs is a dict: give SideInputs(documents=..., edges",
    ),
    (lambda: Cache(max_length=1.5), "max_length of a cache is 1.5; give a whole number, or None to keep everything"),
    (
        lambda: model(score_mods=(Alibi(),)).build()(X, cache=net("language")(X, cache=Cache()).cache),
        "the shapes in the cache fit, but the model that made it is not equal to this one: it is the cache of another model",
    ),
    (
        lambda: net("decoder")(
            X,
            cache=net("decoder")(X, cache=Cache(), encoder_output=source(4)).cache,
            encoder_output=EncoderOutput(torch.ones(2, 4, 8)),
        ),
        "the cache has the keys of another encoder output of the same length; start with Cache() for a new source",
    ),
    (
        lambda: net("decoder")(X, cache=Cache(), encoder_output=torch.ones(2, 4, 8)),
        "encoder_output is a Tensor: give an EncoderOutput, as encode() returns it",
    ),
    (
        cache(lambda it: it.reorder(torch.tensor([0, 2]))),
        "cannot reorder by [0, 2]: the cache has 2 sequences; give 0 to 1",
    ),
    (
        cache(lambda it: it.reorder(torch.tensor([True]))),
        "reorder takes a list of indices, not torch.bool of the shape (1,)",
    ),
    # generating
    (
        generated("language", [[]], 1),
        "a prompt is empty, but the first new token needs a token before it; begin with a start token",
    ),
    (generated("language", [[99]], 1), "token 99 is outside the vocabulary of 17"),
    (generated("language", [1, 2], 1), "prompts are [1, 2]: give a list of lists of token ids, one for each prompt"),
    (generated("language", ["ab"], 1), "prompts are ['ab']: give a list of lists of token ids, one for each prompt"),
    (
        generated("language", [[1]], -1),
        "tokens is -1: give 0 tokens or more, a whole number",
    ),
    (
        generated("language", [[1]], 1, context=0),
        "context is 0: give a context of 1 or more, or leave it out",
    ),
    (generated("language", [[1]], 1, context=9), "context is 9, but the model has 8 positions; give at most 8"),
    (generated("language", [[1]], 1, temperature=-0.5), "temperature is -0.5: give 0 (the most likely token) or more"),
    (lambda: sample(torch.zeros(1, 3), float("nan")), "temperature is nan: give 0 (the most likely token) or more"),
    (
        generated("tokens", [[1]], 1),
        "the model has no Language output head to predict the next token; build it with outputs=(Language(),)",
    ),
    (
        generated("full", [[1]], 1),
        "the model has no Language output head to predict the next token; build it with outputs=(Language(),)",
    ),
    (lambda: generate(build("transformer", "tiny"), [[1]], 1), "give pair.decoder and encoder_output=pair.encode(...)"),
]


@pytest.mark.parametrize("wrong, message", ROWS, ids=[f"{n}-{message[:40]}" for n, (_, message) in enumerate(ROWS)])
def test_bad_input_is_refused_with_value_reason_and_remedy(wrong, message):
    with pytest.raises(ValueError) as caught:
        wrong()
    assert message in str(caught.value)


def test_valid_input_near_bad_input_is_accepted():
    """The least that is allowed, so that no check is too strict."""
    net("language")(tokens(2, 8))
    net("language")(X.int())
    net("language")(X[:1, :1], visible=TRUE[:1, :1])
    net("language")(tokens(2, 2), cache=net("language")(X, cache=Cache()).cache)
    net("language")(X, cache=net("language")(X, cache=Cache()).cache.roll_back(6))
    net("graph")(
        X, side_inputs=SideInputs(edges=torch.ones(9, 9).bool())
    )  # a graph may have nodes that are not in this sequence
    net("graph")(X, side_inputs=SideInputs(edges=torch.ones(1, 6, 6).bool()))
    net("graph")(
        X, side_inputs=SideInputs(edges=torch.ones(5, 5).bool()), visible=torch.tensor([[True] * 5 + [False]] * 2)
    )
    net("mixed")((torch.zeros(2, 9, 5), X[:, :4]))
    with torch.autocast("cpu", torch.bfloat16):
        net("decoder")(X, encoder_output=EncoderOutput(torch.zeros(2, 3, 8, dtype=torch.bfloat16)))
        net("features")(torch.zeros(2, 3, 5, dtype=torch.bfloat16))
    assert generate(net("language"), [[1]], 0) == [[1]]
