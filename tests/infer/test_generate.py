"""Generating: the cache, the batch and the sliding context change no token; temperature does what its equation says."""

from __future__ import annotations

import pytest
import torch

from everyformer import (
    Attention,
    Classify,
    EncoderDecoder,
    EncoderOutput,
    Language,
    Learned,
    PreNorm,
    Rotary,
    Sinusoidal,
    Standard,
    generate,
    sample,
)
from everyformer.infer.generate import stream
from tests.network import close, model, randn, ready, tokens
from tests.spec import network as spec

HEAD = (Language(tied=False, bias=True),)
WAYS = {
    "learned": model(position=Learned(8), outputs=HEAD),  # after 8 positions the context slides
    "rotary": model(score_mods=(Rotary(),), outputs=HEAD),
    "window": model("causal & window(3)", position=Sinusoidal(), outputs=HEAD),
}
PROMPTS = [[1, 2, 3, 4], [5], [6, 7]]


def likeliest(network, text: list[int]) -> int:
    return int(network(torch.tensor([text])).logits[0, -1].argmax())


@pytest.mark.spec(57, 58)
@pytest.mark.parametrize("context", [None, 5])
@pytest.mark.parametrize("way", WAYS)
def test_the_next_token_is_the_models_on_the_last_tokens_of_the_context(way, context):
    """B's loop, literally: cached and uncached, prompts alone and together, within the context and past it."""
    network, count = ready(WAYS[way], seed=3), 14
    length = context or network.limit or 99
    wanted = [spec.continue_text(lambda text: likeliest(network, text), row, count, length) for row in PROMPTS]
    assert len({token for row in wanted for token in row}) > 5  # no dull loop of one token
    for cached in (True, False):
        options = {"temperature": 0, "context": context, "cached": cached}
        assert generate(network, PROMPTS, count, **options) == wanted
        assert [generate(network, [row], count, **options)[0] for row in PROMPTS] == wanted


@pytest.mark.spec(57)
@pytest.mark.parametrize("way", WAYS)
def test_a_seed_means_the_same_text_cached_or_not(way):
    network = ready(WAYS[way])
    texts = [generate(network, PROMPTS, 12, seed=seed, cached=cached) for seed in (0, 1) for cached in (True, False)]
    assert texts[0] == texts[1] and texts[2] == texts[3]
    assert texts[0] != texts[2]
    assert all(
        text[: len(row)] == row and len(text) == len(row) + 12 for text, row in zip(texts[0], PROMPTS, strict=True)
    )


@pytest.mark.spec(57)
def test_a_prompt_longer_than_the_context_is_read_from_its_end():
    network, prompt = ready(WAYS["learned"]), tokens(1, 20).tolist()
    found = generate(network, prompt, 3, temperature=0)[0]
    assert found == spec.continue_text(lambda text: likeliest(network, text), prompt[0], 3, 8)


@pytest.mark.spec(58)
def test_temperature_0_is_the_most_likely_token():
    logits_BV = randn(50, 17)
    assert torch.equal(sample(logits_BV, 0), logits_BV.argmax(-1))


@pytest.mark.spec(57)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_by_their_tempered_probabilities(temperature):
    logits, count = randn(5), 40_000
    share = spec.softmax_with_temperature(logits, temperature)
    drawn = sample(logits.expand(count, -1), temperature, torch.Generator().manual_seed(0))
    found = torch.bincount(drawn, minlength=5) / count
    std = (share * (1 - share) / count).sqrt()
    assert ((found - share).abs() < 4 * std).all()


@pytest.mark.spec(58)
def test_a_falling_temperature_ends_in_the_most_likely_token():
    logits = randn(5)
    shares = [
        spec.softmax_with_temperature(logits, temperature)[logits.argmax()].item()
        for temperature in (2, 1, 0.5, 0.1, 0.01)
    ]
    assert shares == sorted(shares) and shares[-1] > 1 - 1e-9
    assert (sample(logits.expand(999, -1), 0.001) == logits.argmax()).all()


@pytest.mark.spec(61)
@pytest.mark.parametrize("prompts", [[[]], [[1], []], []])
def test_the_first_token_needs_something_before_it(prompts):
    with pytest.raises(ValueError, match="begin with a start token"):
        generate(ready(WAYS["learned"]), prompts, 1)


@pytest.mark.spec(62)
@pytest.mark.parametrize("cached", [True, False])
def test_a_decoder_goes_on_with_its_source_before_it(cached):
    decoder = model("causal", cross=Attention(Standard(2)), position=Sinusoidal(), outputs=HEAD)
    pair = ready(EncoderDecoder(encoder=model("full"), decoder=decoder))
    memory = pair.encode(tokens(3, 5))
    found = generate(pair.decoder, PROMPTS, 6, temperature=0, encoder_output=memory, cached=cached)
    for row, prompt in enumerate(PROMPTS):
        own = EncoderOutput(memory.x_BSD[row : row + 1])

        def choose(text: list[int], own: EncoderOutput = own) -> int:
            return int(pair.decode(torch.tensor([text]), own).logits[0, -1].argmax())

        assert found[row] == spec.continue_text(choose, prompt, 6, 99)


