"""Decoding in slots of a fixed size gives the texts that decoding with a growing cache gives, on every member."""

from __future__ import annotations

import pytest
import torch

from everyformer import Attention, Batcher, Convolution, EncoderDecoder, Language, Rotary, Standard, generate
from everyformer.attention.context import Probe
from everyformer.family.table import MEMBERS
from everyformer.infer import decode
from everyformer.infer.decode import Decoder, most_slots, static_reason
from everyformer.infer.forward import Forward
from everyformer.infer.sample import draw_uniform, seeded_generator
from everyformer.network import slots
from everyformer.network.cache import Cache
from everyformer.network.fused_step import fused_reason
from everyformer.network.network import Network
from everyformer.network.slots import Slots
from tests.network import model, ready

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1]]
HEAD = (Language(tied=False, bias=True),)
VALUES = {name: member.value("tiny") for name, member in MEMBERS.items()}
LANGUAGE = [
    name
    for name, value in VALUES.items()
    if any(isinstance(head, Language) for head in getattr(value, "outputs", ())) and value.body.is_causal()
]


def built(name: str) -> Network:
    torch.manual_seed(0)
    network = VALUES[name].build().double().eval()
    assert isinstance(network, Network)
    return network


@pytest.mark.parametrize("name", LANGUAGE)
def test_slots_give_the_texts_of_a_growing_cache(name, monkeypatch):
    monkeypatch.setattr(decode, "FEWEST", 8)  # so that the slots grow on the way
    network = built(name)
    for options in ({"temperature": 0}, {"seed": 1, "top_k": 20}):
        expected = generate(network, PROMPTS, 24, static=False, **options)
        assert generate(network, PROMPTS, 24, static=True, **options) == expected


SERVED = [
    "byte-language",
    "gemma",
    "gemma2",
    "gpt2",
    "image-transformer",
    "llama",
    "mistral",
    "qwen3",
    "sparse-transformer",
]


@pytest.mark.parametrize("name", LANGUAGE)
def test_fused_steps_on_a_cpu_give_the_texts_of_a_growing_cache(name, monkeypatch):
    monkeypatch.setattr(slots, "MULTIPLE", 8)  # so that the slots grow on the way
    network = built(name).float()
    assert (fused_reason(network) is None) == (name in SERVED)
    with torch.no_grad():
        for weight in network.parameters():  # so that no two tokens are about equally likely
            weight.add_(torch.randn_like(weight), alpha=0.1)
    for options in ({"temperature": 0}, {"seed": 1, "top_k": 20}, {"seed": 2, "stop": range(128)}):
        expected = generate(network, PROMPTS, 24, fused=False, **options)
        assert generate(network, PROMPTS, 24, **options) == expected
        assert generate(network, PROMPTS, 24, rows=2, **options) == expected  # continuous batching


def test_rows_that_have_ended_are_left_out_on_a_cpu(monkeypatch):
    rows: list[int] = []
    step = Slots.step

    def counted(self, *args, **options):
        rows.append(self.rows)
        return step(self, *args, **options)

    monkeypatch.setattr(Slots, "step", counted)
    network = ready(model(outputs=HEAD)).float()
    prompts = [[1], [2], [3], [4], [5], [6]]
    free = generate(network, prompts, 20, seed=0)
    stop = free[0][8]
    ended = [text.index(stop, 1) if stop in text[1:] else 20 for text in free]
    rows.clear()
    expected = [text[: end + 1] for text, end in zip(free, ended, strict=True)]
    assert generate(network, prompts, 20, seed=0, stop=[stop]) == expected
    assert rows == sorted(rows, reverse=True) and rows[0] == 6 and rows[-1] < 6


@pytest.mark.parametrize(("options", "reason"), [
    ({"static": False}, "only steps in slots are fused"),
    ({"cached": False}, "only steps in slots are fused"),
    ({"probe": Probe()}, "only steps in slots are fused"),
    ({"kernel": "reference"}, "the kernel reference computes the attention"),
])  # fmt: skip
def test_a_fused_step_that_cannot_be_is_refused(options, reason):
    network = ready(model(outputs=HEAD)).float()
    with pytest.raises(ValueError, match=reason):
        generate(network, [[1]], 4, fused=True, **options)
    assert generate(network, [[1]], 4, seed=0, **options) == generate(network, [[1]], 4, seed=0)
    with pytest.raises(ValueError, match="float64"):
        generate(network.double(), [[1]], 4, fused=True)
    with pytest.raises(ValueError, match="float64"):
        Batcher(network, fused=True)


