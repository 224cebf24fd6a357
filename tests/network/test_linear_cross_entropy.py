"""The chunked loss equals its definition, and so do its gradients, in every precision and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from everyformer import build
from everyformer.attention.context import Probe
from everyformer.network import linear_cross_entropy
from everyformer.network.linear_cross_entropy import LogitMap, cross_entropy
from tests.network import tokens
from tests.spec import linear_cross_entropy as spec

VECTORS, WIDTH, VOCABULARY = 11, 5, 7


def inputs(bias: bool, dtype: torch.dtype = torch.float64) -> tuple[list[Any], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(VECTORS, WIDTH), (VOCABULARY, WIDTH), *([(VOCABULARY,)] if bias else [])]
    leaves: list[Any] = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    ]
    target_N = torch.randint(VOCABULARY, (VECTORS,), generator=generator)
    target_N[[2, 5, 7]] = -100  # 8 of 11 are left, so one of those without a target is in the last quarter
    return leaves, target_N


@pytest.fixture(params=[3 * VOCABULARY, 6 * VOCABULARY, 1 << 20], ids=["4 chunks", "2 chunks", "1 chunk"])
def chunks(request, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ON_CPU", request.param)


@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
def test_the_loss_and_its_gradients_equal_the_definition(chunks, bias, smoothing, cap):
    leaves, target_N = inputs(bias)
    b = leaves[2] if bias else None
    expected = spec.loss(leaves[0], leaves[1], b, target_N.tolist(), smoothing, cap)
    found = LogitMap(leaves[0], leaves[1], b, cap).cross_entropy(target_N, smoothing)
    whole = cross_entropy(LogitMap(leaves[0], leaves[1], b, cap).logits(), target_N, smoothing)
    wanted = torch.autograd.grad(3 * expected, leaves)
    for one in (found, whole):
        torch.testing.assert_close(one, expected)
        torch.testing.assert_close(torch.autograd.grad(3 * one, leaves), wanted)


def test_only_wanted_gradients_are_computed(chunks):
    for index in range(3):
        leaves, target_N = inputs(bias=True)
        expected = torch.autograd.grad(LogitMap(*leaves).cross_entropy(target_N), leaves[index])
        for number, x in enumerate(leaves):
            x.requires_grad_(number == index)
        found = torch.autograd.grad(LogitMap(*leaves).cross_entropy(target_N), leaves[index])
        torch.testing.assert_close(found, expected)
    with torch.no_grad():
        assert not LogitMap(*leaves).cross_entropy(target_N).requires_grad


@pytest.mark.parametrize("cap", [None, 0.7])
def test_the_losses_of_the_vectors_are_those_of_whole_logits(chunks, cap):
    (hidden, weight, bias), target_N = inputs(True)
    target_N = target_N.clamp(min=0)
    found_N = LogitMap(hidden, weight, bias, cap).losses(target_N)
    logits = LogitMap(hidden, weight, bias, cap).logits()
    wanted_N = -logits.log_softmax(-1).gather(1, target_N[:, None])[:, 0]
    assert not found_N.requires_grad
    torch.testing.assert_close(found_N, wanted_N.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_vectors_without_a_target_cost_nothing_and_change_nothing(chunks, share):
    leaves, target_N = inputs(bias=True)
    target_N[int(share * VECTORS) :] = -1
    expected = spec.loss(leaves[0], leaves[1], leaves[2], target_N.tolist())
    found = LogitMap(*leaves).cross_entropy(target_N)
    torch.testing.assert_close(found, expected)
    for x, gradient in zip(leaves, torch.autograd.grad(found, leaves), strict=True):
        wanted = torch.autograd.grad(expected, x, retain_graph=True)[0] if share else torch.zeros_like(x)
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("targets, computed", [(0, 0), (1, 5), (5, 5), (6, 10), (15, 15), (16, 20), (20, 20)])
def test_vectors_without_a_target_are_left_out_in_whole_quarters(targets, computed):
    (hidden, weight, _), _ = inputs(bias=True)
    target_N = torch.full((20,), -1)
    target_N[20 - targets :] = 0
    with FlopCounterMode(display=False) as counter:
        LogitMap(hidden.detach()[torch.arange(20) % VECTORS], weight.detach()).cross_entropy(target_N)
    assert counter.get_total_flops() == computed * 2 * WIDTH * VOCABULARY


def test_under_autocast_the_error_is_at_most_twice_that_of_whole_logits(monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ON_CPU", 64 * 50)
    torch.manual_seed(0)
    leaves = [torch.randn(256, 32, requires_grad=True), (torch.randn(50, 32) * 0.2).requires_grad_()]
    target_N, found = torch.randint(50, (256,)), []
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = torch.autograd.grad(cross_entropy(LogitMap(*exact).logits(), target_N), exact)
    for chunked in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            one = LogitMap(*leaves) if chunked else LogitMap(*leaves).logits()
            found.append(torch.autograd.grad(cross_entropy(one, target_N), leaves))
    for whole, chunked, wanted in zip(*found, expected, strict=True):
        assert chunked.dtype == torch.float32
        assert (chunked - wanted).abs().mean() <= 2 * (whole - wanted).abs().mean()


def test_gradients_are_kept_in_the_precision_of_their_weights(chunks):
    leaves, target_N = inputs(True, torch.bfloat16)
    loss = LogitMap(*leaves).cross_entropy(target_N)
    assert loss.dtype == torch.float32
    assert [kept.dtype for kept in loss.grad_fn.saved_tensors] == [torch.bfloat16] * 3


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_tied_table_has_the_sum_of_both_gradients(chunks, name):
    torch.manual_seed(0)
    network: nn.Module = build(name, "tiny", dropout=0.0, vocabulary=31).double()
    token_BT = tokens(2, 6) % 31
    gradients = []
    for logits in (True, False):
        output = network(token_BT, probe=Probe(records_weights=False, logits=logits))
        loss = cross_entropy(output.logits_of(0), token_BT.roll(-1, 1)) + sum(output.aux.values())
        network.zero_grad()
        loss.backward()
        gradients.append({key: p.grad for key, p in network.named_parameters() if p.grad is not None})
    torch.testing.assert_close(gradients[0], gradients[1])


def test_it_compiles_without_a_graph_break(monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ON_CPU", 3 * VOCABULARY)
    leaves, target_N = inputs(True)

    def loss(h: Any, w: Any, b: Any, target: Any) -> Any:
        return LogitMap(h.tanh(), w, b).cross_entropy(target) * 2

    compiled: Any = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*leaves, target_N), loss(leaves[0], leaves[1], leaves[2], target_N)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves))


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_triton_program_equals_the_definition_in_rows_that_are_padded(cap, smoothing, monkeypatch):
    program = pytest.importorskip("everyformer.network.cross_entropy_program")
    monkeypatch.setattr(program, "BLOCK", 16)
    vocabulary, width = 37, 40
    torch.manual_seed(0)
    logits_NV = torch.randn(6, width) * 3
    logits_NV[:, vocabulary:] = 99.0  # must not count
    target_N = torch.tensor([0, 36, 5, -100, 7, -1])
    expected, gradient_NV = linear_cross_entropy._chunk(
        logits_NV[:, :vocabulary].clone(), target_N, vocabulary, torch.float32, smoothing, cap, True
    )
    found = logits_NV.clone()
    loss_N = program.cross_entropy_(found, target_N, vocabulary, smoothing, cap, False)
    assert torch.equal(found, logits_NV)  # the logits stay where no gradient is needed
    torch.testing.assert_close(loss_N.sum(), expected)
    torch.testing.assert_close(program.cross_entropy_(found, target_N, vocabulary, smoothing, cap, True), loss_N)
    torch.testing.assert_close(found[:, :vocabulary], gradient_NV)
    assert (found[:, vocabulary:] == 0).all()
    assert (found[target_N < 0] == 0).all() and (loss_N[target_N < 0] == 0).all()


@pytest.mark.parametrize("bias", [False, True])
def test_a_padded_vocabulary_changes_neither_the_loss_nor_its_gradients(bias, monkeypatch):
    program = pytest.importorskip("everyformer.network.cross_entropy_program")
    leaves, target_N = inputs(bias, torch.float32)
    maps = LogitMap(leaves[0], leaves[1], leaves[2] if bias else None, 5.0)
    expected = maps.cross_entropy(target_N, 0.1)
    wanted = torch.autograd.grad(expected, leaves)
    calls = set()

    def uses_program(*call: Any) -> bool:
        calls.add(call)
        return True

    monkeypatch.setattr(linear_cross_entropy, "uses_program", uses_program)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_OF_PROGRAM", 3 * VOCABULARY)
    monkeypatch.setattr(program, "BLOCK", 4)
    found = maps.cross_entropy(target_N, 0.1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, leaves), wanted)
    assert calls == {(VOCABULARY, torch.float32, torch.device("cpu"))}  # the vocabulary as it is, not padded


def test_the_program_is_for_large_vocabularies_in_half_precision_on_a_gpu():
    uses = linear_cross_entropy.uses_program
    assert uses(50257, torch.bfloat16, torch.device("cuda")) and uses(4096, torch.float16, torch.device("cuda"))
    assert not uses(256, torch.bfloat16, torch.device("cuda"))
    assert not uses(50257, torch.float32, torch.device("cuda")) and not uses(50257, torch.bfloat16, torch.device("cpu"))
