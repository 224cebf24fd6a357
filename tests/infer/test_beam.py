"""Beam search equals its definition, written literally; cached, uncached, alone and in a batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from everyformer import (
    Attention,
    EncoderDecoder,
    EncoderOutput,
    Language,
    Learned,
    Rotary,
    Sinusoidal,
    Standard,
    Tokens,
    generate,
)
from everyformer.infer.beam import beam_search
from tests.infer import spec
from tests.network import model, ready

VOCABULARY, END, START, LONGEST = 5, 0, 1, 5
EMBED, HEAD = Tokens(VOCABULARY), (Language(tied=False, bias=True),)
PROMPTS = [[1, 2, 3, 4], [3], [4, 2], [2, 2, 1]]
SOURCES = torch.tensor([[1, 2, 3, 4], [3, 0, 0, 0], [4, 2, 2, 0], [2, 1, 4, 4]])
VISIBLE = torch.tensor([[True] * 4, [True] + [False] * 3, [True] * 3 + [False], [True] * 4])


def language(seed: int = 0) -> Any:
    return late(ready(model(score_mods=(Rotary(),), embed=EMBED, outputs=HEAD), seed))


def pair(seed: int = 0) -> Any:
    decoder = model("causal", cross=Attention(Standard(2)), embed=EMBED, position=Sinusoidal(), outputs=HEAD)
    both = ready(EncoderDecoder(encoder=model("full", embed=EMBED, position=Sinusoidal()), decoder=decoder), seed)
    late(both.decoder)
    return both


def late(network: Any) -> Any:
    """With a less likely end, so that not every answer is short."""
    with torch.no_grad():
        network.outputs[0].bias[END] -= 1.5
    return network


def after_prompt(network: Any, prompt: list[int]) -> spec.LogP:
    @functools.cache
    def log_p(answer: tuple[int, ...]) -> list[float]:
        return network(torch.tensor([prompt + list(answer)])).logits[0, -1].log_softmax(-1).tolist()

    return log_p


def after_source(network: Any, row: int) -> spec.LogP:
    memory = network.encode(SOURCES[row : row + 1, VISIBLE[row]])

    @functools.cache
    def log_p(answer: tuple[int, ...]) -> list[float]:
        return network.decode(torch.tensor([[START, *answer]]), memory).logits[0, -1].log_softmax(-1).tolist()

    return log_p


@functools.cache
def cases(seed: int) -> list[tuple[Any, Any, dict[str, Any], list[spec.LogP]]]:
    """A language model and a pair: the network, its inputs and options, and each row's log P, read one by one."""
    one, two = language(seed), pair(seed)
    return [
        (one, PROMPTS, {}, [after_prompt(one, prompt) for prompt in PROMPTS]),
        (two, SOURCES, {"visible": VISIBLE, "start": START}, [after_source(two, row) for row in range(len(SOURCES))]),
    ]


@pytest.mark.spec(62)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_beam_of_everything_is_exhaustive(seed):
    answers = []
    for network, inputs, options, log_ps in cases(seed):
        for penalty in (0.0, 0.6, 2.0):
            found = beam_search(network, inputs, end=END, longest=4, beam=5**4, penalty=penalty, **options)
            assert found == [spec.exhaustive(log_p, END, 4, penalty) for log_p in log_ps]
            answers += found
    assert len(set(map(len, answers))) > 1  # the penalty tells


@pytest.mark.spec(62)
@pytest.mark.parametrize("penalty", [0.6, 3.0])
@pytest.mark.parametrize("beam", [1, 3, 7])
@pytest.mark.parametrize("seed", [0, 4, 6])  # with 4 and 6 it matters when a sentence is done
def test_a_beam_is_the_literal_one_cached_or_not_and_in_a_batch_or_alone(seed, beam, penalty):
    numbers: dict[str, Any] = {"end": END, "longest": LONGEST, "beam": beam, "penalty": penalty}
    for network, inputs, options, log_ps in cases(seed):
        wanted = [spec.beam(log_p, END, beam, LONGEST, penalty) for log_p in log_ps]
        for cached in (True, False):
            assert beam_search(network, inputs, cached=cached, **options, **numbers) == wanted
        for row, answer in enumerate(wanted):
            few = options | ({"visible": VISIBLE[[row]]} if options else {})
            assert beam_search(network, inputs[row : row + 1], **few, **numbers) == [answer]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_beam_of_one_takes_the_most_likely_token(seed):
    for network, inputs, options, log_ps in cases(seed):
        found = beam_search(network, inputs, end=END, longest=9, beam=1, **options)
        assert found == [spec.greedy(log_p, END, 9) for log_p in log_ps]
    one = language(seed)
    texts = generate(one, PROMPTS, 9, temperature=0, stop=(END,))
    found = beam_search(one, PROMPTS, end=END, longest=9, beam=1)
    for prompt, text, answer in zip(PROMPTS, texts, found, strict=True):
        assert answer == [token for token in text[len(prompt) :] if token != END]


def test_what_has_not_ended_is_cut_off():
    network = language()
    with torch.no_grad():
        network.outputs[0].bias[END] = -1e9
    found = beam_search(network, PROMPTS, end=END, longest=4, beam=3)
    for prompt, answer in zip(PROMPTS, found, strict=True):
        assert answer == spec.beam(after_prompt(network, prompt), END, 3, 4, 0.6) and len(answer) == 4


def test_a_memory_without_padding_needs_no_visible():
    network = pair()
    found = beam_search(network, SOURCES, start=START, end=END, longest=LONGEST)
    assert found == beam_search(
        network, SOURCES, visible=torch.ones(4, 4, dtype=torch.bool), start=START, end=END, longest=LONGEST
    )
    assert isinstance(network.encode(SOURCES), EncoderOutput)


def test_a_broken_model_finds_nothing():
    network = pair()
    network.decoder.embed.table.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="the logits are not numbers"):
        beam_search(network, SOURCES, start=START, end=END, longest=2)


def test_training_goes_on_after():
    network = pair().train()
    beam_search(network, SOURCES, start=START, end=END, longest=2)
    assert all(module.training for module in network.modules()) and torch.is_grad_enabled()


@pytest.mark.parametrize(
    "wrong, remedy",
    [
        ({"beam": 0}, "1 or more"),
        ({"longest": 0}, "1 or more"),
        ({"penalty": -0.1}, "0 or more"),
        ({"penalty": torch.nan}, "0 or more"),
        ({"end": 99}, "0 to 4"),
        ({"start": 1}, "leave start"),
        ({"inputs": [[]]}, "start token"),
        ({"longest": 6}, "lower longest"),
    ],
    ids=str,
)
def test_bad_values_are_refused_with_the_remedy(wrong, remedy):
    network = ready(model(position=Learned(8), embed=EMBED, outputs=HEAD))
    options = {"inputs": PROMPTS, "end": END, "longest": 5} | wrong
    with pytest.raises(ValueError, match=remedy):
        beam_search(network, **options)


def test_a_pair_needs_its_start():
    with pytest.raises(ValueError, match="give start="):
        beam_search(pair(), SOURCES, end=END, longest=3)
