"""The tiled kernel: dense attention in other views of the memory is the sparse attention that the pattern names."""

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
    "causal & summary(8, 2)",  # the first queries see nothing
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
def test_the_merged_tiles_are_the_pattern(text):
    pattern, qkv = parse(text), draw()
    one, two = (attend(*qkv, pattern, kernel=kernel) for kernel in ("tiled", "reference"))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
    slope = torch.randn_like(one)
    for found, wanted in zip(*(torch.autograd.grad(y, qkv, slope) for y in (one, two)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("text", PATTERNS)
def test_parts_see_disjoint_pairs_and_all_of_the_pattern(text):
    """Read back from what each part answers to values that tell keys apart, under equal scores."""
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


def pairs(part: Tile | FewColumns) -> torch.Tensor:
    """Who sees whom in a part, by its own words."""
    q, k = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    size = part.size
    if isinstance(part, FewColumns):
        number = k % size - (size - part.skip - part.columns)
        last = (number >= 0) & (number < part.columns)
        if not part.shift:
            return (last & (k // size == q // size) & (k <= q)).float()
        return (last & (k // size == q // size - 1) & (number > q % size // (size // part.columns))).float()
    if part.view == "block":
        same = q // size == (k + part.shift) // size
        seen = {"causal": k % size <= q % size, "later": k % size > q % size, "all": k == k}[part.allows]
        return (same & seen).float()
    if part.columns:
        block, number = k // part.shift, k % part.shift - (part.shift - part.skip - part.columns)
        row, column = q // size, block * part.columns + number  # of the T/g rows of the view
        return ((number >= 0) & (number < part.columns) & (column + part.columns <= row)).float()
    return ((q % size == k % size) & (k + part.shift <= q)).float()


@pytest.mark.parametrize("text", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_errs_at_most_twice_as_much_as_the_plain_kernel(text, dtype):
    high = draw()
    pattern, slope = parse(text), torch.randn(BATCH, HEADS, LENGTH, 4, dtype=torch.float64)

    def found(kernel: str, kind: torch.dtype) -> list[torch.Tensor]:
        qkv = [x.detach().to(kind).requires_grad_() for x in high]
        y = attend(*qkv, pattern, kernel=kernel)
        return [y.detach(), *torch.autograd.grad(y, qkv, slope.to(kind))]

    exact = found("reference", torch.float64)
    for fast, plain, true in zip(found("tiled", dtype), found("reference", dtype), exact, strict=True):
        assert (fast - true).square().mean().sqrt() <= 2 * (plain - true).square().mean().sqrt()


@pytest.mark.parametrize(
    "text, options, reason",
    [
        ("causal & window(8)", {"score_mods": [Alibi().build(HEADS, 6, 4)]}, "no score terms"),
        ("causal & window(8)", {"dropout": 0.5}, "no dropout"),
        ("causal & window(8)", {"context": Context.of(32, 32, CPU, key_BK=torch.arange(32)[None])}, "padding"),
        ("causal & window(7)", {}, "not a union of whole tiles; use blocked"),  # 32 is no multiple of 7
        ("causal & window(32)", {}, "not a union of whole tiles"),  # that is all
        ("window(8)", {}, "not a union of whole tiles"),
        ("causal & (window(4) | stride(7))", {}, "not a union of whole tiles"),
        ("by_head(causal & window(8), causal & stride(8), block(8))", {}, "not a union of whole tiles"),
    ],
)
def test_what_it_cannot_serve_it_refuses(text, options, reason):
    with pytest.raises(UnsupportedKernel, match=rf"the kernel tiled does not support this: .*{reason}"):
        attend(*draw(), parse(text), kernel="tiled", **options)


def test_a_rule_that_turns_queries_and_keys_is_served():
    from everyformer.attention.four_term import FourTerm

    score_mod, qkv = FourTerm(8).build(HEADS, 6, 4).double(), draw()
    one, two = (
        attend(*qkv, parse("causal & (window(8) | stride(8))"), [score_mod], kernel=kernel)
        for kernel in ("tiled", "sdpa")
    )
    torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
