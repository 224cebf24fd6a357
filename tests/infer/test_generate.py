"""Generation: the cache, the batch and the sliding context change no token; sampling follows its equations."""

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
MODELS = {
    "learned": model(position=Learned(8), outputs=HEAD),  # after 8 positions the window slides
    "rotary": model(score_mods=(Rotary(),), outputs=HEAD),
    "window": model("causal & window(3)", position=Sinusoidal(), outputs=HEAD),
}
PROMPTS = [[1, 2, 3, 4], [5], [6, 7]]


def most_likely(network, text: list[int]) -> int:
    return int(network(torch.tensor([text])).logits[0, -1].argmax())


@pytest.mark.spec(57, 58)
@pytest.mark.parametrize("context", [None, 5])
@pytest.mark.parametrize("name", MODELS)
def test_the_next_token_depends_on_the_last_tokens_of_the_context(name, context):
    """Equals the literal loop of Bloem 2019 (source B): cached or not, prompts alone or in a batch, within the context or past it."""
    network, count = ready(MODELS[name], seed=3), 14
    length = context or network.limit or 99
    expected = [spec.continue_text(lambda text: most_likely(network, text), row, count, length) for row in PROMPTS]
    assert len({token for row in expected for token in row}) > 5  # not a loop of one token
    for cached in (True, False):
        options = {"temperature": 0, "context": context, "cached": cached}
        assert generate(network, PROMPTS, count, **options) == expected
        assert [generate(network, [row], count, **options)[0] for row in PROMPTS] == expected


@pytest.mark.spec(57)
@pytest.mark.parametrize("name", MODELS)
def test_equal_seeds_give_equal_texts_cached_or_not(name):
    network = ready(MODELS[name])
    texts = [generate(network, PROMPTS, 12, seed=seed, cached=cached) for seed in (0, 1) for cached in (True, False)]
    assert texts[0] == texts[1] and texts[2] == texts[3]
    assert texts[0] != texts[2]
    assert all(
        text[: len(row)] == row and len(text) == len(row) + 12 for text, row in zip(texts[0], PROMPTS, strict=True)
    )


@pytest.mark.spec(57)
def test_a_prompt_longer_than_the_context_is_truncated_to_its_end():
    network, prompt = ready(MODELS["learned"]), tokens(1, 20).tolist()
    result = generate(network, prompt, 3, temperature=0)[0]
    assert result == spec.continue_text(lambda text: most_likely(network, text), prompt[0], 3, 8)


@pytest.mark.spec(58)
def test_temperature_0_is_the_most_likely_token():
    logits_BV = randn(50, 17)
    assert torch.equal(sample(logits_BV, 0), logits_BV.argmax(-1))


@pytest.mark.spec(57)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_sampled_by_their_tempered_probabilities(temperature):
    logits, count = randn(5), 40_000
    probability = spec.softmax_with_temperature(logits, temperature)
    tokens_B = sample(logits.expand(count, -1), temperature, torch.Generator().manual_seed(0))
    result = torch.bincount(tokens_B, minlength=5) / count
    std = (probability * (1 - probability) / count).sqrt()
    assert ((result - probability).abs() < 4 * std).all()


@pytest.mark.spec(58)
def test_as_the_temperature_goes_to_0_the_most_likely_token_is_sampled():
    logits = randn(5)
    probabilitys = [
        spec.softmax_with_temperature(logits, temperature)[logits.argmax()].item()
        for temperature in (2, 1, 0.5, 0.1, 0.01)
    ]
    assert probabilitys == sorted(probabilitys) and probabilitys[-1] > 1 - 1e-9
    assert (sample(logits.expand(999, -1), 0.001) == logits.argmax()).all()


@pytest.mark.spec(61)
@pytest.mark.parametrize("prompts", [[[]], [[1], []], []])
def test_an_empty_prompt_is_refused(prompts):
    with pytest.raises(ValueError, match="begin with a start token"):
        generate(ready(MODELS["learned"]), prompts, 1)


@pytest.mark.spec(62)
@pytest.mark.parametrize("cached", [True, False])
def test_a_decoder_generates_with_its_encoder_output(cached):
    decoder = model("causal", cross=Attention(Standard(2)), position=Sinusoidal(), outputs=HEAD)
    pair = ready(EncoderDecoder(encoder=model("full"), decoder=decoder))
    encoded = pair.encode(tokens(3, 5))
    result = generate(pair.decoder, PROMPTS, 6, temperature=0, encoder_output=encoded, cached=cached)
    for row, prompt in enumerate(PROMPTS):
        row_output = EncoderOutput(encoded.x_BSD[row : row + 1])

        def choose(text: list[int], encoded: EncoderOutput = row_output) -> int:
            return int(pair.decode(torch.tensor([text]), encoded).logits[0, -1].argmax())

        assert result[row] == spec.continue_text(choose, prompt, 6, 99)


