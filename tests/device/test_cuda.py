"""Tests that need a GPU: the accuracy of the fast kernels in low precision, and training in bfloat16."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import everyformer
from everyformer.attention.attend import UnsupportedKernel, attend, choose
from everyformer.attention.context import Context
from everyformer.attention.four_term import FourTerm
from everyformer.attention.hashing import Hash
from everyformer.attention.kernels import blocked, fused
from everyformer.attention.kernels.request import Request
from everyformer.attention.parse import parse
from everyformer.attention.pattern import Hashed
from everyformer.attention.score_mod import Alibi, ImageBias, Rotary, Shaw, T5Bias
from everyformer.attention.span import Span
from everyformer.network import linear_cross_entropy
from everyformer.network.linear_cross_entropy import LogitMap, cross_entropy
from everyformer.task.table import task_for
from everyformer.train.loop import train
from everyformer.train.recipe import Recipe, override

pytestmark = pytest.mark.filterwarnings(
    "ignore:Attempting to run cuBLAS", "ignore:TensorFloat32 tensor cores", "ignore:Online softmax is disabled"
)

PATTERNS = (
    "full",
    "causal",
    "causal & window(40)",
    "causal & (window(16) | stride(16))",
    "causal & (block(16) | summary(16, 4))",
    "by_head(causal, window(9), ~causal, block(32))",
)
SPARSE = (
    *PATTERNS[2:5],
    "causal & local(32, 40)",
    "causal & summary(16, 4)",
    "causal & (block(128) | summary(128, 64, 32))",
    "hashed(4, 8, 16)",
)
SCORE_MODS = ((), (Rotary(),), (Alibi(),), (Shaw(8),), (T5Bias(),), (ImageBias(16, 16),), (FourTerm(64),))


def random_qkv(dtype, queries=256, keys=256):
    torch.manual_seed(0)
    sizes = ((2, 4, queries, 64), (2, 4, keys, 64), (2, 4, keys, 64))
    return [torch.randn(size, device="cuda", dtype=torch.float64).to(dtype) for size in sizes]


def output_and_gradients(tensors, pattern, score_mods, dtype, kernel):
    """Returns the output and the gradients of q, k and v, computed in `dtype`."""
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    torch.manual_seed(1)
    modules = [score_mod.build(4, 64, 64).cuda().to(dtype) for score_mod in score_mods]
    parsed, context = parse(pattern), Context.of(leaves[0].shape[2], leaves[1].shape[2], leaves[0].device)
    if isinstance(parsed, Hashed):
        hash_ = Hash(parsed, 4, 64).cuda()
        context = context.with_hashes(hash_(hash_.buckets(leaves[1]), context))
    output = attend(*leaves, parsed, modules, context=context, kernel=kernel)
    torch.manual_seed(2)
    output_gradient = torch.randn(output.shape, device="cuda", dtype=torch.float64).to(dtype)
    return [output, *torch.autograd.grad(output, leaves, output_gradient)]


FLEX = (
    *((pattern, ()) for pattern in PATTERNS),
    *((PATTERNS[2], score_mods) for score_mods in SCORE_MODS if score_mods),
)


@pytest.mark.parametrize("kernel", ["sdpa", "blocked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_of_fast_kernels_is_at_most_twice_that_of_the_reference(kernel, dtype):
    assert_accurate(kernel, dtype, product(PATTERNS, SCORE_MODS))


@pytest.mark.parametrize("case", FLEX, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_of_flex_is_at_most_twice_that_of_the_reference(case, dtype):
    assert_accurate("flex", dtype, [case])  # it compiles each case, so each is a test


@pytest.mark.parametrize("kernel", ["fused", "hashed"])
def test_error_of_sparse_kernels_is_at_most_twice_that_of_the_reference(kernel):
    spans = ("causal", (Span(100, start=0.5),)), ("causal & window(64)", (Span(100, start=0.5),))
    cells: dict[str, Any] = {
        "fused": [*((pattern, ()) for pattern in SPARSE), *spans],
        "hashed": [(SPARSE[-1], ())],
    }
    assert_accurate(kernel, torch.bfloat16, cells[kernel])


def test_auto_chooses_fused_for_long_sparse_passes_in_half_precision():
    (q, k, v), context = random_qkv(torch.bfloat16, 2048, 2048), Context.of(2048, 2048, torch.device("cuda"))
    request = Request(q, k, v, parse("causal & window(64)"), (), (), context, 0.125, 0.0)
    assert choose(request, "auto") is fused
    assert choose(replace(request, dropout=0.1), "auto") is blocked
    assert choose(replace(request, q_BHQE=q.float()), "auto") is not fused


def assert_accurate(kernel, dtype, cells):
    too_large = []
    for pattern, score_mods in cells:
        tensors = random_qkv(dtype)
        exact = output_and_gradients(tensors, pattern, score_mods, torch.float64, "reference")
        reference = output_and_gradients(tensors, pattern, score_mods, dtype, "reference")
        fast = output_and_gradients(tensors, pattern, score_mods, dtype, kernel)
        for name, e, r, f in zip(("output", "dq", "dk", "dv"), exact, reference, fast, strict=True):
            reference_error, fast_error = (float((x.detach() - e.detach()).square().mean().sqrt()) for x in (r, f))
            # In float32 the error of PyTorch's own fused backward is 2.4 times that of the reference on causal attention.
            if not fast_error <= reference_error * (3 if dtype is torch.float32 and name != "output" else 2):
                too_large.append((pattern, score_mods, name, fast_error / reference_error))
    assert not too_large, too_large


@pytest.mark.parametrize("kernel", ["reference", "sdpa", "blocked", "flex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_of_a_query_without_visible_keys_is_zero(kernel, dtype):
    tensors = [x.requires_grad_() for x in random_qkv(dtype)]
    output = attend(*tensors, parse("~full"), kernel=kernel)
    gradients = torch.autograd.grad(output.sum(), tensors)
    assert all((x == 0).all() for x in (output, *gradients))
    position_BK = torch.arange(256, device="cuda").repeat(2, 1)
    position_BK[0, 128:] = -1
    context = Context.of(256, 256, torch.device("cuda"), key_BK=position_BK)
    output = attend(*tensors, parse("~causal"), context=context, kernel=kernel)
    assert (output[0, :, 127] == 0).all() and torch.isfinite(output).all()
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(output.float().square().sum(), tensors))


@pytest.mark.parametrize("name", everyformer.members())
def test_members_train_in_bfloat16(name):
    settings = ["run.precision=bf16", "run.steps=2", "run.batch=2", "run.evaluate=0", "run.save=0", "run.examples=2"]
    lines: list[dict[str, Any]] = []
    train(override(Recipe(member=name, size="tiny", task=task_for(name, "tiny")), settings), callbacks=(lines.append,))
    assert len([line for line in lines if line["kind"] == "step"]) == 2


def test_unsupported_dtypes_and_unknown_tokens_raise():
    with pytest.raises(UnsupportedKernel, match="float64"):
        attend(*random_qkv(torch.float64), kernel="flex")
    with pytest.raises(ValueError, match="token 256 is outside"):
        everyformer.build("gpt2", "tiny").cuda()(torch.tensor([[256]], device="cuda"))


def test_cached_generation_equals_uncached():
    network = everyformer.build("gpt2", "tiny").cuda().double()
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    cached, uncached = (everyformer.generate(network, prompts, 80, temperature=0, cached=on) for on in (True, False))
    assert cached == uncached


def test_a_compiled_training_step_equals_the_eager_step():
    network = everyformer.build("gpt2", "tiny", dropout=0.0).cuda()
    token_BT = torch.randint(0, 256, (4, 64), device="cuda")
    results = []
    for run in (network, torch.compile(network, fullgraph=True)):
        network.zero_grad()
        loss = torch.nn.functional.cross_entropy(run(token_BT).logits[:, :-1].flatten(0, 1), token_BT[:, 1:].flatten())
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in network.parameters())])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_the_loss_of_a_large_vocabulary_has_at_most_twice_the_error_of_whole_logits(cap, compiled, monkeypatch):
    torch.manual_seed(0)
    exact = [torch.randn(700, 64, device="cuda").double(), torch.randn(5003, 64, device="cuda").double()]
    target_N = torch.randint(-1, 5003, (700,), device="cuda")
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_OF_PROGRAM", 256 * 5003)

    def loss_and_gradients(exactly, in_chunks):
        dtype = torch.float64 if exactly else torch.float32
        h, w = (x.to(dtype, copy=True).requires_grad_() for x in exact)  # copies, so that each is a leaf

        def loss(h, w):
            one = LogitMap(h, w, None, cap)
            return cross_entropy(one if in_chunks else one.logits(), target_N)

        with torch.autocast("cuda", torch.bfloat16, enabled=not exactly):
            value = torch.compile(loss)(h, w) if compiled and not exactly else loss(h, w)
        return [value.detach(), *torch.autograd.grad(value, (h, w))]

    assert linear_cross_entropy.uses_program(5003, torch.bfloat16, target_N.device)
    expected = loss_and_gradients(True, False)
    plain, found = (loss_and_gradients(False, in_chunks) for in_chunks in (False, True))
    for one, other, wanted in zip(found, plain, expected, strict=True):
        assert (one - wanted).norm() <= 2 * (other - wanted).norm() + 1e-3 * wanted.norm()
