"""The plan of sparse attention: disjoint parts whose union is the pattern, and the kernel that `auto` chooses for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from everyformer.attention.attend import KERNELS, attend, choose
from everyformer.attention.check_pattern import check_pattern
from everyformer.attention.context import Context
from everyformer.attention.kernels import blocked, flex, parts
from everyformer.attention.kernels.parts import Kind, plan
from everyformer.attention.kernels.request import Request
from everyformer.attention.parse import parse
from everyformer.attention.pattern import Causal, Pattern, Window
from everyformer.value import Size, Value

LENGTH, HEADS = 40, 4
PATTERNS = {
    "causal & window(7)": [Kind.BAND],
    "window(7) & causal & window(9)": [Kind.BAND],
    "causal & block(8)": [Kind.BAND],
    "causal & local(8, 3)": [Kind.BAND],
    "causal & stride(6)": [Kind.RESIDUE],
    "causal & summary(8, 3, 2)": [Kind.BAND, Kind.DISTANT],
    "causal & (window(7) | stride(6))": [Kind.BAND, Kind.RESIDUE],
    "causal & (window(13) | stride(6))": [Kind.BAND, Kind.RESIDUE],
    "causal & (block(8) | summary(8, 3))": [Kind.BAND, Kind.DISTANT],
    "causal & (stride(6) | window(7))": [Kind.ANY, Kind.ANY],
    "causal & (block(8) | summary(4, 1) | prefix(3))": [Kind.ANY] * 3,
    "window(7)": [Kind.ANY],
    "causal": [Kind.ANY],
}


class Ring(Pattern, Value, frozen=True):
    """A pattern of a user: the positions of the query's residue, within a distance. States both facts."""

    step: Size
    end: Size

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q - k) % self.step == 0) & ((q - k).abs() <= self.end)

    def max_distance(self) -> int:
        return self.end

    def order(self, position: torch.Tensor) -> torch.Tensor:
        return position % self.step


class Wider(Window, frozen=True):
    """Inherits from a pattern of the library, but has another predicate."""

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k).abs() <= 3 * self.size


@pytest.mark.spec(7, 104, 105)
@pytest.mark.parametrize("text", PATTERNS)
def test_parts_are_disjoint_and_their_union_is_the_pattern(text: str) -> None:
    pattern = parse(text)
    found = parts.parts(pattern)
    assert [part.kind for part in found] == PATTERNS[text]
    masks = [part.pattern.mask(LENGTH)[0].long() for part in found]
    assert torch.equal(sum(masks), pattern.mask(LENGTH)[0].long())


@pytest.mark.parametrize(
    ("text", "fractions"),  # of the 1,024 x 1,024 scores that are dense
    [
        ("causal & window(64)", [64 / 1024]),
        ("causal & local(64, 128)", [192 / 1024]),
        ("causal & stride(8)", [1 / 8]),
        ("causal & (block(64) | summary(64, 8))", [64 / 1024, 8 / 64 / 2]),
        ("hashed(2, 8, 16)", [16 / 1024] * 2),
        ("full", [1.0]),
        ("causal", [0.5]),
        ("graph", [1.0]),
        ("causal & graph", [0.0]),  # not known
        ("causal & (window(4) | prefix(3))", [0.0, 0.0]),
    ],
)
def test_the_dense_fraction_of_a_part_is_its_area(text: str, fractions: list[float]) -> None:
    assert [part.fraction(1024) for part in parts.parts(parse(text))] == pytest.approx(fractions)
    assert plan(parse(text), 2).fraction(1024) == pytest.approx(sum(fractions))


def test_few_queries_over_many_keys_compute_only_theirs() -> None:
    """One block of 16 queries and the 64 + 15 keys that they attend to."""
    pattern = parse("causal & window(64)")
    assert blocked.computed_fraction(Request.of(pattern, 16, 2048, 2)) == pytest.approx(79 / 2048)


