"""Evaluation, generation and beam search at the limits of their options."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from everyformer import Language, SegmentMemory, generate
from everyformer.infer.beam import beam_search
from everyformer.infer.evaluate import streaming_nll, window_nll
from everyformer.infer.generate import stream
from tests.network import VOCABULARY, model, ready

TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, 23)


def causal(**options):
    return ready(model("causal & window(4)", layers=1, outputs=(Language(),), **options))


def test_segments_and_windows_of_one_token_are_legal_and_score_every_target():
    """Whatever the segments, a memory that covers the window gives the same total."""
    network = causal(memory=SegmentMemory(8))
    total, count = streaming_nll(network, TOKENS, 1)
    assert count == 22
    for segment, rows, lead in ((7, 1, 0), (1, 2, 10), (1, 4, 16), (1, 6, 16)):
        again, targets = streaming_nll(network, TOKENS, segment, rows=rows, lead=lead)
        assert again == pytest.approx(total) and targets == 22
    assert window_nll(causal(), TOKENS, 1, 1)[1] == 22
    with pytest.raises(ValueError, match="segments of 0"):
        streaming_nll(network, TOKENS, 0)
    with pytest.raises(ValueError, match="in 7 rows with a lead of 16"):
        streaming_nll(network, TOKENS, 1, rows=7, lead=16)


def test_the_temperature_of_a_stream_is_1_and_a_context_of_one_token_is_legal():
    network = causal()
    plain = [row for (row,) in stream(network, [[3]], 40, seed=0)]
    assert plain == [row for (row,) in stream(network, [[3]], 40, seed=0, temperature=1.0)]
    assert plain != [row for (row,) in stream(network, [[3]], 40, seed=0, temperature=2.0)]
    (chain,) = generate(network, [[3, 5]], 6, temperature=0, context=1)
    for token, following in pairwise(chain[1:]):
        assert following == int(network(torch.tensor([[token]])).logits[0, -1].argmax())
    with pytest.raises(ValueError, match="a context of 1 or more"):
        generate(network, [[3]], 1, context=0)


@pytest.mark.parametrize("options", [{"context": 4}, {"cached": False}], ids=str)
def test_a_model_with_a_memory_has_no_window(options):
    with pytest.raises(ValueError, match="leave context= and cached=False out"):
        generate(causal(memory=SegmentMemory(8)), [[3]], 1, **options)


def test_an_infinite_length_penalty_is_refused():
    with pytest.raises(ValueError, match=r"length_penalty inf: give .* a finite"):
        beam_search(causal(), [[3]], end=0, max_tokens=2, beam=2, length_penalty=float("inf"))
    assert beam_search(causal(), [[3]], end=0, max_tokens=2, beam=2, length_penalty=0.0)
