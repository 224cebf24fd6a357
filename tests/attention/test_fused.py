"""The fused kernel: its Triton programs equal the reference. Without a GPU they run in Triton's interpreter (see conftest.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from everyformer import member
from everyformer.attention import hashing
from everyformer.attention.attend import UnsupportedKernel, attend, choose
from everyformer.attention.context import Context
from everyformer.attention.hashing import Hash
from everyformer.attention.kernels import fused, reference
from everyformer.attention.kernels.parts import Kind
from everyformer.attention.kernels.request import Request
from everyformer.attention.parse import parse
from everyformer.attention.pattern import Hashed
from everyformer.attention.score_mod import ScoreMod, Shaw
from everyformer.attention.span import DynamicSpan, Span
from everyformer.family.sparse_transformer import fixed_sets, interleaved, merged, split_by_head

pytest.importorskip("triton", reason="on this system there is no Triton")
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
HEADS, LENGTH, WIDTH = 2, 21, 6  # not a multiple of a block, and heads that are padded
PATTERNS = (
    "causal & window(12)",
    "causal & block(8)",
    "causal & local(8, 11)",
    "causal & stride(5)",
    "causal & summary(8, 3)",  # the first queries have no keys
    "causal & summary(8, 3, 2)",
    "causal & (window(6) | stride(6))",
    "causal & (window(11) | stride(4))",  # some strides are in the window
    "causal & (block(8) | summary(8, 3))",
    "causal & (block(8) | summary(8, 3, 4))",
    "by_head(causal & (block(8) | summary(8, 4)), causal & (block(8) | summary(8, 4, 4)))",
    "by_head(causal & block(8), causal & summary(8, 4, 4))",
    "hashed(3, 4, 5)",
    "hashed(2, 16, 1)",  # some queries have no other keys
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Makes blocks small, so that a short sequence has many."""
    if not CUDA:
        for name, sizes in {"forward": (16, 32), "to_queries": (32, 16), "to_keys": (32, 16)}.items():
            for table in fused.SIZES.values():
                monkeypatch.setitem(table, name, {"M": sizes[0], "N": sizes[1], "UNEVEN": 16})


def request_of(
    text: str, score_mods: tuple[ScoreMod, ...] = (), batch: int = 1, length: int = LENGTH, heads: int = HEADS
) -> tuple[Request, list[torch.Tensor]]:
    """Returns a request in float32, and the tensors to differentiate."""
    torch.manual_seed(0)
    pattern, drawn = parse(text), torch.randn(3, batch, heads, length, WIDTH, device=DEVICE)
    q, k, v = (x.requires_grad_() for x in drawn.to(torch.bfloat16 if CUDA else torch.float32).float())
    context = Context.of(length, length, DEVICE, query_inputs=torch.randn(batch, length, 8, device=DEVICE))
    if isinstance(pattern, Hashed):
        hash_ = Hash(pattern, heads, WIDTH).to(DEVICE)
        context = context.with_hashes(hash_(hash_.buckets(k), context))
    modules = [score_mod.build(heads, WIDTH, WIDTH).to(DEVICE) for score_mod in score_mods]
    weights = [weight for module in modules for weight in module.parameters()]
    for weight in weights:
        weight.data = torch.rand_like(weight)
    terms = tuple(module.bias(q, k, 0.4, context) for module in modules)
    return Request(q, k, v, pattern, terms, (), context, 0.4, 0.0), [q, k, v, *weights]