def test_dropout_is_off_during_generation_and_the_training_mode_is_restored():
    network = ready(model(position=Learned(8), outputs=HEAD, residual=PreNorm(dropout=0.5)))
    expected = generate(network, PROMPTS, 5, temperature=0)
    assert generate(network.train(), PROMPTS, 5, temperature=0) == expected
    assert network.training and all(module.training for module in network.modules())


@pytest.mark.spec(65)
def test_among_several_output_heads_the_language_head_predicts_the_next_token():
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
@pytest.mark.parametrize("name", MODELS)
def test_a_row_depends_on_its_prompt_and_not_on_other_rows(name):
    network = ready(MODELS[name])
    prompts = [*PROMPTS, PROMPTS[1]]
    texts = generate(network, prompts, 12, seed=5, top_p=0.95)
    assert texts[1] != texts[3]  # equal prompts have different texts
    assert [generate(network, [row], 12, seed=5, top_p=0.95)[0] for row in PROMPTS] == texts[:3]
    turned = generate(network, prompts[::-1], 12, seed=5, top_p=0.95)
    assert turned == [texts[1], texts[2], texts[3], texts[0]]  # equal prompts keep their order


@pytest.mark.parametrize("cached", [True, False])
def test_stream_yields_the_tokens_of_generate(cached):
    network = ready(MODELS["learned"])
    options = {"seed": 3, "cached": cached, "stop": (4, 9)}
    expected, steps = generate(network, PROMPTS, 30, **options), []
    for new in stream(network, PROMPTS, 30, **options):
        steps.append(new)
    columns = [[token for token in row if token is not None] for row in zip(*steps, strict=True)]
    assert [prompt + new for prompt, new in zip(PROMPTS, columns, strict=True)] == expected


def test_a_row_ends_at_its_first_stop_token_and_the_other_rows_continue():
    network = ready(MODELS["rotary"])
    whole = generate(network, PROMPTS, 60, seed=0)
    news = [text[len(prompt) :] for prompt, text in zip(PROMPTS, whole, strict=True)]
    uneven = [token for token in range(17) if len({new.index(token) for new in news if token in new}) == len(PROMPTS)]
    for stop in uneven:
        expected = [prompt + new[: new.index(stop) + 1] for prompt, new in zip(PROMPTS, news, strict=True)]
        assert generate(network, PROMPTS, 60, seed=0, stop=[stop]) == expected
    assert uneven


def test_with_the_cache_the_network_reads_every_token_once():
    """After the prompt one token per step, and nothing after all rows have ended."""
    network, read = ready(MODELS["rotary"]), list[int]()
    handle = network.body.register_forward_pre_hook(lambda module, arguments: read.append(arguments[0].shape[1]))
    generate(network, PROMPTS, 10, temperature=0)
    assert read == [4] + [1] * 9
    read.clear()
    generate(network, PROMPTS, 10, temperature=0, stop=range(17))
    assert read == [4]
    handle.remove()


def test_stream_is_lazy_and_restores_the_training_mode():
    network = ready(MODELS["learned"]).train()
    steps = stream(network, PROMPTS, 9)
    assert network.training
    next(steps)
    steps.close()
    assert network.training and torch.is_grad_enabled()


def test_a_sliding_window_ignores_the_memory_option():
    network = ready(MODELS["learned"])
    options = {"temperature": 0, "context": 4}
    expected = generate(network, [[1, 2, 3]], 6, cached=False, **options)
    assert generate(network, [[1, 2, 3]], 6, **options) == expected


@pytest.mark.parametrize(
    "wrong, remedy",
    [
        ({"tokens": -1}, "0 tokens or more"),
        ({"tokens": 2.5}, "0 tokens or more"),
        ({"context": 0}, "context of 1 or more"),
        ({"context": 9}, "at most 8"),
        ({"stop": 3}, "list of token ids"),
        ({"stop": [-1]}, "list of token ids"),
        ({"top_k": 0}, "1 or more"),
        ({"temperature": -1}, "or more"),
        ({"prompts": [1, 2]}, "list of lists"),
        ({"prompts": [["a"]]}, "list of lists"),
        ({"prompts": ["12"]}, "list of lists"),
        ({"prompts": [[1.5]]}, "list of lists"),
        ({"topk": 3}, "generate has no option 'topk'; did you mean top_k"),
        ({"visible": torch.ones(1, 1, dtype=torch.bool)}, "no option 'visible'"),
        ({"prompts": [[99]]}, "outside the vocabulary"),
    ],
    ids=str,
)
def test_bad_values_are_refused_with_the_remedy(wrong, remedy):
    with pytest.raises(ValueError, match=r"give model.build\(\)"):
        generate(MODELS["learned"], PROMPTS, 3)
    with pytest.raises(ValueError, match=remedy):
        generate(ready(MODELS["learned"]), **{"prompts": PROMPTS, "tokens": 3} | wrong)
