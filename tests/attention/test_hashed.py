"""Attention among keys that hash alike: the hash, the sets, the rounds, and a kernel that needs no square."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer import Attention, Chunked, Context, FourTerm, Hashed, Pattern, Rotary, Shared, T5Bias, parse
from everyformer.attention.attend import attend, choose
from everyformer.attention.hashing import Hash, buckets
from everyformer.attention.kernels import hashed as kernel
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
]
all_patterns = pytest.mark.parametrize("pattern", PATTERNS, ids=str)


def sets(pattern: Hashed | Chunked, k_TE: Tensor, rotation_REN: Tensor) -> list[lsh.Rounds]:
    found = [[lsh.bucket(k_E, r_EN) for k_E in k_TE] for r_EN in rotation_REN]
    if isinstance(pattern, Hashed):
        return lsh.hashed(found, pattern.window)
    return lsh.chunked(found, pattern.chunk, pattern.bidirectional)


def draw(keys: int = LENGTH, queries: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    q, v = torch.randn(BATCH, HEADS, keys, WIDTH), torch.randn(BATCH, HEADS, keys, WIDTH)
    return q[:, :, keys - (queries or keys) :], F.normalize(q, dim=-1), v


def scene_of(pattern: Hashed | Chunked, k: Tensor, **given: Any) -> Context:
    torch.manual_seed(3)
    context = Context.of(**({"queries": k.shape[2], "keys": k.shape[2], "device": CPU} | given))
    hashes = Hash(pattern, HEADS, WIDTH)
    return context.with_hashes(hashes(hashes.buckets(k), context))


@pytest.mark.spec(111)
def test_the_hash_is_the_nearest_of_the_directions_and_their_opposites():
    k, rotation_RHEN = torch.randn(BATCH, HEADS, LENGTH, WIDTH), torch.randn(3, HEADS, WIDTH, 4)
    found = buckets(k, rotation_RHEN)
    for b, h, r in torch.cartesian_prod(torch.arange(BATCH), torch.arange(HEADS), torch.arange(3)):
        assert found[b, h, :, r].tolist() == [lsh.bucket(k_E, rotation_RHEN[r, h]) for k_E in k[b, h]]
    assert set(range(8)) == set(found.flatten().tolist())


def test_keys_that_are_alike_share_a_bucket_more_often():
    """The angle decides, not the length: W's locality-sensitive."""
    x, other = torch.randn(1, 1, 400, WIDTH), torch.randn(1, 1, 400, WIDTH)
    rotation = torch.randn(8, 1, WIDTH, 4)
    own = buckets(x, rotation)
    assert torch.equal(own, buckets(3 * x, rotation))
    share = [float((own == buckets(x + noise * other, rotation)).double().mean()) for noise in (0.1, 0.5, 2.0)]
    assert share[0] > 0.85 and share[0] > share[1] + 0.1 > share[2] + 0.2


@pytest.mark.spec(112, 114, 115)
@all_patterns
def test_who_sees_whom_is_the_papers_set(pattern):
    _, k, _ = draw()
    context = scene_of(pattern, k)
    torch.manual_seed(3)
    rotation_RHEN = Hash(pattern, HEADS, WIDTH).rotation_RHEN
    seen = context.mask(pattern, BATCH, HEADS)
    for b in range(BATCH):
        for h in range(HEADS):
            for i, rounds in enumerate(sets(pattern, k[b, h], rotation_RHEN[:, h])):
                assert set(seen[b, h, i].nonzero()[:, 0].tolist()) == set().union(*map(set, rounds))


@pytest.mark.spec(113, 115)
@all_patterns
def test_attention_is_the_merge_of_the_rounds_with_each_key_counted_once(pattern):
    """Shared queries and keys, keys of length 1; every kernel that serves equals the paper's rounds with -log N_ij."""
    layer = Attention(Shared(HEADS), pattern).build(HEADS * WIDTH)
    x_BTD = torch.randn(BATCH, LENGTH, HEADS * WIDTH)
    q_w, v_w = layer.heads.qkv.weight.chunk(2)
    wanted = []
    for x_TD in x_BTD:
        heads = []
        for h in range(HEADS):
            rows = slice(h * WIDTH, (h + 1) * WIDTH)
            q_TE, v_TE = x_TD @ q_w[rows].T, x_TD @ v_w[rows].T
            found = sets(pattern, torch.stack([lsh.key(q_E) for q_E in q_TE]), layer.hash.rotation_RHEN[:, h])
            heads.append(lsh.attend(q_TE, v_TE, found))
        wanted.append(torch.cat(heads, dim=1) @ layer.heads.out.weight.T)
    for name in ("reference", "sdpa", "hashed") if isinstance(pattern, Hashed) else ("reference", "sdpa"):
        answer, _ = layer(x_BTD, Context.of(LENGTH, LENGTH, CPU, kernel=name), None)
        torch.testing.assert_close(answer, torch.stack(wanted), rtol=0, atol=1e-12)


