"""Norms against their definitions, and which of them mix positions."""

from __future__ import annotations

import pytest
import torch

from everyformer import BatchNorm, InstanceNorm, LayerNorm, PostNorm, PreNorm, RMSNorm, SequenceNorm
from everyformer.network.legal import illegal_reasons
from everyformer.network.network import Network
from tests.network import close, model, randn, ready, tokens
from tests.spec import network as spec

B, T, D = 3, 5, 4
EPS = 1e-3  # large enough that leaving it out, or taking it from the root, shows
MIXING = {"batch": BatchNorm(EPS), "instance": InstanceNorm(EPS), "sequence": SequenceNorm(EPS)}
VISIBLE = [[True] * T, [False, False, True, True, True], [True, False, False, False, False]]


@pytest.mark.spec(23)
def test_layer_norm_is_equations_7_and_8():
    x_BTD, norm = randn(B, T, D), ready(LayerNorm(EPS).build(D))
    literal = [[spec.layer_norm(x, norm.weight, norm.bias, EPS) for x in row] for row in x_BTD]
    close(norm(x_BTD), torch.stack([torch.stack(row) for row in literal]))


@pytest.mark.spec(23)
def test_layer_norm_without_bias_has_no_shift():
    x_BTD, norm = randn(B, T, D), ready(LayerNorm(EPS, bias=False).build(D))
    literal = [[spec.layer_norm(x, norm.weight, torch.zeros(D), EPS) for x in row] for row in x_BTD]
    close(norm(x_BTD), torch.stack([torch.stack(row) for row in literal]))
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


@pytest.mark.spec(23)
def test_rms_norm_divides_by_the_root_of_the_mean_square():
    x_BTD, norm = randn(B, T, D), ready(RMSNorm(EPS).build(D))
    literal = [[spec.rms_norm(x, norm.weight, EPS) for x in row] for row in x_BTD]
    close(norm(x_BTD), torch.stack([torch.stack(row) for row in literal]))


def test_rms_norm_with_a_unit_offset_multiplies_by_one_plus_its_weight():
    x_BTD, value = randn(B, T, D), RMSNorm(EPS, unit_offset=True)
    close(value.build(D).double()(x_BTD), RMSNorm(EPS).build(D).double()(x_BTD))  # both factors begin at 1
    norm = ready(value.build(D))
    literal = [[spec.offset_rms_norm(x, norm.weight, EPS) for x in row] for row in x_BTD]
    close(norm(x_BTD), torch.stack([torch.stack(row) for row in literal]))


@pytest.mark.parametrize("value", [RMSNorm(EPS), RMSNorm(EPS, unit_offset=True)])
def test_rms_norm_of_a_narrower_input_is_computed_as_wide_as_its_weight(value):
    """As under autocast, of the output of a sublayer; without a warning, which would be an error here."""
    norm, x_BTD = value.build(D), randn(B, T, D).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = norm(x_BTD)
    assert torch.equal(found, norm(x_BTD.float())) and found.dtype == torch.float32


@pytest.mark.spec(24, 25, 26)
@pytest.mark.parametrize("kind", MIXING)
@pytest.mark.parametrize("padded", [False, True])
def test_norms_over_positions_are_their_definitions_and_leave_padding_out(kind, padded):
    x_BTD, norm = randn(B, T, D), ready(MIXING[kind].build(D)).train()
    visible = VISIBLE if padded else [[True] * T] * B
    seen_BT = torch.tensor(visible)
    literal = spec.shared_norm(x_BTD, visible, kind, norm.weight, norm.bias, EPS)
    found = norm(x_BTD, seen_BT if padded else None)
    close(found[seen_BT], literal[seen_BT])
    junk = torch.where(seen_BT[..., None], x_BTD, 1e3)
    close(norm(junk, seen_BT)[seen_BT], literal[seen_BT])


@pytest.mark.spec(24)
def test_batch_norm_keeps_running_averages_for_evaluation():
    norm, momentum = ready(BatchNorm(EPS, momentum=0.25).build(D)).train(), 0.25
    mean, variance = torch.zeros(D, dtype=torch.float64), torch.ones(D, dtype=torch.float64)
    for step in range(3):
        x_BTD = randn(B, T, D, seed=step) + step
        norm(x_BTD, torch.tensor(VISIBLE))
        for d in range(D):
            now = spec.moments(x_BTD[place] for place in spec.normalization_group("batch", VISIBLE, D, 0, d))
            mean[d] = (1 - momentum) * mean[d] + momentum * now[0]
            variance[d] = (1 - momentum) * variance[d] + momentum * now[1]
    x_BTD = randn(B, T, D, seed=9)
    literal = norm.weight * (x_BTD - mean) / (variance + EPS).sqrt() + norm.bias
    close(norm.eval()(x_BTD), literal)
    close(norm(x_BTD[:1]), literal[:1])  # in evaluation the batch does not matter


@pytest.mark.parametrize("kind", MIXING)
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_norms_count_all_positions(kind, autocast):
    """The 76,800 numbers of a sequence are more than float16 can count."""
    norm, x_BTD = MIXING[kind].build(128).train(), randn(1, 600, 128).half()
    wanted = norm(x_BTD.float())
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        found = (norm if autocast else norm.half())(x_BTD)
    assert found.dtype == (torch.float32 if autocast else torch.float16)
    torch.testing.assert_close(found.float(), wanted, atol=5e-3, rtol=2e-3)


@pytest.mark.spec(20, 23)
@pytest.mark.parametrize("norm", [LayerNorm(), RMSNorm(), *MIXING.values()])
def test_a_constant_token_has_finite_outputs_and_gradients(norm):
    module = norm.build(D).double().train()
    x_BTD = torch.zeros(2, T, D, dtype=torch.float64, requires_grad=True)
    y_BTD = module(x_BTD)
    y_BTD.sum().backward()
    assert (y_BTD == 0).all()
    assert x_BTD.grad is not None and x_BTD.grad.isfinite().all()


@pytest.mark.spec(24, 25, 26)
@pytest.mark.parametrize("residual", [PostNorm, PreNorm])
@pytest.mark.parametrize("norm", [*MIXING.values(), LayerNorm(), RMSNorm()])
def test_norms_over_positions_leak_the_future(residual, norm):
    """Forced into a causal model in training they leak, which is why they are refused; the others leak exactly 0."""
    value = model("causal", residual=residual(norm))
    network = ready(Network(value)).train()  # built without asking whether it is legal
    x, y = tokens(), tokens()
    y[:, -1] = (y[:, -1] + 1) % 17
    moved = (network(x).hidden - network(y).hidden)[:, :-1].abs().max()
    assert moved > 1e-3 if norm.mixes_positions else moved == 0
    assert norm.mixes_positions == any("mixes positions" in reason for reason in illegal_reasons(value))
    assert not list(illegal_reasons(model("full", residual=residual(norm))))
