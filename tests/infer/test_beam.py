"""Beam search equals its literal definition: cached and uncached, alone and in a batch."""

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

VOCABULARY, END, START, MAX_TOKENS = 5, 0, 1, 5
EMBED, HEAD = Tokens(VOCABULARY), (Language(tied=False, bias=True),)
PROMPTS = [[1, 2, 3, 4], [3], [4, 2], [2, 2, 1]]
SOURCES = torch.tensor([[1, 2, 3, 4], [3, 0, 0, 0], [4, 2, 2, 0], [2, 1, 4, 4]])
VISIBLE = torch.tensor([[True] * 4, [True] + [False] * 3, [True] * 3 + [False], [True] * 4])


def language(seed: int = 0) -> Any:
    return with_unlikely_end(ready(model(score_mods=(Rotary(),), embed=EMBED, outputs=HEAD), seed))


def pair(seed: int = 0) -> Any:
    decoder = model("causal", cross=Attention(Standard(2)), embed=EMBED, position=Sinusoidal(), outputs=HEAD)
    both = ready(EncoderDecoder(encoder=model("full", embed=EMBED, position=Sinusoidal()), decoder=decoder), seed)
    with_unlikely_end(both.decoder)
    return both


def with_unlikely_end(network: Any) -> Any:
    """Makes the end token less likely, so that not every output is short."""
    with torch.no_grad():
        network.outputs[0].bias[END] -= 1.5
    return network


def after_prompt(network: Any, prompt: list[int]) -> spec.LogP:
    @functools.cache
    def log_p(output: tuple[int, ...]) -> list[float]:
        return network(torch.tensor([prompt + list(output)])).logits[0, -1].log_softmax(-1).tolist()

    return log_p


def after_source(network: Any, row: int) -> spec.LogP:
    encoder_output = network.encode(SOURCES[row : row + 1, VISIBLE[row]])

    @functools.cache
    def log_p(output: tuple[int, ...]) -> list[float]:
        return network.decode(torch.tensor([[START, *output]]), encoder_output).logits[0, -1].log_softmax(-1).tolist()

    return log_p


@functools.cache
def cases(seed: int) -> list[tuple[Any, Any, dict[str, Any], list[spec.LogP]]]:
    """A language model and an encoder-decoder: network, inputs, options, and log P of each row computed alone."""
    one, two = language(seed), pair(seed)
    return [
        (one, PROMPTS, {}, [after_prompt(one, prompt) for prompt in PROMPTS]),
        (two, SOURCES, {"visible": VISIBLE, "start": START}, [after_source(two, row) for row in range(len(SOURCES))]),
    ]


@pytest.mark.spec(62)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_beam_of_all_hypotheses_is_exhaustive_search(seed):
    outputs = []
    for network, inputs, options, log_ps in cases(seed):
        for penalty in (0.0, 0.6, 2.0):
            result = beam_search(network, inputs, end=END, max_tokens=4, beam=5**4, length_penalty=penalty, **options)
            assert result == [spec.exhaustive(log_p, END, 4, penalty) for log_p in log_ps]
            outputs += result
    assert len(set(map(len, outputs))) > 1  # the length penalty has an effect


@pytest.mark.spec(62)
@pytest.mark.parametrize("penalty", [0.6, 3.0])
@pytest.mark.parametrize("beam", [1, 3, 7, 12])
@pytest.mark.parametrize("seed", [0, 4, 6])  # with 4 and 6 the condition for a finished sentence matters
def test_beam_search_equals_its_definition_cached_or_not_and_in_a_batch_or_alone(seed, beam, penalty):
    numbers: dict[str, Any] = {"end": END, "max_tokens": MAX_TOKENS, "beam": beam, "length_penalty": penalty}
    for network, inputs, options, log_ps in cases(seed):
        expected = [spec.beam(log_p, END, beam, MAX_TOKENS, penalty) for log_p in log_ps]
        for cached in (True, False):
            assert beam_search(network, inputs, cached=cached, **options, **numbers) == expected
        for row, output in enumerate(expected):
            few = options | ({"visible": VISIBLE[[row]]} if options else {})
            assert beam_search(network, inputs[row : row + 1], **few, **numbers) == [output]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_beam_of_one_is_greedy_decoding(seed):
    for network, inputs, options, log_ps in cases(seed):
        result = beam_search(network, inputs, end=END, max_tokens=9, beam=1, **options)
        assert result == [spec.greedy(log_p, END, 9) for log_p in log_ps]
    one = language(seed)
    texts = generate(one, PROMPTS, 9, temperature=0, stop=(END,))
    result = beam_search(one, PROMPTS, end=END, max_tokens=9, beam=1)
    for prompt, text, output in zip(PROMPTS, texts, result, strict=True):
        assert output == [token for token in text[len(prompt) :] if token != END]


