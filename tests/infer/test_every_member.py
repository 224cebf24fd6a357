"""On every member that generates, all ways of generation give the same text, greedy and seeded: with a growing cache, in slots, over a
bounded number of rows, and with everything computed again for each token. Images are in tests/task/test_image.py, in every variant.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from everyformer import Cache, EncoderDecoder, Language, generate
from everyformer.family.table import MEMBERS
from everyformer.infer.beam import beam_search
from everyformer.infer.sample import sample, seeded_generator
from everyformer.network.network import Network, PairNetwork

VALUES = {name: member.value("tiny") for name, member in MEMBERS.items()}
PAIRS = [name for name, value in VALUES.items() if isinstance(value, EncoderDecoder)]
LANGUAGE = [
    name
    for name, value in VALUES.items()
    if name not in PAIRS and any(isinstance(head, Language) for head in value.outputs)
]
PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1]]
OPTIONS = [{"temperature": 0}, {"seed": 1, "top_k": 20}]


def built(name: str) -> Network | PairNetwork:
    torch.manual_seed(0)
    network = VALUES[name].build().double().eval()
    with torch.no_grad():  # so that texts are not one token again and again
        for weight in network.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    return network


def literal(network: Network, prompt: list[int], tokens: int, temperature: float = 1.0, **options) -> list[int]:
    """The text by its definition: one pass through everything before each token. A segment memory is read on, token by token."""
    generator = seeded_generator(options.pop("seed", 0), 0, prompt)
    text, memory = list(prompt), network.value.memory
    cache = Cache() if memory is not None else None
    new = text
    for _ in range(tokens):
        with torch.no_grad():
            output = network(torch.tensor([new if memory is not None else text]), cache=cache)
        cache = output.cache
        text.append(int(sample(output.logits[:, -1], temperature, [generator], **options)))
        new = text[-1:]
    return text


@pytest.mark.parametrize("name", LANGUAGE)
def test_every_way_gives_the_text_of_the_definition(name):
    network = built(name)
    assert isinstance(network, Network)
    for options in OPTIONS:
        expected = [literal(network, prompt, 7, **options) for prompt in PROMPTS]
        assert len({token for text in expected for token in text[-7:]}) > 2
        ways: list[dict[str, object]] = [{"static": False}, {"static": True}, {"rows": 2}]
        ways += [] if network.value.memory is not None else [{"cached": False}]
        for way in ways:
            assert generate(network, PROMPTS, 7, **options, **way) == expected, way


@pytest.mark.parametrize("name", PAIRS)
def test_an_encoder_decoder_gives_the_same_text_with_a_cache_in_slots_and_without(name):
    pair = built(name)
    assert isinstance(pair, PairNetwork)
    source_BS = torch.randint(0, 200, (3, 6), generator=torch.Generator().manual_seed(0))
    visible_BS = torch.arange(6) < torch.tensor([[6], [3], [5]])
    with torch.no_grad():
        encoder_output = pair.encode(source_BS, visible=visible_BS)
    for options in OPTIONS:
        ways: list[dict[str, object]] = [{"static": False}, {"static": True}, {"cached": False}]
        texts = [generate(pair.decoder, PROMPTS, 7, encoder_output=encoder_output, **options, **way) for way in ways]
        assert texts[0] == texts[1] == texts[2]
        stop = [texts[0][1][3], texts[0][0][-2]]  # rows end one after the other, and their encoder outputs with them
        cut = [
            generate(pair.decoder, PROMPTS, 7, encoder_output=encoder_output, stop=stop, **options, **way)
            for way in ways
        ]
        assert cut[0] == cut[1] == cut[2] != texts[0]
    for beam in (1, 3):
        search = {"start": 1, "end": 2, "max_tokens": 7, "beam": beam, "visible": visible_BS}
        found = beam_search(pair, source_BS, **search)
        assert found == beam_search(pair, source_BS, cached=False, **search)
        alone = [_alone(pair, source_BS[row], visible_BS[row], search) for row in range(3)]
        assert found == alone


def _alone(pair: PairNetwork, source_S: Tensor, visible_S: Tensor, search: dict) -> list[int]:
    (text,) = beam_search(pair, source_S[None], **(search | {"visible": visible_S[None]}))
    return text


def test_rows_that_have_ended_are_left_out_of_later_calls():
    network, rows = built("gpt2"), list[int]()
    network.body.register_forward_pre_hook(lambda module, arguments: rows.append(arguments[0].shape[0]))
    prompts = [[i, i + 1] for i in range(8)]
    whole = generate(network, prompts, 12, seed=0)
    stop = sorted({text[index] for text, index in zip(whole, range(3, 9), strict=False)})
    expected = []
    for text in whole:
        end = next((i for i, token in enumerate(text) if i > 1 and token in stop), len(text) - 1)
        expected.append(text[: end + 1])
    rows.clear()
    assert generate(network, prompts, 12, seed=0, stop=stop) == expected
    assert rows == sorted(rows, reverse=True) and rows[0] == 8 and rows[-1] <= 4
