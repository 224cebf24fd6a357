"""A pass names the kernel of each layer, and says where one stores a number for each pair of positions."""

from __future__ import annotations

import pytest
import torch

import everyformer
from everyformer.attention import attend, kernel_use
from everyformer.attention.kernel_use import KernelUse, describe, record_kernels
from everyformer.attention.kernels import request
from everyformer.attention.parse import parse
from everyformer.attention.pattern import Causal, Full


def test_layers_with_the_same_kernel_share_a_line():
    uses = [KernelUse("tiled", 8, 8)] * 3 + [KernelUse("sdpa", 8, 8)] + [KernelUse("tiled", 8, 8)]
    assert describe(uses) == ["layers 1-3, 5: tiled", "layer 4: sdpa"]
    dense = KernelUse("sdpa", 2048, 4096, "padding, or a cache")
    assert describe([dense], "attention") == [
        "attention 1: sdpa, with a mask of 2,048 x 4,096 pairs (padding, or a cache)"
    ]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse kernels from 32 queries on."""
    for module in (attend, request, kernel_use):
        monkeypatch.setattr(module, "LONG", 32)


@pytest.mark.parametrize(
    ("pattern", "dense"),
    [
        (Causal(), ""),
        (Full(), ""),
        (parse("causal & window(4)"), ""),
        (parse("causal & ~(block(8) & stride(3))"), "too many pairs for a sparse kernel"),
    ],
)
def test_a_mask_over_all_pairs_is_named_with_its_reason(short, pattern, dense):
    q = torch.randn(1, 1, 64, 4)
    with record_kernels() as uses:
        attend.attend(q, q, q, pattern)
    (use,) = uses
    assert dense in use.dense and bool(use.dense) == bool(dense)
    assert (use.kernel == "sdpa") == (bool(dense) or type(pattern) in (Causal, Full))


def test_a_network_records_its_layers_and_only_inside_the_context(short):
    network = everyformer.build("sparse-transformer", "tiny", layers=3, stride=16, columns=4)
    token_BT = torch.randint(0, 256, (1, 64))
    with record_kernels() as uses:
        network(token_BT)
    network(token_BT)
    assert describe(uses) == ["layers 1-3: tiled"]
