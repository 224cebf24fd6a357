"""The defaults of the parts, their weights at initialization, and the limits of their fields.

A default is part of every saved model and of the papers' numbers, so a change of one is a decision and not an accident.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch

import everyformer
from everyformer import (
    Attention,
    Axial,
    Causal,
    Chunked,
    Convolution,
    DynamicSpan,
    FeedForward,
    FourTerm,
    Grid,
    Halt,
    Hashed,
    ImageBias,
    Layer,
    LayerNorm,
    Lstm,
    Mixed,
    Rotary,
    Shaw,
    Standard,
    T5Bias,
)
from everyformer.attention.attend import attend
from everyformer.attention.context import Call, Probe
from everyformer.attention.legal import head_reasons, position_limit
from everyformer.network.cache import KVCache
from everyformer.network.sublayer import SublayerModule
from everyformer.value import Value

DEFAULTS: dict[str, dict[str, Any]] = {
    "Summary": {"skip": 0},
    "Graph": {"edges": None},
    "Chunked": {"bidirectional": False, "leaks": False},
    "Rotary": {"base": 10000.0, "layout": "interleaved", "scaling": None, "width": None},
    "Shaw": {"max_distance": 16, "values": False, "future": True, "shared": False},
    "T5Bias": {"buckets": 32, "max_distance": 128, "bidirectional": False, "shared": False},
    "ImageBias": {"before": 0},
    "FourTerm": {"max_distance": None},
    "Span": {"ramp": 32, "cost": 5e-07, "start": 0.0},
    "DynamicSpan": {"ramp": 32, "cost": 5e-07, "start": 0.1},
    "Standard": {
        "key_width": None,
        "value_width": None,
        "bias": False,
        "merge_bias": True,
        "key_heads": None,
        "qk_norm": None,
        "scale": None,
    },
    "Shared": {"key_width": None, "value_width": None, "bias": False, "merge_bias": False},
    "Sum": {"rank": None},
    "Tokens": {"scaled": False},
    "Patches": {"channels": 3},
    "Features": {"std": None},
    "Nodes": {"kinds": 0},
    "Sinusoidal": {"layout": "interleaved", "base": 10000.0},
    "Grid": {"learned": False, "block": None},
    "LayerNorm": {"eps": 1e-05, "bias": True},
    "RMSNorm": {"eps": 1e-06, "unit_offset": False},
    "BatchNorm": {"eps": 1e-05, "momentum": 0.1},
    "InstanceNorm": {"eps": 1e-05},
    "SequenceNorm": {"eps": 1e-05},
    "Attention": {"pattern": everyformer.Full(), "score_mods": (), "dropout": 0.0, "token_values": None},
    "CrossAttention": {"pattern": everyformer.Full(), "dropout": 0.0},
    "Ngrams": {"orders": (2, 3), "rows": 65536, "features": 128},
    "FeedForward": {
        "activation": "relu",
        "gated": False,
        "hidden_layers": 1,
        "chunk": None,
        "dropout": 0.0,
        "bias": True,
    },
    "Convolution": {"activation": "relu", "kernels": (3, 5), "causal": True, "dropout": 0.0},
    "Lstm": {"activation": "tanh", "bias": True, "bidirectional": False, "forget": True},
    "AblatedLstm": {"activation": "tanh", "bias": True, "bidirectional": False},
    "PonderRnn": {"cell": "lstm", "epsilon": 0.01, "cost": 0.01, "bias": 1.0},
    "PostNorm": {"norm": LayerNorm(1e-05, True), "dropout": 0.0},
    "PreNorm": {"norm": LayerNorm(1e-05, True), "dropout": 0.0, "final_norm": True},
    "Gated": {"gate": "gru", "norm": LayerNorm(1e-05, True), "dropout": 0.0, "bias": None, "final_norm": False},
    "Reversible": {"norm": LayerNorm(1e-05, True), "dropout": 0.0, "final_norm": True, "merge": "mean"},
    "NoResidual": {"dropout": 0.0},
    "Layer": {"position": None, "shortcut": False},
    "Repeat": {"position": None},
    "Halt": {"position": None, "mode": "graves", "epsilon": 0.01, "cost": 0.01, "bias": 1.0},
    "Language": {"tied": True, "bias": False, "vocabulary": None, "scaled": False, "soft_cap": None},
    "Masked": {"eps": 1e-12, "activation": "gelu", "width": None},
    "Classify": {
        "reading": "mean",
        "pooler": False,
        "dropout": 0.0,
        "pooler_activation": "tanh",
        "bias": True,
        "distilled": False,
    },
    "Regress": {
        "numbers": 1,
        "reading": "mean",
        "pooler": False,
        "dropout": 0.0,
        "pooler_activation": "tanh",
        "bias": True,
    },
    "Logistics": {"channels": 3, "levels": 256, "components": 10},
    "Normal": {"std": 0.02, "by_depth": False, "by_width": False, "reference": 768, "zero_ends": False},
    "AuxiliaryPredictions": {"extra_targets": 1, "every_layer": True},
    "EncoderDecoder": {"share_embedding": False},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_those_of_saved_models(name):
    kind: type[Value] = getattr(everyformer, name)
    fields = [field for field in msgspec.structs.fields(kind) if field.default is not msgspec.NODEFAULT]
    assert {field.name: field.default for field in fields} == DEFAULTS[name]


@pytest.mark.parametrize(
    "build, std",
    [
        (lambda: Convolution(400, kernels=(9, 4)).build(400).first_ND, (3 * 9) ** -0.5),
        (lambda: Convolution(400, kernels=(9, 4)).build(400).second_NF, (3 * 4) ** -0.5),
        (lambda: Shaw(400, values=True).build(4, 16, 25).key_RE, 16**-0.5),
        (lambda: Shaw(400, values=True).build(4, 16, 25).value_RE, 25**-0.5),
        (lambda: T5Bias(512, 1024).build(16, 4, 4).bias_RH, 0.02),
        (lambda: ImageBias(20, 20).build(8, 4, 4).bias_RH, 0.02),
        (lambda: DynamicSpan(64, 1000).build(8, 4, 4).v_HD, 0.02),
        (lambda: Mixed(((everyformer.Features(1), None),) * 5).build(200).kind_ND, 0.02),
    ],
)
def test_weights_have_their_size_at_initialization(build, std):
    """The standard deviation; a uniform distribution between -a and a has a / sqrt(3)."""
    torch.manual_seed(0)
    weight = build()
    assert weight.std().item() == pytest.approx(std, rel=0.1) and abs(weight.mean().item()) < 0.1 * std


@pytest.mark.parametrize("start", [0.1, 0.8])
def test_dynamic_spans_start_at_their_share_of_the_longest(start):
    module = DynamicSpan(8, 100, start=start).build(2, 4, 4)
    with torch.no_grad():
        assert 100 * module.b_H.sigmoid() == pytest.approx(torch.full((2,), 100 * start).tolist())


@pytest.mark.parametrize(
    "make, field",
    [
        (lambda: Grid(0, 3), "grid.rows"),
        (lambda: Axial((4, 0)), "axial.sizes"),
        (lambda: Hashed(0, 2, 3), "hashed.rounds"),
        (lambda: Chunked(1, 2, 0), "chunked.chunk"),
        (lambda: T5Bias(8, 0), "t5_bias.max_distance"),
        (lambda: FourTerm(-2), "four_term.width"),
        (lambda: Layer(FeedForward(4)), "layer.sublayers"),
        (lambda: Halt(2, (Layer((FeedForward(4),)),), everyformer.PostNorm(), epsilon=1.0), "halt.epsilon"),
        (lambda: Halt(2, (Layer((FeedForward(4),)),), everyformer.PostNorm(), epsilon=0.0), "halt.epsilon"),
    ],
)
def test_a_field_out_of_its_range_is_refused_by_name(make, field):
    with pytest.raises(ValueError, match=f"^{field} is "):
        make()


def test_a_head_needs_a_width_unless_both_of_its_widths_are_given():
    """Three heads do not divide a width of 10."""
    assert list(head_reasons(10, Standard(3), Causal())) and list(head_reasons(10, Standard(3, key_width=4), Causal()))
    assert not list(head_reasons(10, Standard(3, key_width=4, value_width=5), Causal()))
    module = Standard(3, key_width=4, value_width=5).build(10)
    assert (module.key_width, module.value_width) == (4, 5)
    module = Standard(2, key_width=3).build(10)
    assert (module.key_width, module.value_width) == (3, 5)
    module = everyformer.Shared(2, value_width=3).build(10)
    assert (module.key_width, module.value_width) == (5, 3)
    assert position_limit((ImageBias(2, 3, before=1), Rotary())) == 7 and position_limit((Rotary(),)) is None


def test_flags_of_sublayers_say_what_they_can_do():
    assert (SublayerModule.pointwise, SublayerModule.updates, SublayerModule.gathers) == (False, False, False)
    assert FeedForward(4).build(4).pointwise and everyformer.CrossAttention(Standard(2)).build(4).pointwise
    assert not Attention(Standard(2)).build(4).pointwise
    assert Attention(Standard(2)).build(4).gathers and Attention(Standard(2)).build(4).updates
    assert not Attention(Standard(2), Causal(), (Rotary(),)).build(4).gathers
    assert not Attention(everyformer.Shared(2), Hashed(1, 2, 3)).build(4).gathers
    assert Attention(Standard(2)).build(4).new_entry(True).detached  # no gradient goes into a segment memory
    assert isinstance(Attention(Standard(2)).build(4).new_entry(), KVCache)
    assert not Lstm().build(4).new_entry().detached and Lstm().build(4).new_entry(True).detached
    assert not Convolution(4).build(4).new_entry().detached and Convolution(4).build(4).new_entry(True).detached
    assert Probe().records_layers is False and Call.of("auto", None).layer_outputs is None


def test_two_directions_need_an_even_width():
    assert not list(Lstm(bidirectional=True).illegal_reasons(4)) and list(Lstm(bidirectional=True).illegal_reasons(3))
    assert not list(Lstm().illegal_reasons(3))


def test_attention_scales_by_the_root_of_the_key_width_unless_a_scale_is_given():
    q, k, v = (torch.randn(1, 1, 5, 9, generator=torch.Generator().manual_seed(n)) for n in range(3))
    assert torch.allclose(attend(q, k, v, Causal()), attend(q, k, v, Causal(), scale=1 / math.sqrt(9)))
