"""Attention at the limits of its definitions: other predicates, first positions, sizes that are equal, and the paths of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

from everyformer.attention import hashing
from everyformer.attention.attend import UnsupportedKernel, _choose_and_apply, attend
from everyformer.attention.context import Context
from everyformer.attention.kernels import flex, fused, tiled
from everyformer.attention.kernels.request import Request
from everyformer.attention.parse import parse
from everyformer.attention.pattern import Causal, Pattern, Stride, Window
from everyformer.attention.projection import Asymmetric, Shared, Symmetric
from everyformer.attention.score_mod import Alibi
from everyformer.attention.span import Span
from everyformer.network.multi_head_attention import Attention
from everyformer.value import Value
from tests.attention.test_tiled import PATTERNS, draw

CPU = torch.device("cpu")


class OfHead(Pattern, Value, frozen=True):
    """The second head attends to the future."""

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) | (h == 1)

    def is_causal(self) -> bool:
        return True


def test_a_class_keeps_the_facts_of_its_parent_only_with_its_predicate():
    class Named(Window, frozen=True):
        pass

    class Earlier(Stride, frozen=True):
        def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
            return k < q

        def is_causal(self) -> bool:
            return True

    assert Named(3).max_distance() == Window(3).max_distance() == 2
    position = torch.arange(5)
    assert Earlier(2).order(position) is None and Stride(2).order(position) is not None
    assert Earlier(2).is_causal() and not Earlier(2).attends_to_future()


def test_the_future_is_sought_in_as_many_heads_as_are_given():
    assert not OfHead().attends_to_future() and OfHead().attends_to_future(heads=2)
    assert not OfHead().attends_to_future(length=5) and OfHead().attends_to_future(length=5, heads=2)


@pytest.mark.parametrize("length", [3, 4, 6])
def test_heads_are_padded_with_zeros_to_the_width_of_a_kernel(length):
    """Also where the width is the number of positions."""
    q, k, v = (torch.randn(2, 3, length, width) for width in (4, 4, 2))
    request = Request(q, k, v, Causal(), (), (), Context.of(length, length, CPU), 1.0, 0.0)
    for x, padded in zip((q, k, v), request.by_position(4), strict=True):
        wanted = torch.zeros(2, length, 3, 4)
        wanted[..., : x.shape[-1]] = x.transpose(1, 2)
        assert torch.equal(padded, wanted) and padded.is_contiguous()


@pytest.mark.parametrize("text", ["causal", "window(100)", "by_head(causal & stride(2), block(128), window(300))"])
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (256, 256), (130, 400)])
def test_the_blocks_of_flex_are_those_that_torch_finds(text, queries, keys):
    """Partly and wholly allowed blocks of 128 positions, by head."""
    pattern = parse(text)
    ours = flex._static_block_mask(pattern, queries, keys, 3, CPU)
    wanted = create_block_mask(
        lambda b, h, i, j: pattern.allows(b, h, i + keys - queries, j), 1, 3, queries, keys, device="cpu"
    )
    for kind in ("kv", "full_kv"):
        ((count, index), (theirs, their_index)) = (
            (getattr(one, f"{kind}_num_blocks"), getattr(one, f"{kind}_indices")) for one in (ours, wanted)
        )
        assert torch.equal(count, theirs)
        for row, found, other in zip(count.flatten(), index.flatten(0, 2), their_index.flatten(0, 2), strict=True):
            assert set(found[:row].tolist()) == set(other[:row].tolist())


@pytest.mark.parametrize("text", PATTERNS)
def test_tiles_equal_the_reference_without_a_dense_program(text, monkeypatch):
    """On a GPU, scores and log-sum-exps are computed as written; here on a CPU."""
    monkeypatch.setattr(tiled, "_has_program", lambda q: False)
    pattern, qkv = parse(text), draw()
    one, two = (attend(*qkv, pattern, kernel=kernel) for kernel in ("tiled", "reference"))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
    gradient = torch.randn_like(one)
    for computed, expected in zip(*(torch.autograd.grad(y, qkv, gradient) for y in (one, two)), strict=True):
        torch.testing.assert_close(computed, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "dtype, directions, compiling, by_program",
    [
        (torch.bfloat16, 256, False, True),
        (torch.float16, 8, False, True),
        (torch.bfloat16, 257, False, False),
        (torch.float32, 8, False, False),
        (torch.bfloat16, 8, True, False),
    ],
)
def test_on_a_gpu_buckets_of_half_precision_are_computed_by_a_program(
    dtype, directions, compiling, by_program, monkeypatch
):
    """With at most 256 directions, and not inside torch.compile."""
    pytest.importorskip("triton", reason="on this system there is no Triton")
    calls, program = list[Any](), hashing._buckets_by_program

    def counted(*given: Any) -> torch.Tensor:
        calls.append(given)
        return program(*given)

    monkeypatch.setattr(hashing, "_buckets_by_program", counted)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    with FakeTensorMode():
        k = torch.empty(2, 3, 70, 6, device="cuda", dtype=dtype)
        found = hashing.buckets(k, torch.empty(4, 3, 6, directions, device="cuda"))
    assert found.shape == (2, 3, 70, 4) and found.dtype == torch.int64 and bool(calls) == by_program


@pytest.mark.parametrize("key_BK", [[[-1, -1, 0]], [[0, 1, 2], [-1, -1, 0]], [[-1, 0, 1]]], ids=str)
def test_blocked_refuses_left_padding_even_of_one_token(key_BK):
    context = Context.of(3, 3, CPU, key_BK=torch.tensor(key_BK))
    with pytest.raises(UnsupportedKernel, match="left padding"):
        attend(*torch.randn(3, len(key_BK), 2, 3, 4), parse("causal & prefix(1)"), kernel="blocked", context=context)


def test_on_a_gpu_flex_compiles_many_programs_and_fails_rather_than_continue_unfused(monkeypatch):
    seen: list[Any] = []

    def compiled(*given: Any, **options: Any) -> Any:
        config = torch._dynamo.config
        seen.append((config.recompile_limit, config.accumulated_recompile_limit, config.fail_on_recompile_limit_hit))

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiled)
    before = torch._dynamo.config.fail_on_recompile_limit_hit
    flex._kernel.__wrapped__("cuda")(1, 2, 3)
    ((each, together, fails),) = seen
    assert min(each, together) >= 4096 and fails and torch._dynamo.config.fail_on_recompile_limit_hit is before


def test_sizes_of_blocks_are_powers_of_2():
    """Triton has no others, and no product of less than 16."""
    for table in fused.SIZES.values():
        for program in ("forward", "to_queries", "to_keys"):
            for size in {"M", "N", "UNEVEN", "num_warps"} & table.get(program, {}).keys():
                value = table[program][size]
                assert value & (value - 1) == 0 and value >= (1 if size == "num_warps" else 16)


def test_a_hashed_key_counts_however_far_away_it_is():
    """It still decides whether a query is alone in its bucket, so a cache keeps it, whatever the window."""
    for text, distance in (("causal & window(4)", 3), ("hashed(1, 2, 3)", None), ("hashed(1, 2, 3) & window(4)", None)):
        assert Attention(Shared(2), parse(text)).build(8).max_distance() == distance


@pytest.mark.parametrize(
    "score_mods, dropout", [((Span(16), Span(32)), 0.0), ((Alibi(),), 0.0), ((Span(16),), 0.1), ((), 0.1)], ids=str
)
def test_fused_has_no_dropout_and_no_term_but_one_soft_mask(score_mods, dropout):
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 2, 64, 32, device="cuda", dtype=torch.bfloat16)
        context = Context.of(64, 64, q.device)
        terms = tuple(one.build(2, 32, 32).bias(q, q, 0.1, context) for one in score_mods)
        one_soft = Request(
            q, q, q, Causal(), (Span(16).build(2, 32, 32).bias(q, q, 0.1, context),), (), context, 0.1, 0.0
        )
        assert fused.unsupported_reason(one_soft) is None
        request = Request(q, q, q, Causal(), terms, (), context, 0.1, dropout)
        assert "no dropout and no score terms but one soft mask" in (fused.unsupported_reason(request) or "")


@pytest.mark.parametrize("depth", [300, 700, 900, 950, 1000, 2000, 5000, 100_000])
@pytest.mark.parametrize("text", ["~", "("])
def test_a_deep_text_is_read_or_refused_in_a_sentence(text, depth):
    try:
        assert isinstance(parse(text * depth + "causal" + ")" * depth * (text == "(")), Pattern)
    except ValueError as error:
        assert "nested too deeply" in str(error) or "too many nested parentheses" in str(error)


def test_parameter_free_forms_have_one_head():
    for form in (Symmetric(4), Asymmetric(4)):
        assert form.heads == form.build(8).heads == 1


def test_on_a_gpu_a_span_alone_is_not_read_by_the_host():
    """Else its window would narrow the pattern."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 2, 4096, 64, device="cuda", dtype=torch.bfloat16)
        request = Request(q, q, q, Causal(), (), (), Context.of(4096, 4096, q.device), 0.1, 0.0)
        chosen, applied = _choose_and_apply(request, [Span(64).build(2, 64, 64)], "auto", False)
    assert chosen is fused and applied.narrowed is None and len(applied.terms) == 1