def equal(request: Request, weights: list[torch.Tensor]) -> None:
    """Compares outputs and gradients of the programs and the reference; on a GPU the programs compute in bfloat16."""
    half = {name: getattr(request, name).bfloat16() for name in ("q_BHQE", "k_BHKE", "v_BHKE")} if CUDA else {}
    one, two = fused.run(Request(**(vars(request) | half))).float(), reference.run(request)
    gradient = torch.randn_like(two)
    computed, expected = (torch.autograd.grad(output, weights, gradient, retain_graph=True) for output in (one, two))
    for a, b in zip((one, *computed), (two, *expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=(2e-2 if CUDA else 1e-5) * max(1, b.abs().max().item()))


@pytest.mark.spec(7, 104, 105, 108, 112)
@pytest.mark.parametrize("text", PATTERNS)
def test_fused_parts_equal_the_reference(text):
    equal(*request_of(text, batch=2 if text in ("causal & stride(5)", "hashed(2, 16, 1)") else 1))


def test_heads_of_one_pattern_are_launched_together():
    fixed = [f"causal & (block(8) | summary(8, 4, {skip}))" for skip in (0, 4)]
    equal(*request_of(f"by_head({', '.join(fixed)})", batch=2, heads=4))


@pytest.mark.spec(93, 94)
@pytest.mark.parametrize("text", ("causal", "causal & window(9) & by_head(window(4), window(30))"))
@pytest.mark.parametrize("score_mod", (Span(20, ramp=4), DynamicSpan(8, 20, ramp=4)), ids=("span", "dynamic"))
def test_spans_are_a_soft_mask_and_have_gradients(text, score_mod):
    equal(*request_of(text, (score_mod,), batch=2 if text == "causal" else 1))


@pytest.mark.parametrize(
    "text",
    (
        "causal & window(60)",
        "causal & local(16, 48)",
        "causal & (window(3) | stride(2))",
        "causal & (block(8) | summary(8, 7))",
        "causal & (block(32) | summary(32, 20, 7))",  # the queries of a program belong to one block
        "causal & (block(128) | summary(128, 96, 32))",  # also on a GPU
    ),
)
def test_blocks_without_hidden_pairs_need_no_mask(text):
    length = 300 if CUDA else 75
    equal(*request_of(text, length=length))


@pytest.mark.parametrize("score_mod", (Span(64, ramp=8), DynamicSpan(8, 64, ramp=8)), ids=("span", "dynamic"))
def test_spans_of_several_blocks(score_mod):
    equal(*request_of("causal", (score_mod,), length=300 if CUDA else 75))


@pytest.mark.spec(37, 94)
@pytest.mark.parametrize("soft", ((), (Span(20, ramp=4),), (DynamicSpan(8, 20, ramp=4),)), ids=("", "span", "dynamic"))
@pytest.mark.parametrize(
    "text", ("causal & window(12)", "causal & ~window(1) & window(15)", "causal & ~window(3) & window(9)")
)
def test_windows_may_have_scores_by_distance(text, soft):
    request, weights = request_of(text, (Shaw(20, future=text == "causal & window(12)"), *soft), batch=2)
    assert "score term" not in (fused._relative_reason(request) or "")
    equal(request, weights)


@pytest.mark.parametrize("soft", ((), (Span(40, ramp=8),)), ids=("", "span"))
def test_scores_by_distance_of_several_blocks(soft):
    equal(*request_of("causal & ~window(1) & window(40)", (Shaw(40, future=False), *soft), length=300 if CUDA else 75))


@pytest.mark.parametrize("soft", ((), (Span(20, ramp=4),)), ids=("", "span"))
def test_windows_with_scores_by_distance_follow_a_memory_that_is_partly_empty(soft):
    torch.manual_seed(0)
    queries, keys = 21, 34
    key_BK = torch.stack(
        [torch.arange(keys), (torch.arange(keys) - 9).clamp(min=-1), (torch.arange(keys) - 13).clamp(min=-1)]
    )
    q, k, v = (torch.randn(3, HEADS, size, WIDTH, device=DEVICE) for size in (queries, keys, keys))
    leaves = [x.to(torch.bfloat16 if CUDA else torch.float32).float().requires_grad_() for x in (q, k, v)]
    context = Context.of(queries, keys, DEVICE, key_BK=key_BK.to(DEVICE))
    modules = [one.build(HEADS, WIDTH, WIDTH).to(DEVICE) for one in (Shaw(20, future=False), *soft)]
    weights = [weight for module in modules for weight in module.parameters()]
    terms = tuple(module.bias(*leaves[:2], 0.4, context) for module in modules)
    q, k, v = leaves
    request = Request(q, k, v, parse("causal & ~window(1) & window(15)"), terms, (), context, 0.4, 0.0)
    assert fused._relative_reason(request) is None
    equal(request, [*leaves, *weights])


def test_scores_by_distance_are_for_windows_within_their_table():
    for text, shaw, reason in (
        ("causal & block(8)", Shaw(20), "more than a window"),
        ("causal & window(12)", Shaw(8), "keys are up to 11 positions away, but those from 8 on share"),
        ("causal & window(12)", Shaw(11), None),
    ):
        found = fused._relative_reason(request_of(text, (shaw,))[0])
        assert found is None if reason is None else reason in (found or "")
    request, _ = request_of("causal & window(12)", (Shaw(20),))
    gap_BK = torch.arange(LENGTH, device=DEVICE)[None].clone()
    gap_BK[0, 3] = -1
    hole = Request(**(vars(request) | {"context": Context.of(LENGTH, LENGTH, DEVICE, key_BK=gap_BK)}))
    assert "do not follow each other" in (fused._relative_reason(hole) or "")


@pytest.mark.parametrize(("width", "half"), [(6, 5), (40, 20)])
def test_the_program_computes_the_buckets_of_every_round(width, half):
    """Wherever the keys lie in memory."""
    torch.manual_seed(0)
    k_BHKE, rotation = torch.randn(2, 3, 70, width, device=DEVICE), torch.randn(4, 3, width, half, device=DEVICE)
    k_BHKE = k_BHKE.bfloat16().float()
    expected = hashing.buckets(k_BHKE, rotation)
    for axes in ((1, 2), (2, 3)):
        rotated = k_BHKE.transpose(*axes).contiguous().transpose(*axes)
        assert torch.equal(hashing._buckets_by_program(rotated, rotation), expected)
    assert torch.equal(hashing._buckets_by_program(k_BHKE, rotation), expected)


@pytest.mark.parametrize(
    "length, width, reason",
    [
        (64, 128, None),
        (64, 192, "wider than 128"),
        (2**21, 64, None),
        (2**22, 64, "8 heads of 64 numbers at 4194304 positions"),
    ],
)
def test_too_large_heads_and_sequences_are_unsupported(length, width, reason):
    with FakeTensorMode():
        q = torch.empty(1, 8, length, width, device="cuda", dtype=torch.bfloat16)
        request = Request(q, q, q, parse("causal & window(9)"), (), (), Context.of(length, length, q.device), 0.1, 0.0)
        computed = fused.unsupported_reason(request)
    assert computed is None if reason is None else reason in computed


@pytest.mark.parametrize("use", (interleaved, merged, split_by_head))
def test_auto_uses_fused_for_the_sparse_transformer_at_full_size(use):
    """As `auto` chooses: its sets are far less than all earlier positions."""
    value = member("sparse-transformer", "enwik8", patterns=use(*fixed_sets(128, 32, groups=4)))
    length, form = 12288, value.body.layers[0].sublayers[0].heads
    for layer in value.body.layers:
        with FakeTensorMode():
            q = torch.empty(1, form.heads, length, 64, device="cuda", dtype=torch.bfloat16)
            request = Request(
                q, q, q, layer.sublayers[0].pattern, (), (), Context.of(length, length, q.device), 0.1, 0.0
            )
            assert fused.unsupported_reason(request) is None and choose(request, "auto") is fused


@pytest.mark.parametrize("max_span", (64, 4096, 9000))
def test_auto_uses_fused_for_spans_of_any_length(max_span):
    """Also if a span may be as long as the sequence: the mask of another kernel would be as large as the scores."""
    module = Span(max_span).build(4, 64, 64)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 4, 4096, 64, device="cuda", dtype=torch.bfloat16)
        context = Context.of(4096, 4096, q.device)
        request = Request(q, q, q, parse("causal"), (module.bias(q, q, 0.1, context),), (), context, 0.1, 0.0)
        assert choose(request, "auto") is fused