@pytest.mark.spec(114)
@pytest.mark.parametrize("pattern", [Hashed(1, 2, 1), Hashed(3, 8, 5), Hashed(2, 4, 70)], ids=str)
@pytest.mark.parametrize("keys, queries", [(1, 1), (31, 31), (32, 32), (97, 97), (150, 41)])
@pytest.mark.parametrize("padded", [False, True])
def test_the_kernel_is_the_equation_at_any_length(pattern, keys, queries, padded):
    """Answers and gradients, with holes in the past and the present, and rules that turn, widen or add."""
    key_BK = None
    if padded:
        visible_BK = torch.rand(BATCH, keys) < 0.7
        visible_BK[:, -1] = True
        key_BK = torch.where(visible_BK, visible_BK.cumsum(1) - 1, -1)
    for score_mods in ([], [Rotary()], [FourTerm(4), T5Bias(8, 16)]):
        q, k, v = (x.detach().requires_grad_() for x in draw(keys, queries))
        context = scene_of(pattern, k, queries=queries, key_BK=key_BK)
        modules = [score_mod.build(HEADS, WIDTH, WIDTH) for score_mod in score_mods]
        weights = [weight for module in modules for weight in module.parameters()]
        direction, found = torch.randn(BATCH, HEADS, queries, WIDTH), []
        for name in ("reference", "hashed"):
            answer = attend(q, k, v, pattern, modules, context=context, scale=1.0, kernel=name)
            slopes = torch.autograd.grad((answer * direction).sum(), [q, k, v, *weights], allow_unused=True)
            found.append([answer, *(x for x in slopes if x is not None)])
        for one, two in zip(*found, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-11)


def test_the_kernel_tells_an_earlier_query_nothing_of_a_later_one_even_by_rounding():
    """Other keys from t on leave every earlier answer as it was to the last bit, in single precision too."""
    pattern = Hashed(3, 8, 20)
    for dtype in (torch.float32, torch.float64):
        q, k, v = (x.to(dtype) for x in draw(300))
        for time in (1, 150, 299):
            other_q, other_k, other_v = (
                torch.cat((x[:, :, :time], y[:, :, time:]), 2) for x, y in zip((q, k, v), draw(300), strict=True)
            )
            before, after = (
                attend(a, b, c, pattern, context=scene_of(pattern, b), scale=1.0, kernel="hashed")[:, :, :time]
                for a, b, c in ((q, k, v), (other_q.to(dtype), other_k.to(dtype), other_v.to(dtype)))
            )
            assert torch.equal(before, after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_low_precision_the_kernel_errs_at_most_twice_as_much_as_the_plain_one(dtype):
    pattern, tensors = Hashed(3, 8, 20), [x.to(dtype) for x in draw(200)]
    context, direction = scene_of(pattern, tensors[1]), torch.randn(BATCH, HEADS, 200, WIDTH).to(dtype)
    found = []
    for name, kind in (("reference", torch.float64), ("reference", dtype), ("hashed", dtype)):
        leaves = [x.to(kind).requires_grad_() for x in tensors]
        answer = attend(*leaves, pattern, context=context, scale=1.0, kernel=name)
        found.append([answer.detach(), *torch.autograd.grad(answer, leaves, direction.to(kind))])
    for exact, plain, fast in zip(*found, strict=True):
        errors = [float((x.double() - exact).square().mean().sqrt()) for x in (plain, fast)]
        assert errors[1] <= 2 * errors[0]


def test_the_kernel_drops_weights():
    """Of the same weights, a quarter are 0 and the others larger: the mean over many draws is the answer without."""
    pattern, (q, k, v) = Hashed(2, 2, 4), draw(40)
    context = scene_of(pattern, k)
    plain = attend(q, k, v, pattern, context=context, kernel="hashed")
    dropped = torch.stack(
        [attend(q, k, v, pattern, context=context, dropout=0.25, kernel="hashed") for _ in range(150)]
    )
    assert not torch.equal(dropped[0], dropped[1])
    assert (dropped.mean(0) - plain).abs().max() < 6 * (0.25 / 0.75 / 150) ** 0.5 * v.abs().max()


@pytest.mark.spec(116)
def test_the_scores_grow_with_the_length_and_not_with_its_square():
    """Each query meets at most `rounds` times the window and two chunks; so do the bytes that the backward pass keeps."""
    pattern = Hashed(4, 32, 64)
    for keys in (4096, 16384, 65536):
        per_query = kernel.computed_fraction(Request.of(pattern, keys, keys, 1)) * keys
        assert per_query < 4 * 2 * (64 + 64)
    kept = [_kept(pattern, keys) for keys in (512, 1024, 2048)]
    assert kept[2] - kept[1] < 2.1 * (kept[1] - kept[0])


def _kept(pattern: Hashed, keys: int) -> int:
    q, k, v = (x.requires_grad_() for x in draw(keys))
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        answer = attend(q, k, v, pattern, context=scene_of(pattern, k), kernel="hashed")
    assert answer.requires_grad
    return sum(sizes.values())


def test_auto_takes_the_kernel_where_it_computes_less():
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
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text", ["hashed(2, 4, 3)", "causal & hashed(1, 2, 3) | window(2)", "chunked(2, 4, 3, True, False)"]
)
def test_text_and_bounds(text):
    pattern: Pattern = parse(text)
    assert parse(str(pattern)) == pattern
    assert Hashed(2, 512, 256).attends_to_future() is False  # whatever its numbers
    assert Chunked(2, 4, 3).attends_to_future() and not Chunked(2, 4, 3).superset().attends_to_future()
    assert Chunked(2, 4, 3, bidirectional=True).superset().attends_to_future()
