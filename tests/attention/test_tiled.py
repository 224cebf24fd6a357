"""The tiled kernel: dense attention in other views of the memory equals the sparse attention of the pattern."""

from __future__ import annotations

import pytest
import torch

from everyformer.attention.attend import UnsupportedKernel, attend
from everyformer.attention.context import Context
from everyformer.attention.kernels.parts import parts
from everyformer.attention.kernels.tiled import FewColumns, Tile, tiles_of
from everyformer.attention.parse import parse
from everyformer.attention.score_mod import Alibi

CPU = torch.device("cpu")
BATCH, HEADS, LENGTH = 3, 4, 32
PATTERNS = (
    "causal & window(8)",
    "causal & block(8)",
    "causal & local(8, 8)",
    "causal & local(4, 12)",
    "stride(4) & causal",
    "causal & (window(8) | stride(8))",
    "causal & (block(8) | summary(8, 2))",
    "causal & block(8) | causal & summary(8, 1)",
    "causal & (block(8) | summary(8, 8))",
    "causal & (block(8) | summary(8, 2, 4))",
    "causal & summary(8, 2, 3)",
    "causal & summary(8, 2)",  # the first queries have no keys
    "by_head(causal & block(8), causal & summary(8, 4))",
    "by_head(causal & window(4), causal & stride(4))",
    "causal & (window(4) | stride(8))",
    "causal & (window(16) | stride(8))",  # some strides are in the window
    "by_head(causal & window(8), causal & stride(8), causal & block(8))",  # three patterns for four heads
)


def draw(length: int = LENGTH, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    sizes = ((length, 6), (length, 6), (length, 4))
    return [torch.randn(BATCH, HEADS, *size, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


@pytest.mark.spec(7, 104, 105, 108)
@pytest.mark.parametrize("text", PATTERNS)
def test_merged_tiles_equal_the_reference(text):
    pattern, qkv = parse(text), draw()
    one, two = (attend(*qkv, pattern, kernel=kernel) for kernel in ("tiled", "reference"))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
    gradient = torch.randn_like(one)
    for computed, expected in zip(*(torch.autograd.grad(y, qkv, gradient) for y in (one, two)), strict=True):
        torch.testing.assert_close(computed, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("text", PATTERNS)
def test_tiles_are_disjoint_and_their_union_is_the_pattern(text):
    """The pairs of each tile by its definition, against the masks of the part and of the pattern."""
    pattern = parse(text)
    for one in pattern.patterns if text.startswith("by_head") else (pattern,):
        allowed = torch.zeros(LENGTH, LENGTH)
        for part in parts(one):
            tiles = tiles_of(part)
            assert tiles
            of_part = sum(pairs(tile) for tile in tiles)
            assert torch.equal(of_part, part.pattern.mask(LENGTH)[0].float())
            allowed += of_part
        assert torch.equal(allowed, one.mask(LENGTH)[0].float())


def pairs(tile: Tile | FewColumns) -> torch.Tensor:
    """Returns the pairs of a tile, by its definition."""
    q, k = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    size = tile.size
    if isinstance(tile, FewColumns):
        number = k % size - (size - tile.skip - tile.columns)
        last = (number >= 0) & (number < tile.columns)
        if not tile.shift:
            return (last & (k // size == q // size) & (k <= q)).float()
        return (last & (k // size == q // size - 1) & (number > q % size // (size // tile.columns))).float()
    if tile.view == "block":
        same = q // size == (k + tile.shift) // size
        allowed = {"causal": k % size <= q % size, "later": k % size > q % size, "all": k == k}[tile.allows]
        return (same & allowed).float()
    if tile.columns:
        block, number = k // tile.shift, k % tile.shift - (tile.shift - tile.skip - tile.columns)
        row, column = q // size, block * tile.columns + number  # of the T/g rows of the view
        return ((number >= 0) & (number < tile.columns) & (column + tile.columns <= row)).float()
    return ((q % size == k % size) & (k + tile.shift <= q)).float()


@pytest.mark.parametrize("text", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_at_most_twice_the_references(text, dtype):
    high = draw()
    pattern, gradient = parse(text), torch.randn(BATCH, HEADS, LENGTH, 4, dtype=torch.float64)

    def computed(kernel: str, kind: torch.dtype) -> list[torch.Tensor]:
        qkv = [x.detach().to(kind).requires_grad_() for x in high]
        y = attend(*qkv, pattern, kernel=kernel)
        return [y.detach(), *torch.autograd.grad(y, qkv, gradient.to(kind))]

    exact = computed("reference", torch.float64)
    for fast, plain, true in zip(computed("tiled", dtype), computed("reference", dtype), exact, strict=True):
        assert (fast - true).square().mean().sqrt() <= 2 * (plain - true).square().mean().sqrt()


@pytest.mark.parametrize(
    "text, options, reason",
    [
        ("causal & window(8)", {"score_mods": [Alibi().build(HEADS, 6, 4)]}, "no score terms"),
        ("causal & window(8)", {"dropout": 0.5}, "no dropout"),
        ("causal & window(8)", {"context": Context.of(32, 32, CPU, key_BK=torch.arange(32)[None])}, "padding"),
        ("causal & window(7)", {}, "not a union of whole tiles; use blocked"),  # 32 is not a multiple of 7
        ("causal & window(32)", {}, "not a union of whole tiles"),  # that is `causal`
        ("window(8)", {}, "not a union of whole tiles"),
        ("causal & (window(4) | stride(7))", {}, "not a union of whole tiles"),
        ("by_head(causal & window(8), causal & stride(8), block(8))", {}, "not a union of whole tiles"),
    ],
)
def test_unsupported_requests_raise_with_their_reason(text, options, reason):
    with pytest.raises(UnsupportedKernel, match=rf"the kernel tiled does not support this: .*{reason}"):
        attend(*draw(), parse(text), kernel="tiled", **options)


def test_a_score_mod_that_transforms_queries_and_keys_is_supported():
    from everyformer.attention.four_term import FourTerm

    score_mod, qkv = FourTerm(8).build(HEADS, 6, 4).double(), draw()
    one, two = (
        attend(*qkv, parse("causal & (window(8) | stride(8))"), [score_mod], kernel=kernel)
        for kernel in ("tiled", "sdpa")
    )
    torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