def test_programs_compile_for_a_gpu(tmp_path):
    """Also without a GPU: the interpreter accepts programs that the compiler refuses."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.attention.compiled"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-1500:]
    assert len(done.stdout.splitlines()) == 26


def test_a_block_and_the_columns_of_earlier_blocks_of_its_size_are_one_launch():
    (together,), (apart,) = (
        fused.launched_parts(request_of(f"causal & {text}")[0])
        for text in ("(block(8) | summary(8, 3))", "(window(8) | stride(4))")
    )
    assert [part.kind for part in together] == [Kind.BLOCK_AND_DISTANT]
    assert [part.kind for part in apart] == [Kind.BAND, Kind.RESIDUE]


@pytest.mark.parametrize("device, dtype", [("cpu", torch.bfloat16), ("cuda", torch.float32), ("cuda", torch.float64)])
def test_fused_needs_both_half_precision_and_a_gpu(device, dtype):
    with FakeTensorMode():
        q = torch.empty(1, 2, 64, 32, device=device, dtype=dtype)
        request = Request(q, q, q, parse("causal & window(9)"), (), (), Context.of(64, 64, q.device), 0.1, 0.0)
        assert f"not in {dtype} on {device}" in (fused.unsupported_reason(request) or "")


def test_unsupported_requests_are_refused():
    """Device and precision first, then the pattern."""
    qkv = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    with pytest.raises(UnsupportedKernel, match="bfloat16 or float16 on CUDA"):
        attend(*qkv, parse("causal & window(3)"), kernel="fused")
    assert fused.launched_parts(request_of("causal")[0]) is None
    assert fused.launched_parts(request_of("window(5)")[0]) is None
    assert fused.launched_parts(request_of("causal & (block(8) | summary(4, 1))")[0]) is None
    for text in ("hashed(2, 4, 5)", "causal & block(8)", "causal & (window(4) | stride(4))", "full"):
        assert fused.launched_parts(request_of(text, (Span(20),))[0]) is None
