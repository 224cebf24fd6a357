"""Layers of any sublayers: recurrent nets, convolutions and attention together, and sublayers of a user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from everyformer import (
    AblatedLstm,
    Attention,
    BatchNorm,
    Cache,
    Convolution,
    CrossAttention,
    EncoderOutput,
    FeedForward,
    FourTerm,
    Gated,
    Halt,
    Language,
    Layer,
    Lstm,
    Model,
    NoResidual,
    PonderRnn,
    PostNorm,
    PreNorm,
    Repeat,
    Reversible,
    Rotary,
    SegmentMemory,
    Sinusoidal,
    Stack,
    Standard,
    Sublayer,
    SublayerModule,
    TimePosition,
    Tokens,
    contracts,
    from_json,
    load,
    parse,
    save,
    to_json,
)
from everyformer.infer.decoder_graph import CachedCall
from everyformer.infer.traced import record
from everyformer.network.act import Mode
from everyformer.network.cache import Entry, RecurrentState
from everyformer.study.contracts import CONTRACTS
from everyformer.study.example import example
from everyformer.train.learner import set_gather
from everyformer.value import Value
from tests.network import VOCABULARY, close, randn, ready, stack, tokens


class Gate(Sublayer, Value, frozen=True):
    """A user's own pointwise sublayer: x sigmoid(W x)."""

    def build(self, width: int) -> SublayerModule:
        return GateModule(width)


class GateModule(SublayerModule):
    pointwise: ClassVar[bool] = True

    def __init__(self, width: int):
        super().__init__()
        self.map = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor, context: Any, entry: Entry | None) -> tuple[Tensor, Entry | None]:
        return x_BTD * self.map(x_BTD).sigmoid(), None


class OwnMean(Sublayer, Value, frozen=True):
    """A user's own recurrent sublayer, y_t = W mean(x_1, ..., x_t). Its state is the sum of the inputs and their number."""

    carries: ClassVar[str | None] = "recurrent state"

    def build(self, width: int) -> SublayerModule:
        return OwnMeanModule(width)

    def mixes_positions(self) -> bool:
        return True


class OwnMeanModule(SublayerModule):
    def __init__(self, width: int):
        super().__init__()
        self.map = nn.Linear(width, width)

    def new_entry(self, segment_memory: bool = False) -> Entry:
        return RecurrentState(detached=segment_memory)

    def max_distance(self) -> int | None:
        return 1

    def forward(self, x_BTD: Tensor, context: Any, entry: Any) -> tuple[Tensor, Entry | None]:
        visible_BT = context.positions.visible_BQ()
        one_BT1 = torch.ones_like(x_BTD[..., :1]) if visible_BT is None else visible_BT[..., None].to(x_BTD.dtype)
        state_BTC = torch.cat((x_BTD * one_BT1, one_BT1.expand(*x_BTD.shape[:2], 1)), dim=-1).cumsum(1)
        if entry is not None and entry.last_BC is not None:
            state_BTC = state_BTC + entry.last_BC[:, None]
        y_BTD = self.map(state_BTC[..., :-1] / state_BTC[..., -1:].clamp(min=1))
        return y_BTD, None if entry is None else entry.append(state_BTC, every_position=True)


class TokenShift(Sublayer, Value, frozen=True):
    """A user's own sublayer with a cache entry of its own, y_t = W x_(t-1)."""

    carries: ClassVar[str | None] = "previous token"

    def build(self, width: int) -> SublayerModule:
        return TokenShiftModule(width)

    def mixes_positions(self) -> bool:
        return True


@dataclass(frozen=True)
class PreviousTokens:
    grows: ClassVar[bool] = True
    tensors: tuple[Tensor, ...] = ()  # B, M, D: the last visible input up to each position

    def map(self, change: Callable[[Tensor], Tensor]) -> PreviousTokens:
        return PreviousTokens(tuple(map(change, self.tensors)))


