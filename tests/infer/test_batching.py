"""Continuous batching: the text of a request is that of `generate` with its prompt alone, on every member, whatever else is decoded."""

from __future__ import annotations

import pytest
import torch

from everyformer import Attention, Batcher, Chunked, Convolution, Learned, Rotary, Shared, generate
from everyformer.infer import batching
from tests.infer.test_decode import HEAD, LANGUAGE, built
from tests.network import VOCABULARY, model, ready
from tests.network.test_hybrid import TokenShift

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1], [3, 1], [1, 2, 3, 4, 5, 6], [2] * 12]
LENGTHS = [9, 14, 3, 1, 12, 6]
OPTIONS = [{"temperature": 0}, {"seed": 1, "top_k": 20}, {"seed": 2, "top_p": 0.9, "temperature": 1.5}]
MODELS = {
    "learned": model(position=Learned(8), outputs=HEAD),  # after 8 positions the window slides
    "rotary": model(score_mods=(Rotary(),), outputs=HEAD),
    "window": model("causal & window(3)", score_mods=(Rotary(),), outputs=HEAD),
    "convolution": model(net=Convolution(8), outputs=HEAD),
    "chunked": model(Chunked(2, 4, 2, leaks=True), form=Shared(2), outputs=HEAD),
}

MODELS["prefix"] = model("causal | prefix", score_mods=(Rotary(),), outputs=HEAD)
MODELS["prefix, learned"] = model("causal | prefix", position=Learned(8), outputs=HEAD)
MODELS["own entry"] = model(net=TokenShift(), outputs=HEAD)


def served(batcher: Batcher, late: int = 2) -> dict[int, list[int]]:
    """The new tokens of each request; the last `late` ones are submitted after some steps."""
    texts: dict[int, list[int]] = {}
    requests = [(p, n, OPTIONS[i % len(OPTIONS)]) for i, (p, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True))]
    waiting = requests[-late:]
    for prompt, tokens, options in requests[:-late]:
        texts[batcher.submit(prompt, tokens, **options)] = []
    steps = 0
    while batcher.active or batcher.waiting or waiting:
        for event in batcher.step():
            texts[event.number].append(event.token)
        steps += 1
        if waiting and steps >= 3:
            prompt, tokens, options = waiting.pop(0)
            texts[batcher.submit(prompt, tokens, **options)] = []
    return texts


def alone(network) -> list[list[int]]:
    return [
        generate(network, [prompt], tokens, static=False, **OPTIONS[i % len(OPTIONS)])[0][len(prompt) :]
        for i, (prompt, tokens) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    ]


@pytest.mark.parametrize("name", LANGUAGE)
def test_on_every_member_a_request_has_the_text_that_it_has_alone(name, monkeypatch):
    monkeypatch.setattr(batching, "FEWEST", 4)  # so that the slots grow on the way
    network = built(name)
    assert list(served(Batcher(network, rows=3)).values()) == alone(network)


@pytest.mark.parametrize("rows", [1, 2, 32])
@pytest.mark.parametrize("name", MODELS)
def test_a_request_has_the_text_that_it_has_alone(name, rows):
    network = ready(MODELS[name], seed=3)
    assert list(served(Batcher(network, rows=rows)).values()) == alone(network)


def test_a_freed_row_is_taken_by_the_next_waiting_prompt_in_the_next_step():
    network, sizes = ready(MODELS["rotary"]), list[tuple[int, int]]()
    network.body.register_forward_pre_hook(lambda module, arguments: sizes.append(tuple(arguments[0].shape[:2])))
    batcher = Batcher(network, rows=2)
    for tokens in (1, 3, 2):
        batcher.submit([1, 2], tokens)
    steps = []
    while batcher.active or batcher.waiting:
        sizes.clear()
        numbers = [(event.number, event.ended) for event in batcher.step()]
        steps.append((numbers, list(sizes), batcher.active, batcher.waiting))
    assert steps == [
        ([(1, "length"), (2, None)], [(2, 2)], 1, 1),
        ([(2, None), (3, None)], [(1, 1), (1, 2)], 2, 0),
        ([(2, "length"), (3, "length")], [(2, 1)], 0, 0),
    ]


def test_ended_and_free_rows_cost_nothing():
    """Every call of the network has one row for each request that still runs."""
    network, read = ready(MODELS["rotary"]), list[int]()
    network.body.register_forward_pre_hook(lambda module, arguments: read.append(arguments[0].shape[0]))
    batcher = Batcher(network, rows=32)
    for tokens in (1, 2, 4):
        batcher.submit([tokens], tokens)
    while batcher.active or batcher.waiting:
        batcher.step()
    assert read == [3, 2, 1, 1]


def test_a_stop_token_ends_a_request_and_is_its_last_token():
    network = ready(MODELS["rotary"])
    (text,) = generate(network, [[1, 2]], 40, seed=0)
    stop = text[10]
    batcher = Batcher(network)
    batcher.submit([1, 2], 40, seed=0, stop=[stop])
    events = [event for _ in range(40) for event in batcher.step()]
    expected = text[2 : text.index(stop, 2) + 1]
    assert [event.token for event in events] == expected
    assert [event.ended for event in events] == [None] * (len(expected) - 1) + ["stop"]


