"""On a GPU a model has the same outputs in every run, to the last bit: `future`, `prefix` and `store` allow no rounding.

A GPU adds what `scatter_add` and its like put into one place in an order that changes from run to run. No model's outputs need them.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from everyformer import (
    Attention,
    FeedForward,
    Layer,
    Model,
    PerToken,
    PreNorm,
    Shaw,
    Stack,
    Standard,
    Tokens,
    build,
    members,
)
from everyformer.attention.context import Context
from everyformer.attention.parse import parse
from everyformer.study.example import example, parts
from everyformer.study.sweep import SCORE_MODS, WIDTH

ADDS = {"scatter_add", "index_add", "index_put", "put", "bincount", "histc", "cumsum", "scatter_reduce"}


class UnorderedSums(TorchDispatchMode):
    """Collects the operations that on a GPU add real numbers in no fixed order, of those listed in PyTorch's documentation of
    `use_deterministic_algorithms`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, given = function.overloadpacket.__name__.rstrip("_"), (*args, *(kwargs or {}).values())
        adds = name in ADDS and args[0].is_floating_point()
        adds = adds and (name not in ("index_put", "put") or any(one is True for one in given))
        if adds and not (
            name == "scatter_reduce" and {"amax", "amin"} & {one for one in given if isinstance(one, str)}
        ):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def unordered(network) -> list[str]:
    with torch.no_grad(), UnorderedSums() as sums:
        for part, source_width in parts(network.double().eval()):
            example(part.value, source_width=source_width).to(dtype=torch.float64).run(part)
    return sums.found


@pytest.mark.parametrize("name", members())
def test_no_member_adds_in_an_order_that_changes(name):
    assert unordered(build(name, "tiny")) == []


@pytest.mark.parametrize("score_mods", SCORE_MODS, ids=str)
def test_no_score_modification_adds_in_an_order_that_changes(score_mods):
    layer = Layer((Attention(Standard(2), parse("causal & window(3) | prefix"), score_mods), FeedForward(8)))
    body = Stack(1, (layer,), PreNorm())
    assert unordered(Model(width=WIDTH, embed=Tokens(7), body=body, outputs=(PerToken(2),)).build()) == []


def test_an_unordered_sum_is_found():
    shaw, context = Shaw(2, values=True).build(2, 4, 4), Context.of(5, 5, torch.device("cpu"))
    weights_BHQK = torch.rand(1, 2, 5, 5)
    with UnorderedSums() as sums:
        output_BHQE = shaw.output(weights_BHQK, context)
    assert sums.found == []
    with UnorderedSums() as sums:
        row_BHQK = (torch.arange(5) - torch.arange(5)[:, None]).clamp(-2, 2).expand_as(weights_BHQK) + 2
        share_BHQR = torch.zeros(1, 2, 5, 5).scatter_add(-1, row_BHQK, weights_BHQK)
    assert sums.found == ["scatter_add"]
    torch.testing.assert_close(share_BHQR @ shaw.value_RE, output_BHQE)
