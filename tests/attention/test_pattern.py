"""Patterns: each predicate equals the set that its source defines, and the algebra, the text and the JSON preserve it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everyformer.attention.context import Context
from everyformer.attention.parse import parse
from everyformer.attention.pattern import (
    And,
    Block,
    ByHead,
    Causal,
    Full,
    Graph,
    Local,
    Local2d,
    Or,
    Pattern,
    Prefix,
    SameDocument,
    Stride,
    Summary,
    Visible,
    Window,
    cell,
    fixed,
    strided,
)
from everyformer.value import Count, Value, from_json, to_json
from tests.spec import image, sparse

CPU = torch.device("cpu")
LENGTH, HEADS = 13, 3


class Antidiagonal(Pattern, Value, frozen=True):
    """A pattern of a user: i + j = total."""

    total: Count

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return q + k == self.total


numbers = st.integers(1, 6)
plain = st.one_of(
    st.sampled_from([Full(), Causal()]),
    st.builds(Window, numbers),
    st.builds(Block, numbers),
    st.builds(Stride, numbers),
    st.builds(lambda last, skip, more: Summary(last + skip + more, last, skip), numbers, *[st.integers(0, 3)] * 2),
    st.builds(Prefix, st.integers(0, 6)),
    st.builds(Local, numbers, st.integers(0, 6)),
    st.builds(lambda w, n, *rest: Local2d(w * n, rest[0], w, *rest[1:]), *[numbers] * 3, *[st.integers(0, 4)] * 2),
    st.builds(Antidiagonal, st.integers(0, 12)),
    st.builds(Graph, st.lists(st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)), max_size=4).map(tuple)),
)


def trees(leaves: st.SearchStrategy[Pattern]) -> st.SearchStrategy[Pattern]:
    def combine(parts: st.SearchStrategy[Pattern]) -> st.SearchStrategy[Pattern]:
        return st.one_of(
            st.builds(lambda a, b: a & b, parts, parts),
            st.builds(lambda a, b: a | b, parts, parts),
            st.builds(lambda a: ~a, parts),
            st.builds(ByHead, st.lists(parts, min_size=1, max_size=HEADS).map(tuple)),
        )

    return st.recursive(leaves, combine, max_leaves=6)


patterns = trees(plain)
any_patterns = trees(st.one_of(plain, st.sampled_from([Graph(), SameDocument(), Visible()])))
DOCUMENTS = torch.stack((torch.arange(LENGTH) // 5, torch.arange(LENGTH) // 3))
EDGES = torch.arange(2 * LENGTH**2).view(2, LENGTH, LENGTH) % 3 == 0
swept = settings(max_examples=100, deadline=None, derandomize=True)


def mask(pattern: Pattern) -> torch.Tensor:
    """B, H, Q, K of two sequences with different documents and edges."""
    context = Context.of(LENGTH, LENGTH, CPU, documents=DOCUMENTS, edges=EDGES)
    return context.mask(pattern, 2, HEADS).expand(2, HEADS, LENGTH, LENGTH)


EDGE = ((0, 1), (2, 2), (5, 3), (9, 10), (3, 12))
SETS: dict[str, Callable[[int, int], bool]] = {  # whether j belongs to S_i
    "full": lambda i, j: True,
    "causal": lambda i, j: j <= i,
    "window(3)": lambda i, j: abs(i - j) < 3,
    "block(4)": lambda i, j: i // 4 == j // 4,
    "stride(3)": lambda i, j: (i - j) % 3 == 0,
    "summary(4, 2)": lambda i, j: j % 4 in (2, 3),
    "summary(4, 2, 1)": lambda i, j: j % 4 in (1, 2),
    "prefix(3)": lambda i, j: j in (0, 1, 2),
    "prefix(0)": lambda i, j: False,
    "local(4, 3)": lambda i, j: j in image.memory_1d(i, 4, 3),
    "causal & local(4, 6)": lambda i, j: j in image.memory_1d(i, 4, 6) and j <= i,
    "local(5, 0)": lambda i, j: j in image.memory_1d(i, 5, 0),
    f"graph({EDGE})": lambda i, j: (i, j) in EDGE,
    "graph(((0, 1), (3, 3), (3, 2)))": lambda i, j: (i, j) in ((0, 1), (3, 3), (3, 2)),  # of fewer positions
    "graph(())": lambda i, j: False,
    "antidiagonal(9)": lambda i, j: i + j == 9,
    "~causal": lambda i, j: j > i,
    "causal & window(3)": lambda i, j: i - 3 < j <= i,
    "prefix(2) | window(2)": lambda i, j: j < 2 or i - 1 <= j <= i + 1,
}


class Branching(Pattern, Value, frozen=True):
    """A Python branch on tensors, which no kernel can compute."""

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q if q < 3 else q - k < 2


class Numbers(Pattern, Value, frozen=True):
    """Numbers in place of booleans."""

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (Branching(), "branching fails with RuntimeError .*with & \\| ~ instead of `if`"),
        (Numbers(), "numbers returns torch.int64; return booleans"),
    ],
)
def test_a_predicate_that_cannot_be_computed_raises_with_the_remedy(pattern: Pattern, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        pattern.attends_to_future(8)


@pytest.mark.spec(100)
@pytest.mark.parametrize(
    "rows, columns, height, width, up, side", [(4, 6, 2, 3, 1, 1), (6, 4, 3, 2, 3, 2), (2, 6, 1, 6, 1, 0)]
)
def test_local2d_allows_its_rectangle_and_causal_its_earlier_part(rows, columns, height, width, up, side):
    order = image.block_raster(rows, columns, height, width)
    positions = torch.arange(len(order))
    assert [(int(y), int(x)) for y, x in zip(*cell(positions, columns, height, width), strict=True)] == order
    pattern = Local2d(columns, height, width, up, side)
    memory = [image.memory_2d(i, order, height, width, up, side) for i in range(len(order))]
    allowed = pattern.mask(len(order))[0]
    assert [set(row.nonzero()[:, 0].tolist()) for row in allowed] == memory
    assert torch.equal((Causal() & pattern).mask(len(order))[0], allowed.tril())
    assert int((positions[:, None] - positions).abs()[allowed].max()) <= pattern.max_distance() < 2 * rows * columns
    assert not (Causal() & pattern).attends_to_future() and (height * width == 1 or pattern.attends_to_future())
    with pytest.raises(
        ValueError, match=r"local2d\.width is 4: 6 columns do not divide into such blocks; give a divisor"
    ):
        Local2d(6, 2, 4, 1, 1)


@pytest.mark.spec(7, 55, 71, 72, 99)
@pytest.mark.parametrize("text", SETS)
@pytest.mark.parametrize(("queries", "keys"), [(LENGTH, LENGTH), (3, LENGTH), (1, LENGTH)])
def test_a_predicate_equals_its_set(text: str, queries: int, keys: int) -> None:
    expected = [[SETS[text](i, j) for j in range(keys)] for i in range(keys - queries, keys)]
    assert parse(text).mask(queries, keys)[0].tolist() == expected


@pytest.mark.spec(104, 105, 106)
def test_sparse_patterns_equal_the_papers_sets_with_causality_added() -> None:
    """Child et al. 2019. Weng 2020 (source W) leaves j <= i out of three of the four, and its first A1 has l + 1 keys; the kernel has l."""
    size, last = 4, 2
    computed = (*strided(size), parse(f"causal & window({size + 1})"), *fixed(size, last))
    for i in range(LENGTH):
        expected = (*sparse.strided(i, size), sparse.window_as_written(i, size), *sparse.fixed(i, size, last))
        for pattern, members in zip(computed, expected, strict=True):
            assert set(pattern.mask(LENGTH)[0, i].nonzero()[:, 0].tolist()) == members
        assert set.intersection(*sparse.strided(i, size)) >= {i}  # the two sets overlap in i itself


@pytest.mark.spec(7, 71)
def test_patterns_read_their_side_inputs() -> None:
    documents = torch.tensor([[0, 1, 1, 0, 0], [2, 2, 2, 3, 3]])
    edges = (torch.rand(2, 5, 5) < 0.5) | torch.eye(5, dtype=torch.bool)
    position = torch.tensor([[0, 1, -1, 2, -1], [-1, -1, 0, 1, 2]])
    by_document = Context.of(5, 5, CPU, documents=documents).mask(SameDocument(), 2, 1)
    assert torch.equal(by_document[:, 0], documents[:, :, None] == documents[:, None, :])
    assert torch.equal(Context.of(5, 5, CPU, edges=edges).mask(Graph(), 2, 1)[:, 0], edges)
    own = Graph(((4, 0), (1, 1)))  # a graph with edges of its own does not read those of the call
    assert torch.equal(Context.of(5, 5, CPU, edges=edges).mask(own, 2, 1)[0], own.mask(5))
    of_all = Context.of(5, 5, CPU, documents=documents[:1], edges=edges[:1])  # one row is for every sequence
    for pattern, one in ((SameDocument(), by_document[0, 0]), (Graph(), edges[0])):
        assert torch.equal(of_all.mask(pattern, 2, 1)[:, 0], one.expand(2, 5, 5))
    padded = Context.of(5, 5, CPU, key_BK=position)
    for pattern in (Visible(), Full()):  # no query attends to padding, with `visible` or without
        assert torch.equal(
            padded.mask(pattern, 2, 1).expand(2, 1, 5, 5)[:, 0], (position >= 0)[:, None, :].expand(2, 5, 5)
        )
    assert torch.equal(Visible().allows(0, 0, position[:1].mT, position[1]), (position[1] >= 0).expand(5, 5))
    # A document is read at the position of its token, not at its index.
    shifted = Context.of(5, 5, CPU, key_BK=position, documents=documents, edges=edges)
    there = documents.gather(1, position.clamp(min=0))
    expected, visible = there[:, :, None] == there[:, None, :], position >= 0
    assert torch.equal(shifted.mask(SameDocument(), 2, 1)[:, 0], expected & visible[:, None, :])
    # So is an edge, and no edge leads from padding or to it.
    joined = edges[torch.arange(2)[:, None, None], position[:, :, None], position[:, None, :]]
    expected = joined & visible[:, :, None] & visible[:, None, :]
    assert torch.equal(shifted.mask(Graph(), 2, 1)[:, 0], expected)


@pytest.mark.spec(72)
@swept
@given(st.lists(any_patterns, min_size=1, max_size=4))
def test_heads_take_their_patterns_in_turn(parts: list[Pattern]) -> None:
    dealt = mask(ByHead(tuple(parts)))
    for head in range(HEADS):
        assert torch.equal(dealt[:, head], mask(parts[head % len(parts)])[:, head])


@pytest.mark.spec(72)
@swept
@given(any_patterns, any_patterns)
def test_the_algebra_is_boolean(a: Pattern, b: Pattern) -> None:
    assert torch.equal(mask(a & b), mask(a) & mask(b))
    assert torch.equal(mask(a | b), mask(a) | mask(b))
    assert torch.equal(mask(~a), ~mask(a))
    assert ~~a == a
    for one, two in ((~(a & b), ~a | ~b), (~(a | b), ~a & ~b), (a & b, b & a), (a | b, b | a), (a & (a | b), a)):
        assert torch.equal(mask(one), mask(two))


@pytest.mark.spec(72)
@swept
@given(any_patterns)
def test_text_and_json_give_the_same_pattern_back(pattern: Pattern) -> None:
    for again in (parse(str(pattern)), from_json(to_json(pattern), Pattern)):
        assert again == pattern and hash(again) == hash(pattern) and repr(again) == repr(pattern)


@pytest.mark.spec(72)
@swept
@given(any_patterns, any_patterns)
def test_equal_patterns_are_those_that_print_alike(a: Pattern, b: Pattern) -> None:
    assert (a == b) == (str(a) == str(b))
    assert len({a, b, parse(str(a))}) == len({str(a), str(b)})


@pytest.mark.spec(72)
@swept
@given(patterns, st.integers(1, LENGTH), st.integers(1, 5))
def test_density_blocks_and_future_are_counted_from_the_mask(pattern: Pattern, length: int, size: int) -> None:
    allowed = pattern.mask(length, heads=HEADS)
    pairs = [(h, i, j) for h in range(HEADS) for i in range(length) for j in range(length) if allowed[h, i, j]]
    assert pattern.attends_to_future(length, HEADS) == any(j > i for _, i, j in pairs)
    assert pattern.density(length, HEADS) == len(pairs) / (HEADS * length**2)
    blocks = -(-length // size)
    computed = {(h, i // size, j // size) for h, i, j in pairs}
    assert pattern.computed_blocks(length, size, HEADS) == len(computed) / (HEADS * blocks**2)


def test_the_first_head_is_counted_unless_more_are_given() -> None:
    pattern = ByHead((Window(1), Full()))
    assert (pattern.density(4), pattern.computed_blocks(4, 2)) == (1 / 4, 1 / 2)
    assert torch.equal(pattern.mask(4), torch.eye(4, dtype=torch.bool)[None])
    assert (pattern.density(4, heads=2), pattern.computed_blocks(4, 2, heads=2)) == (5 / 8, 3 / 4)


@pytest.mark.spec(72)
@swept
@given(any_patterns)
def test_a_superset_allows_all_that_the_pattern_allows(pattern: Pattern) -> None:
    whole = pattern.superset()
    assert all(not part.needs or getattr(part, "edges", None) is not None for part in whole.walk())
    assert not bool((mask(pattern) & ~mask(whole)).any())
    for head in range(HEADS):
        alone = pattern.for_head(head)
        assert not any(isinstance(part, ByHead) for part in alone.walk())
        assert torch.equal(mask(alone)[:, head], mask(pattern)[:, head])


@pytest.mark.spec(55)
@pytest.mark.parametrize(
    ("text", "future"),
    [
        ("full", True),
        ("causal", False),
        ("window(1)", False),
        ("window(2)", True),
        ("causal | window(2)", True),
        ("causal & (window(9) | stride(3))", False),
        ("~causal", True),
        ("stride(200)", True),
        ("window(300) & ~window(299)", True),
        ("same_document", True),  # a pattern that reads data may allow any pair
        ("~same_document", True),
        ("causal & ~same_document", False),
        ("causal & graph", False),
        ("graph(((100, 0), (7, 7)))", False),
        ("graph(((0, 100),))", True),
    ],
)
def test_attention_to_the_future_is_found_without_a_length(text: str, future: bool) -> None:
    assert parse(text).attends_to_future() is future


@pytest.mark.spec(72)
def test_values_are_frozen_and_take_lists_for_tuples() -> None:
    with pytest.raises(AttributeError):
        setattr(Window(3), "size", 4)  # noqa: B010
    assert len({Window(3), Window(3), Window(4), Block(4), Block(3)}) == 4
    listed: Any = [Causal(), Window(2)]
    for kind in (ByHead, And, Or):
        assert kind(listed) == kind((Causal(), Window(2))) and hash(kind(listed)) == hash(kind(tuple(listed)))
    edges: Any = [[0, 1], (2, 3)]
    assert hash(Graph(edges)) == hash(Graph(((0, 1), (2, 3))))


@pytest.mark.spec(72)
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Window(-3), "window.size is -3: expected int >= 1"),
        (lambda: Window(0), "window.size is 0: expected int >= 1"),
        (lambda: Window(2.5), "window.size is 2.5: expected int, got float"),
        (lambda: parse(None), "None is not a str; write a pattern as text"),
        (lambda: Block("4"), "block.size is '4': expected int, got str"),
        (lambda: Stride(True), "stride.step is True: expected int, got bool"),
        (lambda: Summary(4, 5), "summary.last is 5: a block has only 4 columns; give 4 or fewer"),
        (
            lambda: Summary(4, 2, 3),
            "summary.last is 2 and skip 3: a block has only 4 columns; give 4 or fewer together",
        ),
        (lambda: Summary(4, 0), "summary.last is 0: expected int >= 1"),
        (lambda: Local2d(6, 2, 3, -1, 1), "local2d.up is -1: expected int >= 0"),
        (lambda: Prefix(-1), "prefix.length is -1: expected int >= 0"),
        (lambda: Graph(((0, -1),)), r"graph.edges is \(\(0, -1\),\): expected int >= 0"),
        (lambda: Graph(((0, 1, 2),)), "graph.edges .* expected array of length 2, got 3"),
        (lambda: ByHead(()), "by_head has no patterns"),
        (lambda: And(()), "& and | combine at least one pattern, but none is given; give one or more"),
        (lambda: Or(()), "& and | combine at least one pattern, but none is given; give one or more"),
        (lambda: ByHead((3,)), "by_head.patterns .* expected a pattern value, got int"),
        (lambda: Causal() & 3, "3 is not a pattern; combine patterns with"),
        (lambda: parse("causal & windw(3)"), "no pattern is named 'windw' .*did you mean window"),
        (lambda: parse("antidiagnal(3)"), "no pattern is named 'antidiagnal' .*did you mean antidiagonal"),
        (lambda: parse("xyz"), "no pattern is named 'xyz' .*the names are .*block, "),
        (lambda: parse("window(-3)"), "window.size is -3"),
        (
            lambda: parse("window"),
            r"window in the pattern 'window': Missing required argument 'size'; write window\(size\)$",
        ),
        (lambda: parse("window(3, 4)"), "window in the pattern .* Extra positional arguments"),
        (lambda: parse("window(size=3)"), "cannot read 'window.size=3.' .* use names, whole numbers"),
        (lambda: parse("causal + full"), "cannot read 'causal . full' in the pattern"),
        (lambda: parse("causal &"), "cannot read the pattern 'causal &'"),
        (lambda: parse(""), "cannot read the pattern ''"),
        (lambda: parse("3"), "'3' is a number or a list, not a pattern"),
        (lambda: parse("3 & causal"), "cannot read the pattern '3 & causal': & | ~ combine patterns only"),
        (lambda: parse("~(1, 2)"), "combine patterns only"),
        (
            lambda: from_json('{"type": "windw", "size": 3}', Pattern),
            "no pattern is named 'windw'; did you mean window",
        ),
        (lambda: from_json('{"type": "window", "size": -3}', Pattern), "not a Pattern: expected int >= 1"),
        (lambda: from_json('{"size": 3}', Pattern), "expected a pattern value, got dict"),
        (lambda: from_json("{", Pattern), "this JSON is not a Pattern"),
    ],
)
def test_a_wrong_pattern_raises_with_its_reason(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()


@pytest.mark.parametrize(
    "text, future",
    [
        ("causal & window(4) | stride(5000)", True),
        ("~window(5000)", True),
        ("stride(97) & stride(89)", True),
        ("causal & window(5000)", False),
        ("causal & (stride(5000) | summary(5000, 1)) | causal & block(4)", False),
        ("by_head(causal, causal & window(9000))", False),
        ("by_head(causal, window(9000))", True),
    ],
)
def test_large_numbers_hide_no_attention_to_the_future(text, future):
    """Only `causal` makes a pattern causal at every length."""
    assert parse(text).attends_to_future() is future


def test_a_graph_is_causal_if_it_has_edges_and_none_leads_to_a_later_position():
    assert Graph(((1, 0), (2, 2))).is_causal() and Graph(()).is_causal()
    assert not Graph(((1, 0), (0, 1))).is_causal() and not Graph().is_causal()


def test_another_base_class_learns_of_a_pattern_of_the_users():
    class Listed:
        __slots__, names = (), list[str]()

        def __init_subclass__(cls) -> None:
            Listed.names.append(cls.__name__)

    class OfAList(Pattern, Listed, Value, frozen=True):
        pass

    assert Listed.names == [OfAList.__name__]


class Hidden(Pattern, Value, frozen=True):
    """Allows the position a hundred later, a number that is in no field."""

    def allows(self, b, h, q, k):
        return (k <= q) | (k == q + 100)


def test_a_pattern_of_the_users_is_causal_only_with_causal():
    assert Hidden().attends_to_future() and Hidden().attends_to_future(128) and not Hidden().attends_to_future(64)
    assert not (Causal() & Hidden()).attends_to_future()


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("causal & window(4)", 3),
        ("block(5)", 4),
        ("causal & local(4, 3)", 6),
        ("causal & local2d(6, 2, 6, 2, 0)", 23),
        ("by_head(window(2), causal & block(5))", 4),
        ("causal & (window(3) | block(2))", 2),
        ("window(9) & block(4) & full", 3),
        ("causal & (window(3) | stride(4))", None),
        ("by_head(window(2), causal)", None),
        ("~window(2)", None),
        ("causal", None),
    ],
)
def test_max_distance_is_the_largest_distance_of_an_allowed_pair(text, end):
    pattern = parse(text)
    assert pattern.max_distance() == end
    if end is not None:
        _, i, j = pattern.mask(24, heads=2).nonzero(as_tuple=True)
        assert int((i - j).abs().max()) == end
