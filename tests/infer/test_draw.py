"""Programs that draw tokens choose as `choose` does; without a GPU they run in Triton's interpreter (see conftest.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from everyformer.infer import draw as module
from everyformer.infer.draw import draw, draws
from everyformer.infer.sample import choose

pytest.importorskip("triton", reason="on this system there is no Triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY = 37


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 8)


def drawn(logits_BV: Tensor, u_B: Tensor, temperature_B: Tensor) -> tuple[Tensor, Tensor]:
    rows = len(logits_BV)
    result_2B = torch.ones(2, rows, dtype=torch.long, device=DEVICE)
    uniform_NB = torch.stack((torch.zeros_like(u_B), u_B))  # the second step
    draw(logits_BV, uniform_NB, torch.ones(1, dtype=torch.long, device=DEVICE), temperature_B, *result_2B)
    return result_2B[0], result_2B[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 50.0])
def test_programs_draw_the_tokens_that_choose_returns(temperature, dtype):
    torch.manual_seed(0)
    rows = 12
    logits_BV = (4 * torch.randn(rows, VOCABULARY)).to(DEVICE, dtype)
    logits_BV[:, 8:16] = -torch.inf  # a whole block has probability 0, and the last tokens too
    logits_BV[:6, 30:] = -torch.inf
    u_B = torch.rand(rows, dtype=torch.float64, device=DEVICE)
    u_B[::3], u_B[1::3] = 0.0, 1 - 2**-53
    tokens, finite = drawn(logits_BV, u_B, torch.full_like(u_B, temperature))
    assert tokens.tolist() == choose(logits_BV, u_B[:, None], temperature).tolist()
    assert finite.all()


def test_each_row_has_its_temperature():
    logits_BV = torch.randn(2, VOCABULARY, device=DEVICE)
    u_B, temperature_B = (torch.tensor(x, dtype=torch.float64, device=DEVICE) for x in ([0.9, 0.9], [0.0, 2.0]))
    expected = [
        choose(logits_BV[row : row + 1], u_B[row : row + 1, None], t).item() for row, t in enumerate((0.0, 2.0))
    ]
    assert drawn(logits_BV, u_B, temperature_B)[0].tolist() == expected


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_broken_logits_are_marked(value):
    logits_BV = torch.randn(3, VOCABULARY, device=DEVICE)
    logits_BV[1] = value
    half_B = torch.full((3,), 0.5, dtype=torch.float64, device=DEVICE)
    tokens, finite = drawn(logits_BV, half_B, torch.ones_like(half_B))
    assert finite.tolist() == [1, 0, 1]
    assert tokens.min() >= 0 and tokens.max() < VOCABULARY  # so that the next step can embed them


def test_filters_are_not_served():
    assert draws((1.0, None, None, None)) and draws((0.0, 5, 0.9, 0.1)) and draws((1.0, None, 1.0, 0.0))
    assert not any(draws((1.0, *one)) for one in ((5, None, None), (None, 0.9, None), (None, None, 0.1)))
