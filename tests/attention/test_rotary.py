"""Rotary positions: both layouts, partial width and scaled frequencies, against the equation and transformers' tables."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from everyformer.attention.context import Context
from everyformer.attention.rotary import (
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    RotaryScaling,
    YarnScaling,
    plain_frequencies,
    sin_cos,
)
from everyformer.attention.score_mod import Rotary
from everyformer.network.cache import Cache
from tests.network import close, model, ready, tokens
from tests.spec import score_mods as spec

CPU = torch.device("cpu")
LONG: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 512}
# Our scaling, and the same as transformers' config says it.
SCALINGS: dict[str, tuple[RotaryScaling | None, dict[str, Any]]] = {
    "default": (None, {"rope_type": "default"}),
    "linear": (LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        Llama3Scaling(8.0, context=512),
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | LONG | {"factor": 8.0},
    ),
    "yarn": (YarnScaling(4.0, context=512), {"rope_type": "yarn"} | LONG),
    "yarn, all set": (
        YarnScaling(4.0, 512, fast=16.0, slow=2.0, attention=1.3, truncate=False),
        {"rope_type": "yarn", "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False} | LONG,
    ),
    "partial": (YarnScaling(4.0, context=512), {"rope_type": "yarn", "partial_rotary_factor": 0.5} | LONG),
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_the_tables_are_those_of_transformers(name, base):
    scaling, theirs = SCALINGS[name]
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=1,
        max_position_embeddings=2048,
        rope_parameters=theirs | {"rope_theta": base},
    )
    position_BT = torch.arange(0, 600, 7)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float64), position_BT)
    width = 32 if name == "partial" else 64
    module: Any = Rotary(base, "halves", width, scaling).build(1, 64, 64)
    context = Context.of(1, position_BT.shape[1], CPU, key_BK=position_BT)
    our_sin, our_cos = module._sin_cos(context, "keys", torch.float64)
    for ours, table in ((our_cos, cos), (our_sin, sin)):  # theirs are float32: an angle of 600 is wrong by 600 / 2^24
        torch.testing.assert_close(torch.cat((ours, ours), dim=-1)[0], table.double(), rtol=0, atol=5e-5)


@pytest.mark.parametrize("width, base", [(16, 10000.0), (64, 500000.0), (16, 10.0)])
def test_scaled_frequencies_are_their_equations(width, base):
    cases = {
        NtkScaling(5.0): spec.ntk_frequencies(width, base, 5.0),
        Llama3Scaling(8.0): spec.llama3_frequencies(width, base, 8.0, 1.0, 4.0, 8192),  # those of Llama 3.1
        Llama3Scaling(8.0, 1.0, 4.0, 512): spec.llama3_frequencies(width, base, 8.0, 1.0, 4.0, 512),
        Llama3Scaling(3.0, 0.5, 16.0, 2048): spec.llama3_frequencies(width, base, 3.0, 0.5, 16.0, 2048),
        YarnScaling(4.0, 512): spec.yarn_frequencies(width, base, 4.0, 512, 32.0, 1.0),
        YarnScaling(16.0, 4096, fast=16.0, slow=2.0): spec.yarn_frequencies(width, base, 16.0, 4096, 16.0, 2.0),
        YarnScaling(16.0, 4096, fast=200.0, slow=0.5): spec.yarn_frequencies(width, base, 16.0, 4096, 200.0, 0.5),
    }
    for scaling, expected in cases.items():
        close(scaling.frequencies(width, base, CPU), torch.tensor(expected, dtype=torch.float64))


def test_yarn_with_both_ends_at_one_pair_divides_the_frequencies_after_it():
    """Within a thousandth of a pair, as in the published code."""
    plain = plain_frequencies(8, 10.0, CPU)
    for pair, share in ((2.0, 0.0), (1.9995, 0.5), (1.999, 1.0)):  # of the interpolation at pair 2
        turns = 512 / (2 * math.pi) * 10.0 ** (-2 * pair / 8)
        scaled = YarnScaling(4.0, 512, fast=turns, slow=turns, truncate=False).frequencies(8, 10.0, CPU)
        torch.testing.assert_close(scaled / plain, torch.tensor([1, 1, 1 - 0.75 * share, 0.25], dtype=torch.float64))


def test_ntk_keeps_the_first_frequency_and_divides_the_last_by_the_factor():
    plain, scaled = (f(16, 10000.0, CPU) for f in (plain_frequencies, NtkScaling(5.0).frequencies))
    assert scaled[0] == plain[0] == 1.0
    torch.testing.assert_close(scaled[-1], plain[-1] / 5)
    ratio = scaled / plain
    assert (ratio[1:] < ratio[:-1]).all()
    assert torch.equal(NtkScaling(5.0).frequencies(2, 10000.0, CPU), torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("scaling", [None, LinearScaling(3.0), YarnScaling(4.0, context=16, fast=2.0, slow=0.5)])
@pytest.mark.parametrize("width", [2, 6, 8, None])
def test_halves_are_the_published_code(width, scaling):
    q, k = (torch.randn(2, heads, 5, 8, dtype=torch.float64) for heads in (4, 2))
    value = Rotary(50.0, "halves", width, scaling)
    rotated = value.build(4, 8, 8).transform(q, k, Context.of(5, 5, CPU))
    size = width or 8
    plain = [50.0 ** (-2 * m / size) for m in range(size // 2)]
    frequencies, factor = plain, 1.0
    if isinstance(scaling, LinearScaling):
        frequencies = [f / 3 for f in plain]
    if isinstance(scaling, YarnScaling):
        frequencies, factor = scaling.frequencies(size, 50.0, CPU).tolist(), 0.1 * math.log(4) + 1
    for x, y in zip((q, k), rotated, strict=True):
        for b in range(2):
            for h in range(x.shape[1]):
                for i in range(5):
                    close(y[b, h, i], spec.rotate_halves(x[b, h, i], i, frequencies, factor))


def test_the_layouts_are_permutations_of_each_other():
    q, k = (torch.randn(1, 2, 7, 8, dtype=torch.float64) for _ in range(2))
    order, context = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]), Context.of(7, 7, CPU)
    interleaved = Rotary(50.0).build(2, 8, 8).transform(q, k, context)
    halves = Rotary(50.0, "halves").build(2, 8, 8).transform(q[..., order], k[..., order], context)
    for one, two in zip(interleaved, halves, strict=True):
        close(one[..., order], two)


def test_angles_of_far_positions_are_exact():
    sin, _ = sin_cos(torch.tensor([[100_000]]), 4, 10000.0, torch.float64)
    assert sin[0, 0, 0, 1].item() == pytest.approx(math.sin(1000.0), abs=1e-12)


def test_a_cache_is_exact_with_scaled_partial_halves():
    network = ready(model(score_mods=(Rotary(50.0, "halves", 2, YarnScaling(4.0, 4)),)))
    x_BT, cache, found = tokens(3, 10), Cache(), []
    for piece in x_BT.split([4, 1, 5], dim=1):
        output = network(piece, cache=cache)
        cache = output.cache
        found.append(output.hidden)
    close(torch.cat(found, dim=1), network(x_BT).hidden)


def test_a_scaled_base_must_be_above_one():
    with pytest.raises(
        ValueError, match=r"rotary.base is 1.0, but scaling lowers frequencies that fall; give a base above 1"
    ):
        Rotary(1.0, scaling=LinearScaling(2.0))
    assert Rotary(1.5, scaling=LinearScaling(2.0)).base == 1.5 and Rotary(1.0).base == 1.0


def test_low_must_be_less_than_high():
    with pytest.raises(
        ValueError, match=r"llama3_scaling.low is 4.0 and high is 4.0; give a low that is less than high"
    ):
        Llama3Scaling(8.0, low=4.0)
    with pytest.raises(ValueError, match=r"^llama3_scaling.factor is -8.0"):
        Llama3Scaling(-8.0)


@pytest.mark.parametrize(
    ("factor", "wanted"), [(0.5, 1.0), (1.0, 1.0), (1.5, 0.1 * math.log(1.5) + 1), (4.0, 0.1 * math.log(4) + 1)]
)
def test_yarn_scales_the_attention_by_the_logarithm_of_its_factor(factor, wanted):
    assert YarnScaling(factor, 64).attention_factor() == pytest.approx(wanted)
    assert YarnScaling(factor, 64, attention=1.3).attention_factor() == 1.3


@pytest.mark.parametrize("scaling", [None, LinearScaling(2.0)], ids=["plain", "scaled"])
def test_a_compiled_model_computes_its_angles_once_for_all_layers(scaling):
    """Otherwise Inductor computes the sines and cosines, in float64, for each number that is rotated, in every layer."""
    network, graphs = ready(model(score_mods=(Rotary(scaling=scaling),))), list[str]()

    def collect(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    close(torch.compile(network, backend=collect, fullgraph=True)(tokens(2, 6)).hidden, network(tokens(2, 6)).hidden)
    assert graphs[0].count("everyformer.angles") == 2  # of queries and of keys
    assert "sin(" not in graphs[0]


def test_the_operation_of_the_angles_has_the_shape_and_dtype_that_it_tells_the_compiler():
    position_BT, frequency_N = torch.arange(6).view(2, 3), plain_frequencies(8, 10000.0, CPU)
    for dtype in (torch.float64, torch.bfloat16):
        torch.library.opcheck(torch.ops.everyformer.angles.default, (position_BT, frequency_N, dtype, 1.3))


@pytest.mark.parametrize("scaling", [None, LinearScaling(2.0)], ids=["plain", "scaled"])
def test_an_exported_graph_has_no_operation_of_our_own(scaling):
    """It is opened where everyformer is not installed."""

    class Turn(torch.nn.Module):
        rotary: Any = Rotary(scaling=scaling).build(2, 4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rotary.transform(x, x, Context.of(6, 6))[1]

    x_BHTE = torch.randn(2, 2, 6, 4)
    exported = torch.export.export(Turn(), (x_BHTE,))
    assert "everyformer" not in str(exported.graph)
    close(exported.module()(x_BHTE), Turn()(x_BHTE))
