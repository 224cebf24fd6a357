"""Bits by position from an empty memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from everyformer import build
from everyformer.study.positions import bits_by_position, position_groups


@pytest.mark.parametrize("name", ["transformer-xl", "lstm"])
def test_bits_are_those_of_each_position_after_a_start_without_memory(name):
    """In segments as in one pass, because nothing is forgotten within the length of the memory."""
    torch.manual_seed(0)
    network = build(name, "tiny", width=16, vocabulary=11, memory=32).double()
    token_N = np.random.default_rng(0).integers(0, 11, 50)
    whole, pieces = (
        bits_by_position(network, token_N, 12, segment=segment, windows=3, seed=1) for segment in (None, 5)
    )
    assert pieces == pytest.approx(whole, rel=1e-5)
    expected = []
    for start in np.random.default_rng(1).integers(0, 50 - 12, 3):
        window = torch.from_numpy(token_N[start : start + 13])[None]
        log_p_TV = network.eval()(window[:, :-1]).logits[0].detach().log_softmax(-1)
        expected.append([-float(log_p_TV[t, window[0, t + 1]]) / math.log(2) for t in range(12)])
    assert whole == pytest.approx(np.mean(expected, axis=0), rel=1e-5)
    with pytest.raises(ValueError, match="length is 50, but the text has 50 tokens; give 1 to 49"):
        bits_by_position(network, token_N, 50)


def test_groups_of_positions_double():
    assert position_groups(12) == [(0, 1), (1, 2), (2, 4), (4, 8), (8, 12)]
    assert position_groups(1) == [(0, 1)]
