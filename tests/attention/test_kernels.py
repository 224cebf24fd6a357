"""Every kernel has the outputs and gradients of the reference, or raises with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from everyformer.attention.attend import KERNELS, UnsupportedKernel, attend, choose
from everyformer.attention.context import Context, Probe
from everyformer.attention.kernels.blocked import computed_fraction, gathers
from everyformer.attention.kernels.request import Request
from everyformer.attention.parse import parse
from everyformer.attention.pattern import ByHead, Causal, Full, Graph, Pattern, SameDocument, fixed, strided
from everyformer.attention.score_mod import Alibi, ImageBias, Rotary, ScoreMod, ScoreModModule, Shaw, T5Bias
from everyformer.value import Size, Value
from tests.spec import attention as spec

CLOSE = {"rtol": 0.0, "atol": 1e-11}
CPU = torch.device("cpu")
BATCH, HEADS, WIDTH, VALUES, LENGTH = 2, 2, 4, 6, 41  # several of the blocks of 16, the last one not full
FAST = ("sdpa", "blocked")  # with a backward pass anywhere


class Steps(Pattern, Value, frozen=True):
    """Stride as a user might write it, without the order in which it is dense."""

    step: Size

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k) % self.step == 0


class Beyond(Pattern, Value, frozen=True):
    """A pattern of a user that reads the head: head h attends `step` times h positions back."""

    step: Size

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k == self.step * h


PATTERNS = [
    parse(text)
    for text in (
        "full",
        "causal",
        "~causal",
        "causal & window(5)",
        "causal & (window(4) | stride(7))",
        "causal & (block(8) | summary(8, 2))",
        "causal & local(8, 5)",
        "causal & local2d(6, 2, 3, 1, 2)",
        "prefix(3) | window(3)",
        "by_head(causal & window(6), stride(5))",
        "graph(((0, 1), (1, 1), (9, 3), (20, 40), (40, 0), (40, 39)))",
        "beyond(19)",
    )
]
SCORE_MODS: list[tuple[ScoreMod, ...]] = [
    (),
    (Rotary(),),
    (Alibi(),),
    (Shaw(3),),
    (T5Bias(8, 16, bidirectional=True),),
    (ImageBias(7, 6),),
    (Rotary(), Alibi(), T5Bias(8, 16)),
]
SIZES = [(LENGTH, LENGTH), (5, LENGTH), (1, LENGTH)]


def draw(queries: int, keys: int, dtype: torch.dtype = torch.float64, batch: int = BATCH) -> tuple[Tensor, ...]:
    """Returns q, k and v that require gradients."""
    shapes = ((queries, WIDTH), (keys, WIDTH), (keys, VALUES))
    return tuple(torch.randn(batch, HEADS, *shape, dtype=dtype).requires_grad_() for shape in shapes)


def build(score_mods: Sequence[ScoreMod]) -> list[ScoreModModule]:
    return [score_mod.build(HEADS, WIDTH, VALUES) for score_mod in score_mods]


def output_and_gradients(
    qkv: tuple[Tensor, ...],
    pattern: Pattern,
    score_mods: Sequence[ScoreModModule],
    kernel: str,
    context: Context | None = None,
) -> list[Tensor]:
    y = attend(*qkv, pattern, score_mods, context=context, kernel=kernel)
    direction = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    weights = [*qkv, *(table for score_mod in score_mods for table in score_mod.parameters())]
    computed = torch.autograd.grad((y * direction).sum(), weights, materialize_grads=True)
    return [y.detach(), *computed]


@pytest.mark.spec(6, 7)
@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("score_mods", SCORE_MODS, ids=repr)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_kernels_equal_the_reference(pattern: Pattern, score_mods: tuple[ScoreMod, ...], kernel: str) -> None:
    for queries, keys in SIZES:
        qkv, modules = draw(queries, keys), build(score_mods)
        expected = output_and_gradients(qkv, pattern, modules, "reference")
        for one, two in zip(output_and_gradients(qkv, pattern, modules, kernel), expected, strict=True):
            torch.testing.assert_close(one, two, **CLOSE)


@pytest.mark.spec(6, 7)
@pytest.mark.parametrize(
    ("pattern", "score_mods", "queries"),  # every pattern and every score modification once: each is traced by itself
    [(pattern, SCORE_MODS[n % len(SCORE_MODS)], SIZES[n % 3][0]) for n, pattern in enumerate(PATTERNS)],
    ids=str,
)
def test_flex_equals_the_reference(pattern: Pattern, score_mods: tuple[ScoreMod, ...], queries: int) -> None:
    qkv, modules = draw(queries, LENGTH), build(score_mods)
    with torch.no_grad():
        one, two = (attend(*qkv, pattern, modules, kernel=kernel) for kernel in ("flex", "reference"))
    torch.testing.assert_close(one, two, **CLOSE)


@pytest.mark.spec(7, 104, 105)
@pytest.mark.parametrize("queries", [300, 37])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("(window(16) | stride(16))", 2),
        ("(window(16) | stride(16)) & ~window(3)", 2),  # the first queries have no keys, in either part
        ("(block(16) | summary(16, 2))", 1),
    ],
)
def test_blocked_merges_reordered_parts(text: str, parts: int, queries: int) -> None:
    pattern = parse(f"causal & {text}")
    assert len(gathers(pattern, 300, 300, HEADS)) == parts
    qkv, modules = draw(queries, 300, batch=1), build((Shaw(5), Alibi()))
    expected = output_and_gradients(qkv, pattern, modules, "reference")
    for one, two in zip(output_and_gradients(qkv, pattern, modules, "blocked"), expected, strict=True):
        torch.testing.assert_close(one, two, **CLOSE)


@pytest.mark.spec(7)
@pytest.mark.parametrize("kernel", ["reference", *FAST])
@pytest.mark.parametrize("score_mods", [(), (Alibi(),), (Shaw(3),)], ids=repr)
@pytest.mark.parametrize(
    "text", ["prefix(0)", "causal & ~window(3)", "causal & (stride(5) | window(2)) & ~window(3)", "graph(((1, 0),))"]
)
def test_the_output_of_a_query_without_keys_is_zero(text: str, score_mods: tuple[ScoreMod, ...], kernel: str) -> None:
    pattern, qkv = parse(text), draw(LENGTH, LENGTH)
    empty = ~pattern.mask(LENGTH)[0].any(-1)
    assert bool(empty.any())
    y, *gradients = output_and_gradients(qkv, pattern, build(score_mods), kernel)
    assert torch.equal(y[:, :, empty], torch.zeros_like(y[:, :, empty]))
    assert torch.equal(gradients[0][:, :, empty], torch.zeros_like(gradients[0][:, :, empty]))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.spec(7)
def test_the_output_of_a_query_without_keys_is_zero_in_flex() -> None:
    pattern, qkv = parse("causal & ~window(3)"), draw(LENGTH, LENGTH)
    with torch.no_grad():
        y = attend(*qkv, pattern, build((Alibi(),)), kernel="flex")
    assert torch.equal(y[:, :, :3], torch.zeros_like(y[:, :, :3])) and bool(y.isfinite().all())


def contexts() -> dict[str, Context]:
    """Returns side inputs and padding: right, left, of a whole sequence; documents, edges."""
    right = torch.tensor([[0, 1, 2, 3, -1, -1], [0, 1, 2, 3, 4, 5], [-1] * 6])
    left = torch.tensor([[-1, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [-1] * 6])
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1], [3, 2, 1, 1, 2, 3]])
    edges = torch.arange(108).view(3, 6, 6) % 5 < 2
    return {
        "right": Context.of(6, 6, CPU, key_BK=right, documents=documents, edges=edges),
        "left": Context.of(6, 6, CPU, key_BK=left, documents=documents, edges=edges),
        "none": Context.of(6, 6, CPU, documents=documents, edges=edges),
    }


@pytest.mark.spec(7, 71)
@pytest.mark.parametrize(
    "kernel", [name for name in KERNELS if name not in ("fused", "tiled", "hashed")]
)  # they support none of these
@pytest.mark.parametrize("padding", ["right", "left", "none"])
@pytest.mark.parametrize("pattern", [Causal(), SameDocument() | parse("prefix(1)"), Graph()], ids=str)
def test_padding_documents_and_edges_in_every_kernel(pattern: Pattern, padding: str, kernel: str) -> None:
    """Each sequence, without its padding, equals the literal attention over the key sets."""
    context = contexts()[padding]
    if (kernel, padding) == ("blocked", "left") and not isinstance(pattern, Causal):  # which depends on distances alone
        with pytest.raises(UnsupportedKernel, match="left padding"):
            attend(*draw(6, 6, batch=3), pattern, context=context, kernel=kernel)
        return
    with torch.no_grad():
        q, k, v = draw(6, 6, batch=3)
        y = attend(q, k, v, pattern, context=context, kernel=kernel)
    documents, edges = context.side.documents, context.side.edges
    assert documents is not None and edges is not None
    place_BK = context.positions.key_positions().expand(3, 6)
    allows: dict[str, Callable[[int, int, int], bool]] = {
        "causal": lambda b, i, j: j <= i,
        "same_document | prefix(1)": lambda b, i, j: j < 1 or bool(documents[b, i] == documents[b, j]),
        "graph": lambda b, i, j: bool(edges[b, i, j]),
    }
    for b, h in product(range(3), range(HEADS)):
        real = (place_BK[b] >= 0).nonzero()[:, 0]
        sets = [[j for j in range(len(real)) if allows[str(pattern)](b, i, j)] for i in range(len(real))]
        if sets:
            expected = spec.over_sets(q[b, h, real], k[b, h, real], v[b, h, real], sets)
            torch.testing.assert_close(y[b, h, real], expected, **CLOSE)
        assert bool(y[b, h].isfinite().all())


@pytest.mark.spec(6)
@pytest.mark.parametrize("kernel", [*FAST, "flex"])
@pytest.mark.parametrize("score_mods", [(), (Rotary(), Alibi())], ids=repr)
@pytest.mark.parametrize("text", ["causal", "causal & (window(16) | stride(16))"])
def test_the_error_in_float32_is_at_most_twice_the_references(
    text: str, score_mods: tuple[ScoreMod, ...], kernel: str
) -> None:
    pattern, modules = parse(text), build(score_mods)
    low = draw(300, 300, torch.float32)
    high = tuple(x.detach().double().requires_grad_() for x in low)
    if kernel == "flex":
        with torch.no_grad():
            exact = [attend(*high, pattern, modules, kernel="reference")]
            plain, fast = ([attend(*low, pattern, modules, kernel=name)] for name in ("reference", kernel))
    else:
        exact = output_and_gradients(high, pattern, modules, "reference")
        plain, fast = (output_and_gradients(low, pattern, modules, name) for name in ("reference", kernel))
    for one, two, true in zip(fast, plain, exact, strict=True):
        assert one.dtype == torch.float32
        assert (one - true).norm() <= 2 * (two - true).norm()  # of all together: the largest single error is random


@pytest.mark.spec(6)
@pytest.mark.parametrize("kernel", ["reference", *FAST])
def test_dropout_drops_single_weights_and_scales_the_rest(kernel: str) -> None:
    """With the identity matrix for values the output is the weights: each is 0 or w / (1 - p), and a fraction p is 0."""
    pattern, p = parse("causal & (window(30) | stride(8))"), 0.3
    q, k, _ = draw(120, 120)
    v = torch.eye(120).expand(BATCH, HEADS, 120, 120)
    with torch.no_grad():
        weights = attend(q, k, v, pattern, kernel="reference")
        dropped = attend(q, k, v, pattern, dropout=p, kernel=kernel)
    kept = dropped != 0
    torch.testing.assert_close(dropped, torch.where(kept, weights / (1 - p), 0.0), **CLOSE)
    allowed = weights > 0
    count = int(allowed.sum())
    gone = 1 - int(kept.sum()) / count
    assert abs(gone - p) < 5 * (p * (1 - p) / count) ** 0.5  # five standard deviations
    with torch.no_grad():
        assert not torch.equal(dropped, attend(q, k, v, pattern, dropout=p, kernel=kernel))


WEIGHTS, PROBE = "Shaw's value terms", "a probe records the attention weights"


@pytest.mark.spec(19, 37)
@pytest.mark.parametrize(
    ("kernel", "options", "reason"),
    [
        ("flex", {"dropout": 0.1}, "FlexAttention has no dropout on the weights; set the attention's dropout to 0"),
        ("flex", {}, "FlexAttention has no backward pass on cpu; train with sdpa, blocked or reference"),
        (
            "blocked",
            {
                "pattern": parse("block(2)"),
                "context": Context.of(6, 6, CPU, key_BK=torch.tensor([[-1, 0, 1, 2, 3, 4]])),
            },
            "left padding.*use sdpa",
        ),
        (
            "blocked",
            {"pattern": parse("block(2)"), "context": Context.of(6, 6, CPU, query_BQ=torch.arange(6)[None])},
            "the index of a key is not its position",
        ),
        *((kernel, {"score_mods": [Shaw(2, values=True)]}, WEIGHTS) for kernel in ("sdpa", "flex", "blocked")),
        *((kernel, {"context": Context.of(6, 6, CPU, probe=Probe())}, PROBE) for kernel in ("sdpa", "flex", "blocked")),
    ],
)
def test_an_unsupported_request_raises_with_its_reason(kernel: str, options: dict[str, Any], reason: str) -> None:
    options = options | {"score_mods": build(options.get("score_mods", ()))}
    qkv = draw(6, 6)
    with pytest.raises(UnsupportedKernel, match=f"the kernel {kernel} does not support this: .*{reason}"):
        attend(*qkv, **options, kernel=kernel)
    assert attend(*qkv, **options, kernel="reference").shape == (BATCH, HEADS, 6, VALUES)


def fraction(pattern: Pattern, length: int) -> float:
    """The fraction of the scores that `blocked` computes."""
    return computed_fraction(Request.of(pattern, length, length, HEADS))


def chosen(pattern: Pattern, queries: int, keys: int, score_mods: Sequence[ScoreMod] = (), **context: Any) -> str:
    """Returns the name of the kernel that `auto` chooses."""
    q, k, v = (torch.zeros(1, HEADS, size, 1) for size in (queries, keys, keys))
    outputs = tuple(score_mod for score_mod in build(score_mods) if score_mod.needs_weights)
    request = Request(q, k, v, pattern, (), outputs, Context.of(queries, keys, CPU, **context), 1.0, 0.0)
    return next(name for name, kernel in KERNELS.items() if kernel is choose(request, "auto"))


@pytest.mark.spec(7)
def test_auto_chooses_by_length_pattern_and_computed_fraction() -> None:
    local = parse("causal & window(64)")
    assert chosen(local, 1024, 1024) == "tiled"
    assert chosen(parse("causal & window(512)"), 1024, 1024) == "tiled"  # on a CPU it skips what a mask would hide
    assert chosen(local, 1024, 2048) == "blocked"  # not all positions are queries
    assert chosen(parse("causal & window(65)"), 1024, 1024) == "blocked"  # not a multiple of the tile
    assert chosen(local, 1023, 2048) == "sdpa"  # fewer than 1,024 queries
    assert chosen(local, 1, 2048) == "sdpa"
    assert chosen(Full(), 1024, 1024) == chosen(Causal(), 1024, 1024) == "sdpa"
    assert chosen(SameDocument(), 1024, 1024, documents=torch.zeros(1, 1024).long()) == "sdpa"  # its superset is full
    padded = torch.arange(1024)[None] - 1  # on the left, which changes no distance
    assert chosen(local, 1024, 1024, key_BK=padded) == "blocked"
    assert chosen(parse("causal & block(64)"), 1024, 1024, key_BK=padded) == "sdpa"
    assert chosen(local, 1024, 1024, probe=Probe()) == "reference"
    assert chosen(local, 1024, 1024, score_mods=(Shaw(2, values=True),)) == "reference"
    chosen_kernels = {}
    for window in (65, 129, 193, 257, 385, 513):
        pattern = parse(f"causal & window({window})")
        chosen_kernels[window] = chosen(pattern, 1024, 1024)
        assert (chosen_kernels[window] == "blocked") == (fraction(pattern, 1024) <= 0.35)
    assert set(chosen_kernels.values()) == {"blocked", "sdpa"}  # 0.35 of the scores lies between
    for sets in (strided(128), fixed(128, 32)):  # the patterns of the Sparse Transformer, in all three uses
        for pattern in (*sets, sets[0] | sets[1], ByHead(sets)):
            assert chosen(pattern, 1024, 1024) in ("tiled", "blocked")
            assert chosen(pattern, 2048, 2048) == "tiled"


@pytest.mark.spec(7, 99, 104, 105)
@pytest.mark.parametrize(
    ("text", "share"),  # of the scores of a dense kernel, at 2,048 positions
    [
        ("causal & window(64)", 127 / 2048),  # 64 queries attend to 64 + 63 keys
        ("block(64)", 64 / 2048),
        ("causal & local(64, 64)", 128 / 2048),
        ("causal & stride(64)", 64 / 2048),  # two residues of 32 queries in a block
        ("causal & (window(64) | stride(64))", (127 + 62) / 2048),
        ("causal & (block(64) | summary(64, 8))", (64 + 31 * 8) / 2048),
    ],
)
def test_blocked_computes_few_scores(text: str, share: float) -> None:
    pattern, length = parse(text), 2048
    assert fraction(pattern, length) == pytest.approx(share, abs=1e-9)
    assert pattern.density(length) <= share < fraction(pattern, length // 2)
    q, k, v = (torch.randn(1, HEADS, length, 4, dtype=torch.float32) for _ in range(3))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        attend(q, k, v, pattern, kernel="blocked")
    parts = len(gathers(pattern, length, length, HEADS))
    # Two products for each score, and a third where parts are merged by their log-sum-exp.
    products = share * HEADS * length**2 * 4 * (2 if parts == 1 else 3)
    assert counter.get_total_flops() // 2 == round(products)


@pytest.mark.spec(104)
@pytest.mark.parametrize("length", [1024, 2048])
def test_reordering_makes_strides_dense(length: int) -> None:
    reordered, unordered = (fraction(parse(f"causal & {name}(64)"), length) for name in ("stride", "steps"))
    assert unordered == 16 / 64  # 16 neighbouring queries attend to 16 of the 64 residues, at any length
    assert reordered == 64 / length


def test_gathers_cached_in_inference_mode_can_be_used_in_training():
    pattern = parse("causal & window(7) & ~stride(31)")
    with torch.inference_mode():
        attend(*draw(64, 64), pattern, kernel="blocked")
    q, k, v = (x.requires_grad_() for x in draw(64, 64))
    attend(q, k, v, pattern, kernel="blocked").sum().backward()
    assert q.grad is not None and bool(torch.isfinite(q.grad).all())
