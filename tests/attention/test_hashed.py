"""Attention among similar keys: the hash, the key sets, the rounds, and a kernel with linear cost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from everyformer import (
    Attention,
    Chunked,
    Context,
    FourTerm,
    Hashed,
    Pattern,
    Rotary,
    RoundCounts,
    Shared,
    T5Bias,
    parse,
)
from everyformer.attention.attend import attend, choose
from everyformer.attention.hashing import Hash, buckets
from everyformer.attention.kernels.request import Request
from tests.spec import lsh

BATCH, HEADS, WIDTH, LENGTH = 2, 2, 6, 19
CPU = torch.device("cpu")
PATTERNS: list[Hashed | Chunked] = [
    Hashed(1, 2, 3),
    Hashed(3, 4, 2),
    Hashed(2, 8, 50),
    Chunked(1, 4, 4),
    Chunked(3, 4, 5),
    Chunked(2, 2, 4, bidirectional=True),
    Chunked(2, 4, 1, bidirectional=True),
    Chunked(2, (4, 2), 3),
]
all_patterns = pytest.mark.parametrize("pattern", PATTERNS, ids=str)


def sets(pattern: Hashed | Chunked, k_TE: Tensor, rotation_REN: Tensor) -> list[lsh.Rounds]:
    factors = pattern.factors if isinstance(pattern, Chunked) else (pattern.buckets,)
    computed = [[lsh.product_bucket(k_E, r_EN, factors) for k_E in k_TE] for r_EN in rotation_REN]
    if isinstance(pattern, Hashed):
        return lsh.hashed(computed, pattern.window)
    return lsh.chunked(computed, pattern.chunk, pattern.bidirectional)


def draw(keys: int = LENGTH, queries: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    q, v = torch.randn(BATCH, HEADS, keys, WIDTH), torch.randn(BATCH, HEADS, keys, WIDTH)
    return q[:, :, keys - (queries or keys) :], F.normalize(q, dim=-1), v


def context_of(pattern: Hashed | Chunked, k: Tensor, **given: Any) -> Context:
    torch.manual_seed(3)
    context = Context.of(**({"queries": k.shape[2], "keys": k.shape[2], "device": CPU} | given))
    hashes = Hash(pattern, HEADS, WIDTH)
    return context.with_hashes(hashes(hashes.buckets(k), context))


@pytest.mark.spec(111)
def test_the_hash_is_the_nearest_direction_or_its_opposite():
    k, rotation_RHEN = torch.randn(BATCH, HEADS, LENGTH, WIDTH), torch.randn(3, HEADS, WIDTH, 4)
    computed = buckets(k, rotation_RHEN)
    for b, h, r in torch.cartesian_prod(torch.arange(BATCH), torch.arange(HEADS), torch.arange(3)):
        assert computed[b, h, :, r].tolist() == [lsh.bucket(k_E, rotation_RHEN[r, h]) for k_E in k[b, h]]
    assert set(range(8)) == set(computed.flatten().tolist())


def test_similar_keys_share_a_bucket_more_often():
    """The angle decides, not the length (locality-sensitive)."""
    x, other = torch.randn(1, 1, 400, WIDTH), torch.randn(1, 1, 400, WIDTH)
    rotation = torch.randn(8, 1, WIDTH, 4)
    own = buckets(x, rotation)
    assert torch.equal(own, buckets(3 * x, rotation))
    share = [float((own == buckets(x + noise * other, rotation)).double().mean()) for noise in (0.1, 0.5, 2.0)]
    assert share[0] > 0.85 and share[0] > share[1] + 0.1 > share[2] + 0.2


@pytest.mark.spec(112, 114, 115)
@all_patterns
def test_allowed_pairs_are_those_of_the_paper(pattern):
    _, k, _ = draw()
    context = context_of(pattern, k)
    torch.manual_seed(3)
    rotation_RHEN = Hash(pattern, HEADS, WIDTH).rotation_RHEN
    allowed = context.mask(pattern, BATCH, HEADS)
    for b in range(BATCH):
        for h in range(HEADS):
            for i, rounds in enumerate(sets(pattern, k[b, h], rotation_RHEN[:, h])):
                assert set(allowed[b, h, i].nonzero()[:, 0].tolist()) == set().union(*map(set, rounds))


def test_a_bucket_of_a_hundred_keys_is_apart_from_the_next():
    """Each key attends to all earlier keys of its bucket and to none of another."""
    pattern = Hashed(1, 2, 10_000)
    _, k, _ = draw(200)
    bucket_BHK = Hash(pattern, HEADS, WIDTH).buckets(k)[..., 0]
    context = Context.of(200, 200, CPU)
    context = context.with_hashes(Hash(pattern, HEADS, WIDTH)(bucket_BHK[..., None], context))
    same_BHKK = bucket_BHK[..., None] == bucket_BHK[..., None, :]
    assert bucket_BHK.double().mean().item() == pytest.approx(0.5, abs=0.3)
    allowed = context.mask(pattern, BATCH, HEADS)
    assert torch.equal(allowed.tril(-1), same_BHKK.tril(-1)) and not allowed.triu(1).any()


@pytest.mark.spec(113, 115)
@all_patterns
@pytest.mark.parametrize("once", [True, False])
def test_attention_merges_the_rounds_and_counts_each_key_once(pattern, once):
    """Shared queries and keys, keys of length 1; every kernel that supports it equals the paper's rounds with -log N_ij.

    With `RoundCounts` a key counts once for each round that has it, as in the published code.
    """
    if not once and isinstance(pattern, Hashed):
        pytest.skip("the published code has no such pattern")
    layer = Attention(Shared(HEADS), pattern, () if once else (RoundCounts(),)).build(HEADS * WIDTH)
    x_BTD = torch.randn(BATCH, LENGTH, HEADS * WIDTH)
    q_w, v_w = layer.heads.qkv.weight.chunk(2)
    expected = []
    for x_TD in x_BTD:
        heads = []
        for h in range(HEADS):
            rows = slice(h * WIDTH, (h + 1) * WIDTH)
            q_TE, v_TE = x_TD @ q_w[rows].T, x_TD @ v_w[rows].T
            computed = sets(pattern, torch.stack([lsh.key(q_E) for q_E in q_TE]), layer.hash.rotation_RHEN[:, h])
            heads.append(lsh.attend(q_TE, v_TE, computed, once))
        expected.append(torch.cat(heads, dim=1) @ layer.heads.out.weight.T)
    for name in ("reference", "sdpa", "hashed") if isinstance(pattern, Hashed) else ("reference", "sdpa", "blocked"):
        output, _ = layer(x_BTD, Context.of(LENGTH, LENGTH, CPU, kernel=name), None)
        torch.testing.assert_close(output, torch.stack(expected), rtol=0, atol=1e-12)


@pytest.mark.spec(114)
@pytest.mark.parametrize("pattern", [Hashed(1, 2, 1), Hashed(3, 8, 5), Hashed(2, 4, 70)], ids=str)
@pytest.mark.parametrize("keys, queries", [(1, 1), (31, 31), (32, 32), (97, 97), (150, 41)])
@pytest.mark.parametrize("padded", [False, True])
def test_the_kernel_equals_the_reference_at_any_length(pattern, keys, queries, padded):
    """Outputs and gradients, with padding among cached and new keys, and score modifications that transform, widen or add."""
    key_BK = None
    if padded:
        visible_BK = torch.rand(BATCH, keys) < 0.7
        visible_BK[:, -1] = True
        key_BK = torch.where(visible_BK, visible_BK.cumsum(1) - 1, -1)
    for score_mods in ([], [Rotary()], [FourTerm(4), T5Bias(8, 16)]):
        q, k, v = (x.detach().requires_grad_() for x in draw(keys, queries))
        context = context_of(pattern, k, queries=queries, key_BK=key_BK)
        modules = [score_mod.build(HEADS, WIDTH, WIDTH) for score_mod in score_mods]
        weights = [weight for module in modules for weight in module.parameters()]
        direction, computed = torch.randn(BATCH, HEADS, queries, WIDTH), []
        for name in ("reference", "hashed"):
            output = attend(q, k, v, pattern, modules, context=context, scale=1.0, kernel=name)
            gradients = torch.autograd.grad((output * direction).sum(), [q, k, v, *weights], allow_unused=True)
            computed.append([output, *(x for x in gradients if x is not None)])
        for one, two in zip(*computed, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-11)


def test_later_tokens_do_not_change_earlier_outputs_by_a_bit():
    """Other tokens from t on leave every earlier output unchanged to the last bit, in float32 and float64."""
    pattern = Hashed(3, 8, 20)
    for dtype in (torch.float32, torch.float64):
        q, k, v = (x.to(dtype) for x in draw(300))
        for time in (1, 150, 299):
            other_q, other_k, other_v = (
                torch.cat((x[:, :, :time], y[:, :, time:]), 2) for x, y in zip((q, k, v), draw(300), strict=True)
            )
            before, after = (
                attend(a, b, c, pattern, context=context_of(pattern, b), scale=1.0, kernel="hashed")[:, :, :time]
                for a, b, c in ((q, k, v), (other_q.to(dtype), other_k.to(dtype), other_v.to(dtype)))
            )
            assert torch.equal(before, after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_in_low_precision_is_at_most_twice_the_references(dtype):
    pattern, tensors = Hashed(3, 8, 20), [x.to(dtype) for x in draw(200)]
    context, direction = context_of(pattern, tensors[1]), torch.randn(BATCH, HEADS, 200, WIDTH).to(dtype)
    computed = []
    for name, kind in (("reference", torch.float64), ("reference", dtype), ("hashed", dtype)):
        leaves = [x.to(kind).requires_grad_() for x in tensors]
        output = attend(*leaves, pattern, context=context, scale=1.0, kernel=name)
        computed.append([output.detach(), *torch.autograd.grad(output, leaves, direction.to(kind))])
    for exact, plain, fast in zip(*computed, strict=True):
        errors = [float((x.double() - exact).square().mean().sqrt()) for x in (plain, fast)]
        assert errors[1] <= 2 * errors[0]


def test_the_kernel_has_dropout():
    """A quarter of the weights are 0 and the others larger: the mean over many draws is the output without dropout."""
    pattern, (q, k, v) = Hashed(2, 2, 4), draw(40)
    context = context_of(pattern, k)
    plain = attend(q, k, v, pattern, context=context, kernel="hashed")
    dropped = torch.stack(
        [attend(q, k, v, pattern, context=context, dropout=0.25, kernel="hashed") for _ in range(150)]
    )
    assert not torch.equal(dropped[0], dropped[1])
    assert (dropped.mean(0) - plain).abs().max() < 6 * (0.25 / 0.75 / 150) ** 0.5 * v.abs().max()


@pytest.mark.spec(116)
def test_operations_and_memory_grow_as_l_log_l():
    """Counted from the products that run and the tensors that are kept, with twice as many buckets for twice the length: it costs at
    most 2 log(2 L) / log L times as much, where dense attention costs 4 times as much. As in the paper the hash is not counted."""
    lengths = (256, 512, 1024, 2048)
    patterns = [Hashed(2, 2 * length // 64, 32) for length in lengths]
    for measure in (_operations, _saved_bytes):
        costs = [measure(pattern, length) for pattern, length in zip(patterns, lengths, strict=True)]
        for length, cost, doubled in zip(lengths, costs, costs[1:], strict=False):
            assert 1.9 * cost < doubled < 2 * math.log(2 * length) / math.log(length) * cost
    assert 3.9 < _operations("full", 1024) / _operations("full", 512) < 4.1
    assert _operations(patterns[-1], 2048) < _operations("full", 2048) / 4


def _operations(pattern: Hashed | str, keys: int) -> int:
    q, k, v = draw(keys)
    given = {} if isinstance(pattern, str) else {"context": context_of(pattern, k), "kernel": "hashed"}
    with FlopCounterMode(display=False) as counter:
        attend(q, k, v, parse(pattern) if isinstance(pattern, str) else pattern, **({"kernel": "reference"} | given))
    return counter.get_total_flops()


def _saved_bytes(pattern: Hashed, keys: int) -> int:
    q, k, v = (x.requires_grad_() for x in draw(keys))
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = attend(q, k, v, pattern, context=context_of(pattern, k), kernel="hashed")
    assert output.requires_grad
    return sum(sizes.values())


def test_auto_uses_the_kernel_if_it_computes_few_scores():
    pattern = Hashed(2, 16, 32)

    def chosen(keys: int, queries: int) -> Any:
        q, k, v = (torch.empty(1, 1, n, 4) for n in (queries, keys, keys))
        context = Context.of(queries, keys, CPU, hashes=torch.zeros(1, 1, 3, keys + 1, dtype=torch.long))
        return choose(Request(q, k, v, pattern, (), (), context, 1.0, 0.0), "auto").__name__.split(".")[-1]

    assert [chosen(2048, 2048), chosen(512, 512), chosen(2048, 1)] == ["hashed", "sdpa", "sdpa"]


ELSEWHERE = Context.of(5, 5, CPU, query_BQ=torch.zeros(1, 5, dtype=torch.long), hashes=torch.zeros(1, 1, 1, 1))


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: Hashed(2, 5, 3),
            "hashed.buckets is 5: half of them are the opposite directions of the others; give an even number",
        ),
        (lambda: parse("chunked(2, 3, 4)"), "chunked.buckets is 3"),
        (lambda: parse("chunked(4, (), 1)"), "chunked.buckets has no numbers; give at least one"),
        (lambda: Hashed(2, 4, 3).mask(5), "the patterns hashed and chunked need hashed keys"),
        (lambda: attend(*draw(5), Hashed(2, 4, 3), kernel="hashed"), "attend within a model, which hashes them"),
        (
            lambda: attend(*draw(5), parse("causal"), kernel="hashed"),
            "the pattern causal is not hashed(...) alone; use sdpa",
        ),
        (
            lambda: attend(*draw(5), Hashed(2, 4, 3), kernel="hashed", context=ELSEWHERE),
            "the queries are not among the keys; use sdpa",
        ),
    ],
)
def test_wrong_use_raises_with_its_reason(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text", ["hashed(2, 4, 3)", "causal & hashed(1, 2, 3) | window(2)", "chunked(2, 4, 3, True, False)"]
)
def test_text_round_trips_and_supersets_hold(text):
    pattern: Pattern = parse(text)
    assert parse(str(pattern)) == pattern
    assert Hashed(2, 512, 256).attends_to_future() is False  # whatever its numbers
    assert Chunked(2, 4, 3).attends_to_future() and not Chunked(2, 4, 3).superset().attends_to_future()
    assert Chunked(2, 4, 3, bidirectional=True).superset().attends_to_future()