def test_slots_give_the_same_text_beyond_the_context():
    network = ready(VALUES["gpt2"], seed=2)
    prompts = [[1, 2, 3] * 20, [4]]
    expected = generate(network, prompts, 12, static=False, seed=3)
    assert network.limit is not None and len(expected[0]) > network.limit
    assert generate(network, prompts, 12, static=True, seed=3) == expected


def test_the_slots_of_a_window_are_used_again():
    network = ready(model("causal & window(3)", score_mods=(Rotary(),), outputs=HEAD))
    assert most_slots(network) == 3
    assert generate(network, PROMPTS, 20, static=True, seed=0) == generate(network, PROMPTS, 20, cached=False, seed=0)


def test_a_step_in_slots_changes_no_shape_and_only_its_own_slot():
    network = ready(model(outputs=HEAD))
    slots = Slots.of(network, network(torch.tensor([[1, 2, 3], [4, 5, 6]]), cache=Cache()).cache, 8)
    before = [x.clone() for entry in slots.entries for x in entry.tensors]
    slots.step(torch.tensor([[1], [2]]))
    for x, old in zip([x for entry in slots.entries for x in entry.tensors], before, strict=True):
        changed_S = (x != old).any(-1).any(0).any(0)
        assert changed_S.tolist() == [False] * 3 + [True] + [False] * 4
    assert slots.tables[0].position_BS.tolist() == [[0, 1, 2, 3, -1, -1, -1, -1]] * 2
    assert slots.next_B1.tolist() == [[4], [4]]


def test_random_numbers_drawn_ahead_are_those_drawn_one_at_a_time():
    ahead = draw_uniform([seeded_generator(0), seeded_generator(1)], 5)
    single = [draw_uniform([one], 1) for one in [seeded_generator(1)] * 5]
    assert torch.equal(ahead[:, 1], torch.cat(single)[:, 0])


def test_broken_weights_are_an_error():
    network = ready(model(outputs=HEAD))
    cache = network(torch.tensor([[1]]), cache=Cache()).cache
    next(iter(network.outputs.parameters())).data.fill_(float("nan"))
    decoder = Decoder(Forward(network, 0, 1), cache, torch.tensor([2]), [seeded_generator(0)], (1.0, None, None, None))
    with pytest.raises(ValueError, match="load another checkpoint"):
        next(decoder.tokens(1))


def test_a_causal_convolution_is_decoded_without_slots():
    network = ready(model(net=Convolution(8), outputs=HEAD))
    assert static_reason(network(torch.tensor([[1]]), cache=Cache()).cache.entries)
    assert generate(network, PROMPTS, 6, static=True, seed=0) == generate(network, PROMPTS, 6, cached=False, seed=0)


def test_a_decoder_reads_its_encoder_output_in_slots():
    pair = ready(EncoderDecoder(encoder=model("full"), decoder=model(cross=Attention(Standard(2)), outputs=HEAD)))
    encoder_output = pair.encode(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    texts = [
        generate(pair.decoder, [[1], [2]], 9, static=static, seed=0, encoder_output=encoder_output)
        for static in (True, False)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("window", "slots"), [(1, 2), (2, 2), (3, 3), (9, 9)])
def test_a_window_needs_as_many_slots_as_it_has_keys(window, slots):
    """And at least one for the new token and one for an earlier one."""
    assert most_slots(ready(model(f"causal & window({window})", outputs=HEAD))) == slots
    assert most_slots(ready(model("causal", outputs=HEAD))) is None


def test_an_empty_cache_has_no_slots():
    with pytest.raises(ValueError, match="call the network on the prompts first"):
        Slots.of(ready(model(outputs=HEAD)), Cache(), 8)