def test_bucket_parts_are_the_rounds_of_the_hash() -> None:
    found = parts.parts(parse("hashed(3, 8, 5)"))
    assert [(part.kind, part.round, part.back) for part in found] == [(Kind.BUCKET, n, 5) for n in range(3)]


@pytest.mark.parametrize(
    ("text", "heads", "groups"),
    [
        ("causal & window(7)", 4, 1),
        ("by_head(causal & window(7), causal & window(7))", 4, 1),
        ("by_head(causal & window(7), causal & stride(6))", 4, 2),
        ("causal & by_head(window(7), stride(6))", 4, 2),
        ("by_head(causal & window(7), causal & stride(6), causal & block(8))", 4, 4),
        ("by_head(causal & window(7), causal & stride(6), causal & block(8))", 6, 3),
    ],
)
def test_heads_with_the_same_pattern_share_a_group(text: str, heads: int, groups: int) -> None:
    planned, pattern = plan(parse(text), heads), parse(text)
    assert len(planned.groups) == groups
    for head in range(heads):
        assert torch.equal(planned.patterns[head % groups].mask(20)[0], pattern.mask(20, heads=heads)[head])


def test_a_plan_leaves_out_pairs_beyond_a_distance() -> None:
    ((part,),) = plan(Causal(), 2, max_distance=9).groups
    assert (part.kind, part.back) == (Kind.BAND, 9)


def test_a_subclass_with_another_predicate_keeps_no_fact_of_its_parent() -> None:
    """Neither does a kernel take it for its parent."""
    assert Wider(4).max_distance() is None and not Wider(1).is_causal() and Window(1).is_causal()
    assert [part.kind for part in parts.parts(Causal() & Wider(4))] == [Kind.ANY]
    q, k, v = torch.randn(3, 1, 2, 64, 4)
    reference = attend(q, k, v, Causal() & Wider(4), kernel="reference")
    torch.testing.assert_close(attend(q, k, v, Causal() & Wider(4), kernel="blocked"), reference)


def test_a_users_order_and_distance_make_a_pattern_as_sparse_as_ours() -> None:
    """Sorted by residue, blocks gather the keys of few residues; without the order, those of 16."""
    check_pattern(Causal() & Ring(64, 512))
    check_pattern(Ring(8, 17), length=70)
    (ours, theirs) = (
        blocked.computed_fraction(Request.of(pattern, 2048, 2048, HEADS))
        for pattern in (parse("causal & stride(64) & window(513)"), Causal() & Ring(64, 512))
    )
    assert theirs == ours < 0.05
    assert flex.computed_fraction(Request.of(parse("block(128) | prefix(1)"), 512, 512, 2)) == 7 / 16
    q, k, v = torch.randn(3, 1, 2, 100, 4)
    reference = attend(q, k, v, Causal() & Ring(7, 30), kernel="reference")
    torch.testing.assert_close(attend(q, k, v, Causal() & Ring(7, 30), kernel="blocked"), reference)
    torch.testing.assert_close(attend(q[:, :, -5:], k, v, Ring(7, 30)), attend(q, k, v, Ring(7, 30))[:, :, -5:])


