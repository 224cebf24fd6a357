"""The fused step equals the modules: by the operations of a CPU, and by its Triton programs, in Triton's interpreter without a GPU (see
conftest.py)."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from everyformer import (
    Alibi,
    Attention,
    Causal,
    Convolution,
    FeedForward,
    Gated,
    Hashed,
    Language,
    Layer,
    LayerNorm,
    Learned,
    LinearScaling,
    Model,
    PerToken,
    PostNorm,
    PreNorm,
    Repeat,
    RMSNorm,
    Rotary,
    Shared,
    SoftCap,
    Stack,
    Standard,
    Tokens,
)
from everyformer.attention.context import SideInputs
from everyformer.family.table import member
from everyformer.network import fused_step, step_launch
from everyformer.network.cache import Cache
from everyformer.network.fused_step import fused_reason, unserved_reason
from everyformer.network.network import Network
from everyformer.network.packed import Packed
from everyformer.network.slots import Slots
from tests.network import model, ready

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPTS = [[1, 2, 3, 4, 5], [7, 0, 0, 0, 0], [9, 8, 7, 0, 0], [3, 1, 4, 1, 0], [2, 7, 1, 8, 2]]
LENGTHS = [5, 1, 3, 4, 5]
MEMBERS = {
    "gpt2": {"vocabulary": 32},
    "byte-language": {},  # post-norm, a head with weights of its own
    "llama": {},
    "qwen3": {},  # norms of queries and keys
    "mistral": {"window": 3},
    "gemma": {"window": 3},  # two tables of slots, a norm after each sublayer
    "gemma2": {"window": 3},  # soft caps
}


def use_triton(monkeypatch) -> None:
    pytest.importorskip("triton", reason="on this system there is no Triton")
    if (
        DEVICE.type == "cpu"
    ):  # the interpreter runs programs one after the other, and slots are split among some of them
        monkeypatch.setattr(fused_step, "programs_of", lambda device: step_launch)
        monkeypatch.setattr(step_launch, "FILLED", 1)
        monkeypatch.setattr(step_launch, "HELD", 1 << 15)
        monkeypatch.setattr(step_launch, "MOST_OUTPUTS", 128)


@pytest.fixture(params=["triton", "cpu"])
def programs(request, monkeypatch):
    """What computes a step: the Triton programs, or the operations of a CPU."""
    if request.param == "triton":
        use_triton(monkeypatch)
    else:
        monkeypatch.setattr(sys.modules[__name__], "DEVICE", torch.device("cpu"))


def built(name: str, **settings: object) -> Network:
    torch.manual_seed(0)
    network = member(name, "tiny", **settings).build().eval().to(DEVICE)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    assert isinstance(network, Network)
    return network


def slots_of(network: Network, rows: int, capacity: int = 16) -> Slots:
    token_BT = torch.tensor(PROMPTS[:rows], device=DEVICE)
    visible_BT = torch.arange(5, device=DEVICE) < torch.tensor(LENGTHS[:rows], device=DEVICE)[:, None]
    side_inputs = SideInputs(prefix=torch.full((rows,), 2, device=DEVICE)) if "prefix" in network.reads else None
    cache = network(token_BT, visible=visible_BT, side_inputs=side_inputs, cache=Cache(forget=True)).cache
    return Slots.of(network, cache, capacity)


@torch.no_grad()
def check_equal(network: Network, rows: int, steps: int = 2, capacity: int = 16) -> None:
    """Takes the same steps by the programs and by the modules, and compares logits, keys and values."""
    one, two = (replace(slots_of(network, rows, capacity), fused=fused) for fused in (True, False))
    for step in range(steps):
        token_B1 = torch.tensor([[3 * row + step] for row in range(rows)], device=DEVICE)
        computed, expected = one.step(token_B1), two.step(token_B1)
        torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(one.entries, two.entries, strict=True):
        for x, y in zip(a.tensors, b.tensors, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    for x, y in zip(one.state(), two.state(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("rows", [2, 5])  # few rows, and tiles of many
@pytest.mark.parametrize("name", MEMBERS)
def test_a_fused_step_equals_the_modules(name, rows, programs):
    network = built(name, **MEMBERS[name])
    assert unserved_reason(network) is None
    check_equal(network, rows)


def test_slots_split_among_programs_equal_the_modules(monkeypatch):
    use_triton(monkeypatch)
    monkeypatch.setattr(step_launch, "split_sizes", lambda programs, slots: (4, 4))  # the last parts are empty
    for rows in (2, 5):
        check_equal(built("mistral", layers=1, window=3), rows)


EVERY = ("relu", "gelu", "gelu_tanh", "gelu_sigmoid", "silu", "relu_squared")
PATTERNS = ("causal & (block(4) | summary(4, 1))", "by_head(causal & window(2), causal & stride(2))", "causal | prefix")
FORMS = (Standard(2, bias=True, key_width=3, value_width=5), Standard(2, qk_norm=LayerNorm()), Standard(2, scale=0.3))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("number", range(6))
def test_every_activation_and_more_patterns_and_heads(number, rows, programs):
    """One model for each activation, plain and gated, with other patterns, heads, rotations and residuals in turn."""
    net = FeedForward(12, EVERY[number], gated=number % 2 == 1, bias=number % 3 > 0)
    rotary = (Rotary(width=2, layout="halves"), Rotary(scaling=LinearScaling(2.0)), Rotary())[number % 3]
    form = FORMS[number % 3]
    score_mods = () if form.key_width else (rotary, SoftCap(3.0))
    residual = (PreNorm(RMSNorm(unit_offset=True)), PostNorm(), PreNorm(LayerNorm(bias=False), final_norm=False))[
        number % 3
    ]
    head = Language(tied=number % 2 == 0, scaled=number % 2 == 0, soft_cap=2.0 if number > 3 else None, bias=True)
    value = model(PATTERNS[number % 3], form=form, net=net, score_mods=score_mods, residual=residual, outputs=(head,))
    network = ready(value).float().to(DEVICE)
    assert unserved_reason(network) is None
    check_equal(network, rows)


def test_other_heads_are_those_of_their_modules(programs):
    check_equal(ready(model(outputs=(Language(), PerToken(3)))).float().to(DEVICE), 2)


HEAD = (Language(),)
NET = FeedForward(8)
REFUSED = {
    "a body of Repeat": {"body": Repeat(2, (Layer((Attention(Standard(2), Causal()), NET)),), PreNorm())},
    "positions of their own": {"body": Stack(1, (Layer((NET,), position=Learned(8)),), PreNorm())},
    "layers have shortcuts": {"body": Stack(1, (Layer((NET,), shortcut=True),), PreNorm())},
    "layers read tokens": {"body": Stack(1, (Layer((Attention(Standard(2), Causal(), token_values=8),)),), PreNorm())},
    "Convolution has no program": {"net": Convolution(8)},
    "the residual Gated has no program": {"residual": Gated()},
    "two hidden layers": {"net": FeedForward(12, hidden_layers=2)},
    "the score modification Alibi": {"score_mods": (Alibi(),)},
    "the projection Shared": {"form": Shared(2)},
    "layers read hashes": {"pattern": Hashed(1, 2, 4)},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_has_no_program_is_refused_by_name(reason):
    choices = REFUSED[reason]
    sizes = {"width": 8, "embed": Tokens(8), "outputs": HEAD}
    value = Model(**sizes, **choices) if "body" in choices else model(outputs=HEAD, **choices)
    assert reason in (unserved_reason(ready(value).float()) or "")


def test_float64_and_hooks_are_refused():
    assert "float64" in (unserved_reason(ready(model(outputs=HEAD))) or "")
    network = ready(model(outputs=HEAD)).float()
    network.body.layers[0].register_forward_hook(lambda *_: None)
    assert "hook" in (unserved_reason(network) or "")


def test_a_query_without_keys_has_the_output_zero(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", torch.device("cpu"))
    pattern = (
        "causal & ~window(1) & stride(2)"  # the first query has no key, nor has any that is not at an even distance
    )
    check_equal(ready(model(pattern, outputs=HEAD)).float(), 2)


def test_packed_weights_compute_the_same_step(monkeypatch):
    monkeypatch.setattr("everyformer.network.packed.SMALL", 0)
    monkeypatch.setattr("everyformer.network.packed.on_intel", lambda: False)
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", torch.device("cpu"))
    for activation in EVERY:
        network = ready(model(net=FeedForward(12, activation), outputs=HEAD)).float()
        with Packed(network).used():
            check_equal(network, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cpu_fuses_float32_alone(dtype):
    network = ready(model(outputs=HEAD)).float()
    assert fused_reason(network) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast is on" in (fused_reason(network) or "")
    reason = fused_reason(network.to(dtype)) or ""
    assert "only models in float32 are fused" in reason and str(dtype) in reason