class TokenShiftModule(SublayerModule):
    def __init__(self, width: int):
        super().__init__()
        self.map = nn.Linear(width, width)

    def new_entry(self, segment_memory: bool = False) -> Any:
        return PreviousTokens()

    def max_distance(self) -> int | None:
        return 1

    def forward(self, x_BTD: Tensor, context: Any, entry: Any) -> tuple[Tensor, Any]:
        visible_BT = context.positions.visible_BQ()
        batch, length, width = x_BTD.shape
        earlier = () if entry is None or not entry.tensors else entry.tensors
        first_B1D = earlier[0][:, -1:] if earlier and earlier[0].shape[1] else x_BTD.new_zeros(batch, 1, width)
        padded_BTD = torch.cat((first_B1D, x_BTD), dim=1)
        index_BT = torch.arange(1, length + 1).expand(batch, -1)
        if visible_BT is not None:
            index_BT = torch.where(visible_BT, index_BT, 0).cummax(1).values
        last_BTD = padded_BTD.gather(1, index_BT[..., None].expand(-1, -1, width))
        y_BTD = self.map(torch.cat((first_B1D, last_BTD[:, :-1]), dim=1))
        return y_BTD, None if entry is None else PreviousTokens((torch.cat((*earlier, last_BTD), dim=1),))


ATTENTION = Attention(Standard(2), parse("causal"), (Rotary(),))
PLAIN = Attention(Standard(2), parse("causal"))
NET, LSTM, CONVOLUTION = FeedForward(12, "gelu"), Lstm(), Convolution(8, "silu", kernels=(2, 3))
MODES: tuple[Mode, ...] = ("graves", "freeze", "t2t")


def halt(
    mode: Mode, *layers: tuple[Sublayer, ...], steps: int = 3, bias: float = -1.5, residual: Any = PostNorm()
) -> Halt:
    """Positions halt after different numbers of steps."""
    bias = bias - 3.5 if mode == "t2t" else bias
    return Halt(steps, tuple(map(Layer, layers)), residual, TimePosition(), mode, 0.3, 0.5, bias)


BODIES: dict[str, Any] = {
    "lstm then attention in a layer": stack(2, LSTM, ATTENTION, NET, residual=PreNorm()),
    "attention then lstm in a layer": stack(1, PLAIN, LSTM, residual=PostNorm()),
    "lstm and attention layers in turn": Stack(2, (Layer((LSTM,)), Layer((ATTENTION, NET))), PreNorm()),
    "ablated lstm and attention, gated": stack(1, AblatedLstm(), PLAIN, residual=Gated()),
    "ablated lstm and attention, reversible": stack(2, AblatedLstm(), ATTENTION, residual=Reversible()),
    "convolution before attention": stack(1, CONVOLUTION, ATTENTION, NET, residual=PreNorm()),
    "convolution and lstm": stack(1, CONVOLUTION, LSTM, residual=PostNorm()),
    "attention without a feed-forward net": stack(1, ATTENTION, residual=PreNorm()),
    "pondering net after attention": stack(1, PLAIN, PonderRnn(2), residual=PreNorm()),
    "lstm repeated": Repeat(2, (Layer((LSTM, NET)),), PreNorm(), TimePosition()),
    "lstm and attention layers repeated": Repeat(2, (Layer((LSTM,)), Layer((ATTENTION, NET))), PostNorm()),
    **{f"lstm halting, {mode}": halt(mode, (LSTM, NET)) for mode in MODES},
    **{f"lstm then attention halting, {mode}": halt(mode, (LSTM, PLAIN, NET)) for mode in MODES},
    "attention then lstm halting, freeze": halt("freeze", (PLAIN, LSTM)),
    "attention then convolution halting, freeze": halt("freeze", (PLAIN, CONVOLUTION)),
    "lstm and attention layers halting, freeze": halt("freeze", (LSTM,), (PLAIN, NET)),
    "own gate": stack(1, ATTENTION, Gate(), residual=PreNorm()),
    "own running mean": stack(1, OwnMean(), Gate(), residual=PreNorm()),
    "own running mean then attention": stack(1, OwnMean(), ATTENTION, NET, residual=PreNorm()),
    "own token shift then attention": stack(1, TokenShift(), ATTENTION, residual=PostNorm()),
    "own sublayers halting, freeze": halt("freeze", (PLAIN, OwnMean(), Gate())),
    "own gate halting, freeze": halt("freeze", (PLAIN, Gate())),
}
CHECKS = [name for name in CONTRACTS if name not in ("pattern", "flex", "chunks", "halting", "overfit", "prefix")]