class Claims(Pattern, Value, frozen=True):
    """A window of 5 whose facts are wrong, one at a time."""

    wrong: str

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        if self.wrong == "branch" and q.dim() == 0:
            return q == k
        if self.wrong == "numbers":
            return (q - k).abs()
        return (q - k).abs() < 5

    def max_distance(self) -> int:
        return 3 if self.wrong == "distance" else 4

    def is_causal(self) -> bool:
        return self.wrong == "causal"

    def superset(self) -> Pattern:
        return Causal() if self.wrong == "superset" else self

    def order(self, position: torch.Tensor) -> torch.Tensor | None:
        return {"order": position % 9, "short": position[:1]}.get(self.wrong)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("distance", r"max_distance\(\) is 3, but query 0 attends to key 4 in head 0; correct the method"),
        ("causal", r"is_causal\(\) is True, but query 0 attends to key 1"),
        ("superset", r"superset\(\) leaves out an allowed pair, but query 0 attends to key 1"),
        ("branch", "differs from the same pair among others"),
        ("numbers", "returns torch.int64; return booleans"),
        ("order", r"in the order of order\(position\) blocks of 16 queries gather \d+ keys, without it \d+"),
        ("short", r"returns torch.Size\(\[1\]\) for 64 positions; return one key for each"),
    ],
)
def test_a_wrong_fact_is_found_with_a_counterexample(wrong: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^claims\({wrong}\): .*{reason}"):
        check_pattern(Claims(wrong))
    if wrong != "numbers":
        with pytest.raises(ValueError, match=reason):
            check_pattern(Claims(wrong) | parse("prefix(0)"))
    check_pattern(Claims("none"))


@pytest.mark.parametrize("text", [*PATTERNS, "local2d(6, 2, 3, 1, 2)", "by_head(causal, stride(5))", "same_document"])
def test_the_facts_of_our_patterns_hold(text: str) -> None:
    check_pattern(parse(text))


def test_a_stated_is_causal_is_tried_before_a_model_is_built() -> None:
    assert Claims("causal").attends_to_future() and not (Causal() & Claims("causal")).attends_to_future()


def on_a_gpu(pattern: Pattern, length: int = 4096, **options: Any) -> str:
    """The name of the kernel that `auto` chooses on a GPU, without one."""
    dtype, terms, keys = options.pop("dtype", torch.bfloat16), options.pop("terms", ()), options.pop("keys", length)
    with FakeTensorMode():
        q, k = (torch.empty(1, 2, n, 64, device="cuda", dtype=dtype) for n in (length, keys))
    context = Context.of(length, keys, torch.device("cuda"))
    chosen = choose(Request(q, k, k, pattern, terms, (), context, 0.1, options.pop("dropout", 0.0)), "auto")
    return next(name for name, kernel in KERNELS.items() if kernel is chosen)


def test_auto_gathers_for_published_spans_on_a_gpu_and_on_a_cpu() -> None:
    """A soft mask together with relative positions has no fused program; a dense mask would have n x n numbers for each head."""
    spans = Causal() & ~Window(1) & Window(320)
    terms = (lambda b, h, i, j: 0.0 * i, lambda b, h, i, j: 0.0 * j)
    assert on_a_gpu(spans, terms=terms) == "blocked" == on_a_gpu(spans, terms=terms, dropout=0.3)
    assert on_a_gpu(spans, length=4096, keys=4480, terms=terms) == "blocked"


def test_auto_uses_flex_on_a_gpu_for_a_pattern_without_a_fused_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole pass, half or single precision, no dropout, no score terms; the block mask decides how sparse it is."""
    computed = {"fraction": 0.3}
    monkeypatch.setattr(flex, "computed_fraction", lambda request: computed["fraction"])
    assert on_a_gpu(parse("window(700) | prefix(600)")) == "sdpa"  # without values, as in a memory plan
    monkeypatch.setattr(flex, "has_data", lambda x: True)
    custom = parse("window(700) | prefix(600)")  # `blocked` would compute more than a quarter of the scores
    assert on_a_gpu(custom) == "flex"
    assert on_a_gpu(custom, dtype=torch.float32) == "flex"
    for options in ({"length": 512}, {"keys": 8192}, {"dropout": 0.1}, {"dtype": torch.float64}):
        assert on_a_gpu(custom, **options) == "sdpa"
    assert on_a_gpu(custom, terms=(lambda b, h, i, j: 0.0 * i,)) == "sdpa"
    assert on_a_gpu(parse("causal & window(64)")) == "fused" and on_a_gpu(Causal()) == "sdpa"
    computed["fraction"] = 0.9
    assert on_a_gpu(custom) == "sdpa"
