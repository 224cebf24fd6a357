"""On a GPU, decoding by a CUDA graph gives the texts of decoding with a growing cache, on every member."""

from __future__ import annotations

import pytest
import torch

from everyformer import generate
from everyformer.infer import decode
from tests.infer.test_decode import LANGUAGE, PROMPTS, built

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_recorded_graph_gives_the_texts_of_a_growing_cache(name, monkeypatch):
    monkeypatch.setattr(decode, "FEWEST", 16)  # so that the slots grow, and a second graph is recorded
    network = built(name).cuda()
    for options in ({"temperature": 0}, {"seed": 1, "top_p": 0.9}):
        expected = generate(network, PROMPTS, 24, static=False, **options)
        assert generate(network, PROMPTS, 24, **options) == expected
