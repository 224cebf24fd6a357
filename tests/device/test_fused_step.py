"""On a GPU the fused step gives the texts of PyTorch's step, and logits that are as exact."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from everyformer import Batcher, generate
from everyformer.infer.decode import Decoder
from everyformer.infer.forward import Forward
from everyformer.infer.sample import seeded_generator
from everyformer.network.cache import Cache
from everyformer.network.fused_step import fused_reason
from everyformer.network.network import Network
from tests.network.test_fused_step import MEMBERS, built, slots_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1], [4, 4], [5], [6, 1]]
OPTIONS = ({"temperature": 0}, {"seed": 1}, {"seed": 2, "temperature": 0.7}, {"seed": 3, "top_k": 5})


@pytest.mark.parametrize("rows", [1, 3, 6])
@pytest.mark.parametrize("name", MEMBERS)
def test_fused_steps_give_the_texts_of_pytorch(name, rows):
    network = built(name, **MEMBERS[name])
    assert fused_reason(network) is None
    for options in OPTIONS:
        expected = generate(network, PROMPTS[:rows], 24, fused=False, **options)
        assert generate(network, PROMPTS[:rows], 24, fused=True, **options) == expected


@torch.no_grad()
def logits_of(network: Network, rows: int, fused: bool) -> torch.Tensor:
    slots = replace(slots_of(network, rows, capacity=512), fused=fused)
    steps = [slots.step(torch.full((rows, 1), 3 + step, device="cuda")) for step in range(4)]
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize("name", MEMBERS)
def test_in_half_precision_the_error_is_at_most_twice_that_of_pytorch(name, rows, dtype):
    exact = built(name, **MEMBERS[name])
    half = copy.deepcopy(exact).to(dtype)
    exact = copy.deepcopy(half).double()  # the same weights
    expected = logits_of(exact, rows, fused=False)
    errors = [(logits_of(half, rows, fused).double() - expected).square().mean().sqrt() for fused in (True, False)]
    assert errors[0] <= 2 * errors[1]


def test_under_autocast_the_weights_stay_in_float32():
    network = built("gpt2", **MEMBERS["gpt2"])
    expected = logits_of(network, 2, fused=False)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        errors = [(logits_of(network, 2, fused).float() - expected).square().mean().sqrt() for fused in (True, False)]
        assert len(generate(network, PROMPTS, 80, fused=True, seed=0)[0]) == 85
    assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_batcher_gives_the_texts_of_single_prompts(name):
    network = built(name, **MEMBERS[name])
    prompts = [[number, 2 * number, 3] for number in range(1, 12)]
    counts = [5 + 3 * number for number in range(11)]
    batcher = Batcher(network, rows=4, fused=True)
    numbers = [batcher.submit(p, n, seed=0, logprobs=None) for p, n in zip(prompts, counts, strict=True)]
    texts: dict[int, list[int]] = {number: [] for number in numbers}
    while batcher.active or batcher.waiting:
        for event in batcher.step():
            texts[event.number].append(event.token)
    for number, prompt, count in zip(numbers, prompts, counts, strict=True):
        assert prompt + texts[number] == generate(network, [prompt], count, seed=0, fused=False)[0]


@pytest.mark.parametrize("fused", [False, True])
def test_recording_a_step_changes_no_key(fused):
    """A recording with one free slot left, after which the first slot is used again."""
    network = built("llama")
    prompt = torch.randint(0, 256, (1, 255), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        cache = network(prompt, cache=Cache()).cache
        first = torch.tensor([5], device="cuda")
        decoder = Decoder(
            Forward(network, 0, 1), cache, first, [seeded_generator(0)], (0.0, None, None, None), fused=fused
        )
        assert decoder.slots.capacity == 256
        before = [x.clone() for entry in decoder.slots.entries for x in entry.tensors]
        next(decoder.tokens(1))
    after = [x for entry in decoder.slots.entries for x in entry.tensors]
    for x, old in zip(after, before, strict=True):
        assert torch.equal(x[:, :, :255], old[:, :, :255])


def test_what_is_not_served_is_refused_with_its_reason():
    network = built("gpt2", **MEMBERS["gpt2"])
    with pytest.raises(ValueError, match="not bfloat16, float16 or float32"):
        generate(copy.deepcopy(network).double(), [[1]], 4, fused=True)
    with pytest.raises(ValueError, match="the kernel reference computes the attention"):
        generate(network, [[1]], 4, fused=True, kernel="reference")
    with pytest.raises(ValueError, match="only steps in slots are fused"):
        generate(network, [[1]], 4, fused=True, static=False)