def model(body: Any, **more: Any) -> Model:
    return Model(width=8, embed=Tokens(VOCABULARY), body=body, outputs=(Language(),), **more)


def made(body: Any, **more: Any) -> Any:
    """A network whose halting units differ between positions."""
    network = ready(model(body, **more))
    if isinstance(body, Halt):
        network.body.unit.map.weight.data *= 2
    return network


@pytest.mark.parametrize("name", BODIES)
def test_hybrids_keep_every_contract(name: str) -> None:
    network = made(BODIES[name])
    report = contracts(network, only=CHECKS, inputs=example(network.value, batch=2, length=6), name=name)
    assert report.ok, report


@pytest.mark.parametrize("name", BODIES)
def test_hybrids_are_equal_after_json_and_saving(name: str, tmp_path: Any) -> None:
    value = model(BODIES[name])
    assert from_json(to_json(value), Model) == value
    network = made(BODIES[name])
    again = load(save(network, tmp_path)).network
    assert again.value == value and torch.equal(again(tokens()).logits, network(tokens()).logits)


@pytest.mark.parametrize("segment_memory", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_after_a_reset_a_row_starts_anew_and_the_others_continue(name: str, segment_memory: bool) -> None:
    network, x_BT = made(BODIES[name]), tokens(3, 8)
    cache = network(x_BT[:, :5], cache=Cache(segment_memory=segment_memory)).cache
    y_BTD = network(x_BT[:, 5:], cache=cache.reset(torch.tensor([False, True, False]))).hidden
    close(y_BTD[[0, 2]], network(x_BT).hidden[[0, 2], 5:])
    close(y_BTD[1:2], network(x_BT[1:2, 5:]).hidden)


@pytest.mark.parametrize("sublayer", [CONVOLUTION, LSTM], ids=["convolution", "lstm"])
def test_a_long_row_continues_across_padding_and_calls_as_it_would_alone(sublayer: Sublayer) -> None:
    """Tokens keep their order: from 17 positions on torch's sort is stable only if it is told to be."""
    network, x_BT = made(stack(1, sublayer)), tokens(3, 60)
    visible_BT = torch.rand(3, 60, generator=torch.Generator().manual_seed(0)) < 0.6
    cache, pieces = Cache(), list[Tensor]()
    for piece in (slice(0, 40), slice(40, 60)):
        output = network(x_BT[:, piece], visible=visible_BT[:, piece], cache=cache)
        cache, pieces = output.cache, [*pieces, output.hidden]
    for x_T, seen_T, found_TD in zip(x_BT, visible_BT, torch.cat(pieces, dim=1), strict=True):
        close(found_TD[seen_T], network(x_T[seen_T][None]).hidden[0])


def test_a_recorded_convolution_continues_from_a_cache_of_any_length() -> None:
    calls = CachedCall(made(stack(1, CONVOLUTION)))
    with torch.no_grad():
        graph = record(calls.network, calls.decode, calls.signature(), calls.example(3, 7, 5), ()).module()
        for batch, length, earlier in ((1, 2, 3), (2, 1, 2), (2, 9, 6)):
            given = calls.example(batch, length, earlier)
            for found, wanted in zip(graph(**given), calls.decode(given), strict=True):
                close(found, wanted)


@pytest.mark.parametrize("name", [name for name in BODIES if "token shift" not in name])
@pytest.mark.parametrize("memory", [None, 3, 20])
def test_a_training_memory_is_equal_after_saving(name: str, memory: int | None) -> None:
    """In training mode a recurrent sublayer keeps its last state alone, attention the inputs of the whole memory."""
    value = None if memory is None else SegmentMemory(memory)
    network, x_BT = made(BODIES[name], memory=value, position=Sinusoidal()).train(), tokens(2, 9)
    cache = network(x_BT[:, :4], cache=Cache(segment_memory=True)).cache
    again = Cache.from_state_dict(cache.state_dict())
    assert again.length == cache.length
    one, two = (network(x_BT[:, 4:], cache=entry) for entry in (cache, again))
    assert torch.equal(one.hidden, two.hidden) and one.cache.length == two.cache.length
    if memory != 3:
        close(two.hidden, network.eval()(x_BT).hidden[:, 4:])


LAYERS: dict[
    str, tuple[tuple[Sublayer, ...], bool]
] = {  # of one layer, and whether frozen positions need their keys only
    "attention then net": ((PLAIN, NET), True),
    "attention then own gate": ((PLAIN, Gate()), True),
    "rotary attention then net": ((ATTENTION, NET), True),
    "attention of folded keys then net": ((Attention(Standard(2), parse("causal"), (FourTerm(6),)), NET), True),
    "attention then lstm": ((PLAIN, LSTM), False),
    "attention then own running mean": ((PLAIN, OwnMean()), False),
    "lstm then attention": ((LSTM, PLAIN), False),
    "convolution then attention": ((CONVOLUTION, PLAIN), False),
    "attention twice": ((PLAIN, PLAIN), False),
}


@pytest.mark.parametrize("segment_memory", [False, True])
@pytest.mark.parametrize("residual, bias", [(PostNorm(), 2.0), (PreNorm(), 20.0)], ids=["post", "pre"])
@pytest.mark.parametrize("name", LAYERS)
def test_frozen_positions_are_skipped_only_where_nothing_else_mixes_positions(
    name: str, residual: Any, bias: float, segment_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache after the shortcut equals the cache of all steps, and continuing from it equals one pass.

    States grow in pre-norm, and halting takes a larger bias.
    """
    sublayers, shortcut = LAYERS[name]
    network, x_BT = made(halt("freeze", sublayers, steps=4, bias=bias, residual=residual)), tokens(2, 7)
    assert network.body.freezes == shortcut
    calls: list[int] = []
    network.body.layers[0].register_forward_hook(lambda *_: calls.append(1))
    fast = network(x_BT[:, :4], cache=Cache(segment_memory=segment_memory)).cache
    assert (len(calls) < 4) == shortcut
    close(network(x_BT[:, 4:], cache=fast).hidden, network(x_BT).hidden[:, 4:])
    monkeypatch.setattr("everyformer.network.repeat.all_halted", lambda running_BT: False)
    slow = network(x_BT[:, :4], cache=Cache(segment_memory=segment_memory)).cache
    for one, two in zip(fast.entries, slow.entries, strict=True):
        for a, b in zip(one.tensors, two.tensors, strict=True):
            close(a, b)


def test_running_positions_are_gathered_through_an_own_pointwise_sublayer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everyformer.network.repeat.GATHER_SHARE", 1.0)
    network, x_BT, lengths = made(halt("freeze", (PLAIN, Gate()), bias=2.0)), tokens(2, 7), list[int]()
    network.body.layers[0].sublayers[1].register_forward_pre_hook(lambda _, x: lengths.append(x[0].shape[1]))
    whole = network(x_BT).hidden
    set_gather(network, True)
    close(network(x_BT).hidden, whole)
    assert min(lengths) < 7
    with pytest.raises(ValueError, match="no depth of this model"):
        set_gather(made(halt("freeze", (PLAIN, LSTM))), True)


def test_positions_are_gathered_only_where_their_norm_reads_no_others() -> None:
    for residual, gathered in ((PostNorm(), True), (NoResidual(), True), (PostNorm(BatchNorm()), False)):
        body: Any = Halt(3, (Layer((PLAIN, NET)),), residual, mode="freeze").build(8)
        assert body.freezes and body.can_gather is gathered


def test_the_parts_of_a_layer_are_computed_in_order() -> None:
    """A layer of LSTM and attention equals an LSTM layer followed by an attention layer with the same weights."""
    one = made(stack(1, LSTM, ATTENTION, residual=PreNorm()))
    two = made(Stack(2, (Layer((LSTM,)), Layer((ATTENTION,))), PreNorm()))
    two.embed.load_state_dict(one.embed.state_dict())
    two.body.stream.load_state_dict(one.body.stream.state_dict())
    for index in range(2):
        two.body.layers[index].sublayers[0].load_state_dict(one.body.layers[0].sublayers[index].state_dict())
        two.body.layers[index].residuals[0].load_state_dict(one.body.layers[0].residuals[index].state_dict())
    assert torch.equal(one(tokens()).hidden, two(tokens()).hidden)


def test_a_model_names_what_it_carries() -> None:
    names = {name: model(BODIES[name]).cache_kinds() for name in BODIES}
    assert names["lstm then attention in a layer"] == ("recurrent state", "key-value cache")
    assert names["convolution before attention"] == ("inputs of convolutions", "key-value cache")
    assert names["own token shift then attention"] == ("previous token", "key-value cache")
    memory = model(BODIES["lstm then attention in a layer"], memory=SegmentMemory(4))
    assert memory.cache_kinds() == ("segment memory of 4",)


def test_a_training_call_of_a_hybrid_cannot_be_rolled_back_into() -> None:
    network, x_BT = made(BODIES["lstm then attention in a layer"]).train(), tokens(2, 6)
    cache = network(x_BT, cache=Cache()).cache
    with pytest.raises(ValueError, match="a recurrent state is kept for the last 1 only"):
        cache.roll_back(2)


def test_the_cache_of_another_hybrid_is_refused() -> None:
    one, two = made(stack(1, LSTM, PLAIN)), made(stack(1, PLAIN, LSTM))
    cache = one(tokens(), cache=Cache()).cache
    with pytest.raises(ValueError, match="they are of other kinds: it is the cache of another model; start with Cache"):
        two(tokens(), cache=cache)
    swapped = replace(cache, entries=cache.entries[::-1])
    with pytest.raises(ValueError, match="it is the cache of another model"):
        one(tokens(), cache=swapped)
    decoder, source = made(stack(1, CrossAttention(Standard(2)), PLAIN)), EncoderOutput(randn(2, 4, 8))
    cache = decoder(tokens(), cache=Cache(), encoder_output=source).cache
    with pytest.raises(ValueError, match="the cache entry is not that of cross-attention"):
        decoder(tokens(), cache=replace(cache, entries=cache.entries[::-1]), encoder_output=source)


@pytest.mark.parametrize(
    "body, reason",
    [
        (stack(1, Lstm(bidirectional=True), PLAIN), "Lstm sees the future, and a language head would learn to copy it"),
        (stack(1, LSTM, Attention(Standard(2))), "the pattern full attends to the future"),
        (stack(1, Convolution(4, causal=False), PLAIN), "Convolution sees the future, and a language head"),
        (
            stack(1, OwnMean(), Attention(Standard(2), parse("causal & same_document"))),
            "OwnMean reads across the ends of documents, which same_document is to prevent",
        ),
        (
            Stack(2, (Layer((LSTM,)), Layer((Attention(Standard(2), parse("causal & same_document")),))), PreNorm()),
            "Lstm reads across the ends of documents, which same_document is to prevent",
        ),
        (stack(1, LSTM, Attention(Standard(3), parse("causal"))), "a width of 8 does not divide into 3 heads"),
        (Halt(2, (Layer((LSTM,)),), Reversible()), "has two streams"),
    ],
)
def test_illegal_hybrids_are_refused_with_the_reason(body: Any, reason: str) -> None:
    with pytest.raises(ValueError, match="this combination is refused") as caught:
        model(body).build()
    assert reason in str(caught.value)


def test_a_bidirectional_lstm_beside_attention_reads_its_sequence_in_one_call() -> None:
    network = ready(Model(width=8, embed=Tokens(VOCABULARY), body=stack(1, Lstm(bidirectional=True), PLAIN)))
    assert network.value.cache_kinds() == () and not network.value.body.is_causal()
    with pytest.raises(ValueError, match="needs its whole sequence in one call"):
        network(tokens(), cache=Cache())