def test_outputs_without_an_end_are_truncated_to_max_tokens():
    network = language()
    with torch.no_grad():
        network.outputs[0].bias[END] = -1e9
    for most in (1, 4):
        result = beam_search(network, PROMPTS, end=END, max_tokens=most, beam=3)
        for prompt, output in zip(PROMPTS, result, strict=True):
            assert output == spec.beam(after_prompt(network, prompt), END, 3, most, 0.6) and len(output) == most


def test_by_default_a_step_reads_one_token_of_each_of_5_hypotheses():
    """The first step reads the prompt, and 4 of the 5 tokens do not end it."""
    network, shapes = language(), list[tuple[int, ...]]()
    with torch.no_grad():
        network.outputs[0].bias[END] = -1e9
    network.body.register_forward_pre_hook(lambda module, arguments: shapes.append(arguments[0].shape[:2]))
    beam_search(network, PROMPTS[:1], end=END, max_tokens=4)
    assert shapes == [(1, 4), (4, 1), (5, 1), (5, 1)]


def test_by_default_the_beam_is_5_and_the_length_penalty_0_6():
    """In a case where other beams and penalties have other outputs."""
    network, inputs, options, log_ps = cases(5)[1]
    result = beam_search(network, inputs, end=END, max_tokens=MAX_TOKENS, **options)
    for beam, penalty in ((5, 0.6), (4, 0.6), (6, 0.6), (5, 0.0), (5, 1.2)):
        expected = [spec.beam(log_p, END, beam, MAX_TOKENS, penalty) for log_p in log_ps]
        assert (result == expected) == ((beam, penalty) == (5, 0.6))


def test_a_search_ends_when_no_hypothesis_can_become_better_than_the_best_output():
    """Not even if it is as good: all tokens are equally likely, and the length does not count."""
    network, steps = language(), list[int]()
    with torch.no_grad():
        for weight in network.outputs.parameters():
            weight.zero_()
    network.body.register_forward_pre_hook(lambda module, arguments: steps.append(len(arguments[0])))
    assert beam_search(network, PROMPTS[:1], end=END, max_tokens=4, beam=5, length_penalty=0.0) == [[]]
    assert steps == [1]


def test_sources_without_padding_need_no_visible():
    network = pair()
    result = beam_search(network, SOURCES, start=START, end=END, max_tokens=MAX_TOKENS)
    assert result == beam_search(
        network, SOURCES, visible=torch.ones(4, 4, dtype=torch.bool), start=START, end=END, max_tokens=MAX_TOKENS
    )
    assert isinstance(network.encode(SOURCES), EncoderOutput)


def test_nan_logits_are_refused():
    network = pair()
    network.decoder.embed.table.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="the logits are NaN or infinite"):
        beam_search(network, SOURCES, start=START, end=END, max_tokens=2)


def test_the_training_mode_is_restored():
    network = pair().train()
    beam_search(network, SOURCES, start=START, end=END, max_tokens=2)
    assert all(module.training for module in network.modules()) and torch.is_grad_enabled()


@pytest.mark.parametrize(
    "wrong, remedy",
    [
        ({"beam": 0}, "1 or more"),
        ({"max_tokens": 0}, "1 or more"),
        ({"length_penalty": -0.1}, "0 or more"),
        ({"length_penalty": torch.nan}, "0 or more"),
        ({"end": 5}, "0 to 4"),
        ({"start": 1}, "leave start"),
        ({"inputs": [[]]}, "start token"),
        ({"max_tokens": 6}, "lower max_tokens"),
    ],
    ids=str,
)
def test_bad_values_are_refused_with_the_remedy(wrong, remedy):
    network = ready(model(position=Learned(8), embed=EMBED, outputs=HEAD))
    options = {"inputs": PROMPTS, "end": END, "max_tokens": 5} | wrong
    with pytest.raises(ValueError, match=remedy):
        beam_search(network, **options)


def test_a_prompt_shorter_than_the_prefix_is_refused():
    network = ready(model("causal | prefix(3)", embed=EMBED, outputs=HEAD))
    with pytest.raises(ValueError, match="a prompt has 1 tokens, but the first 3 are the model's prefix"):
        beam_search(network, PROMPTS, end=END, max_tokens=2)


def test_an_encoder_decoder_needs_a_start_token():
    with pytest.raises(ValueError, match="give start="):
        beam_search(pair(), SOURCES, end=END, max_tokens=3)