def test_a_cancelled_request_frees_its_row():
    network = ready(MODELS["rotary"])
    batcher = Batcher(network, rows=1)
    first, second = batcher.submit([1], 9, seed=0), batcher.submit([2], 3, seed=0)
    third = batcher.submit([3], 3, seed=0)
    assert [event.number for event in batcher.step()] == [first] and (batcher.active, batcher.waiting) == (1, 2)
    assert batcher.cancel(first) and batcher.cancel(third) and not batcher.cancel(first) and not batcher.cancel(99)
    assert (batcher.active, batcher.waiting) == (0, 1)
    tokens = []
    while batcher.active or batcher.waiting:
        tokens += [(event.number, event.token) for event in batcher.step()]
    assert tokens == [(second, token) for token in generate(network, [[2]], 3, seed=0)[0][1:]]


@pytest.mark.parametrize("name", ["rotary", "convolution"])
def test_logprobs_are_those_of_the_model_and_an_echo_has_those_of_the_prompt(name):
    network, prompts = ready(MODELS[name]), [[1, 2, 3, 4], [5, 6]]
    batcher = Batcher(network)
    numbers = [batcher.submit(prompt, 3, seed=0, top_k=5, logprobs=2, echo=True) for prompt in prompts]
    events = [event for _ in range(3) for event in batcher.step()]
    for number, prompt in zip(numbers, prompts, strict=True):
        mine = [event for event in events if event.number == number]
        text = [event.token for event in mine]
        assert text[: len(prompt)] == prompt and [event.echo for event in mine] == [True] * len(prompt) + [False] * 3
        assert mine[0].logprob is None and mine[0].top == ()
        log_TV = network(torch.tensor([text])).logits[0].detach().log_softmax(-1)
        for event, log_V in zip(mine[1:], log_TV, strict=False):
            assert event.logprob == pytest.approx(float(log_V[event.token]), abs=1e-10)
            values, ids = log_V.topk(2)
            assert [token for token, _ in event.top] == ids.tolist()
            assert [log for _, log in event.top] == pytest.approx(values.tolist(), abs=1e-10)


def test_without_new_tokens_a_request_ends_with_its_echo():
    batcher = Batcher(ready(MODELS["rotary"]))
    batcher.submit([1, 2, 3], 0, echo=True)
    batcher.submit([4], 0)
    events = batcher.step()
    assert [(event.number, event.token, event.ended) for event in events] == [
        (2, None, "length"),
        (1, 1, None),
        (1, 2, None),
        (1, 3, "length"),
    ]
    assert not batcher.active and batcher.step() == []


def test_generate_with_bounded_rows_gives_the_texts_of_all_prompts_together():
    network = ready(MODELS["learned"])
    prompts = [*PROMPTS, PROMPTS[0], PROMPTS[1], PROMPTS[0]]  # equal prompts have different texts
    expected = generate(network, prompts, 12, seed=5, stop=[4])
    assert generate(network, prompts, 12, seed=5, stop=[4], rows=2) == expected
    with pytest.raises(ValueError, match="with cached= all prompts are generated together; leave rows= out"):
        generate(network, prompts, 2, rows=2, cached=False)


def test_without_rows_many_prompts_share_a_bounded_number_of_rows(monkeypatch):
    network, most = ready(MODELS["rotary"]), list[int]()
    network.body.register_forward_pre_hook(lambda module, arguments: most.append(arguments[0].shape[0]))
    prompts = [[i % VOCABULARY, i % 5] for i in range(200)]
    texts = generate(network, prompts, 3, seed=0)
    assert max(most) == 64 and all(len(text) == 5 for text in texts)


def test_broken_logits_end_their_request_with_an_error():
    network = ready(MODELS["rotary"])
    batcher = Batcher(network)
    number = batcher.submit([1], 3)
    next(iter(network.outputs.parameters())).data.fill_(float("nan"))
    (event,) = batcher.step()
    assert (event.number, event.token, event.ended) == (number, None, "error") and not batcher.active
    with pytest.raises(ValueError, match="load another checkpoint"):
        generate(network, [[1]], 3, rows=1)


@pytest.mark.parametrize(
    "wrong, remedy",
    [
        ({"tokens": -1}, "0 tokens or more"),
        ({"stop": [-1]}, "list of token ids"),
        ({"temperature": -1}, "or more"),
        ({"logprobs": -1}, "0 or more, or None"),
        ({"prompt": []}, "begin with a start token"),
        ({"prompt": [99]}, "outside the vocabulary"),
        ({"prompt": [1] * 9, "echo": True}, "it has 9 tokens and the model 8 positions; give at most 8 tokens"),
    ],
    ids=str,
)
def test_bad_values_are_refused_when_they_are_submitted(wrong, remedy):
    batcher = Batcher(ready(MODELS["learned"]))
    with pytest.raises(ValueError, match=remedy):
        batcher.submit(**{"prompt": [1], "tokens": 3} | wrong)
    assert batcher.waiting == 0


def test_models_that_requests_cannot_serve_are_refused():
    with pytest.raises(ValueError, match="depend on later tokens; leave echo out"):
        Batcher(ready(MODELS["chunked"])).submit([1], 1, echo=True)
    with pytest.raises(ValueError, match="reads encoder_output besides its tokens"):
        Batcher(ready(model(cross=Attention(Shared(2)), outputs=HEAD)))
    with pytest.raises(ValueError, match="decoded together, 1 or more"):
        Batcher(ready(MODELS["rotary"]), rows=0)