def test_dropout_is_off_while_generating_and_training_goes_on_after():
    network = ready(model(position=Learned(8), outputs=HEAD, residual=PreNorm(dropout=0.5)))
    wanted = generate(network, PROMPTS, 5, temperature=0)
    assert generate(network.train(), PROMPTS, 5, temperature=0) == wanted
    assert network.training and all(module.training for module in network.modules())


@pytest.mark.spec(65)
def test_among_several_heads_the_language_head_tells_the_next_token():
    several = ready(model(position=Learned(8), outputs=(Classify(3), *HEAD)))
    alone = ready(model(position=Learned(8), outputs=HEAD))
    weights = several.state_dict()
    alone.load_state_dict(
        {
            name: weights[name.replace("outputs.0.", "outputs.1.") if name.startswith("outputs.") else name]
            for name in alone.state_dict()
        }
    )
    close(several(tokens()).logits[1], alone(tokens()).logits)
    assert generate(several, PROMPTS, 5, temperature=0) == generate(alone, PROMPTS, 5, temperature=0)


@pytest.mark.spec(57)
@pytest.mark.parametrize("way", WAYS)
def test_a_row_depends_on_its_prompt_and_not_on_its_neighbours(way):
    network = ready(WAYS[way])
    prompts = [*PROMPTS, PROMPTS[1]]
    texts = generate(network, prompts, 12, seed=5, top_p=0.95)
    assert texts[1] != texts[3]  # equal prompts, other texts
    assert [generate(network, [row], 12, seed=5, top_p=0.95)[0] for row in PROMPTS] == texts[:3]
    turned = generate(network, prompts[::-1], 12, seed=5, top_p=0.95)
    assert turned == [texts[1], texts[2], texts[3], texts[0]]  # equals keep their order


@pytest.mark.parametrize("cached", [True, False])
def test_a_stream_gives_the_tokens_of_generate_as_they_come(cached):
    network = ready(WAYS["learned"])
    options = {"seed": 3, "cached": cached, "stop": (4, 9)}
    wanted, steps = generate(network, PROMPTS, 30, **options), []
    for new in stream(network, PROMPTS, 30, **options):
        steps.append(new)
    columns = [[token for token in row if token is not None] for row in zip(*steps, strict=True)]
    assert [prompt + new for prompt, new in zip(PROMPTS, columns, strict=True)] == wanted


def test_a_row_ends_with_the_first_stop_token_and_the_others_go_on():
    network = ready(WAYS["rotary"])
    whole = generate(network, PROMPTS, 60, seed=0)
    news = [text[len(prompt) :] for prompt, text in zip(PROMPTS, whole, strict=True)]
    uneven = [token for token in range(17) if len({new.index(token) for new in news if token in new}) == len(PROMPTS)]
    for stop in uneven:
        wanted = [prompt + new[: new.index(stop) + 1] for prompt, new in zip(PROMPTS, news, strict=True)]
        assert generate(network, PROMPTS, 60, seed=0, stop=[stop]) == wanted
    assert uneven


def test_the_network_reads_every_token_once():
    """The cache's point: after the prompt one token a step, and nothing after all rows have ended."""
    network, read = ready(WAYS["rotary"]), list[int]()
    handle = network.body.register_forward_pre_hook(lambda module, arguments: read.append(arguments[0].shape[1]))
    generate(network, PROMPTS, 10, temperature=0)
    assert read == [4] + [1] * 9
    read.clear()
    generate(network, PROMPTS, 10, temperature=0, stop=range(17))
    assert read == [4]
    handle.remove()


def test_a_stream_begins_where_it_is_read_and_leaves_the_network_as_it_was():
    network = ready(WAYS["learned"]).train()
    steps = stream(network, PROMPTS, 9)
    assert network.training
    next(steps)
    steps.close()
    assert network.training and torch.is_grad_enabled()


def test_a_window_that_slides_needs_no_memory():
    network = ready(WAYS["learned"])
    options = {"temperature": 0, "context": 4}
    wanted = generate(network, [[1, 2, 3]], 6, cached=False, **options)
    assert generate(network, [[1, 2, 3]], 6, **options) == wanted


@pytest.mark.parametrize(
    "wrong, remedy",
    [
        ({"tokens": -1}, "0 tokens or more"),
        ({"tokens": 2.5}, "0 tokens or more"),
        ({"context": 0}, "context of 1 or more"),
        ({"context": 9}, "at most those"),
        ({"stop": 3}, "list of token ids"),
        ({"stop": [-1]}, "list of token ids"),
        ({"top_k": 0}, "1 or more"),
        ({"temperature": -1}, "or more"),
        ({"prompts": [1, 2]}, "list of lists"),
        ({"prompts": [["a"]]}, "list of lists"),
        ({"prompts": ["12"]}, "list of lists"),
        ({"prompts": [[1.5]]}, "list of lists"),
        ({"topk": 3}, "no option 'topk' of generating; did you mean top_k"),
        ({"visible": torch.ones(1, 1, dtype=torch.bool)}, "no option 'visible'"),
        ({"prompts": [[99]]}, "outside the vocabulary"),
    ],
    ids=str,
)
def test_bad_values_are_refused_with_the_remedy(wrong, remedy):
    with pytest.raises(ValueError, match=r"give model.build\(\)"):
        generate(WAYS["learned"], PROMPTS, 3)
    with pytest.raises(ValueError, match=remedy):
        generate(ready(WAYS["learned"]), **{"prompts": PROMPTS, "tokens": 3} | wrong)
