"""Agents: their actions follow their probabilities, and the returns of episodes are the sums of their rewards."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from everyformer.infer.rollout import Agent, play_episodes
from everyformer.network.cache import Cache


@pytest.mark.parametrize("wrong", [-1.0, math.nan])
def test_a_wrong_temperature_is_refused(wrong):
    with pytest.raises(ValueError, match="temperature"):
        Agent((2,), None, temperature=wrong)


def test_each_part_of_an_action_is_sampled_by_its_probabilities_in_each_row():
    agent, count = Agent((3, 2), None, temperature=2.0), 20_000
    logits = torch.tensor([[0.0, 1.0, 2.0, 0.0, 3.0], [2.0, -1.0, 0.0, 1.0, -1.0]])
    for row in logits:
        action = agent.sample(row.expand(count, -1), torch.Generator().manual_seed(0))
        for part, expected in enumerate(((row / 2)[:3].softmax(0), (row / 2)[3:].softmax(0))):
            found = torch.bincount(action[:, part], minlength=len(expected)) / count
            assert (found - expected).abs().max() < 4 * math.sqrt(0.25 / count)
    together = Agent((3, 2), None, temperature=0.0).sample(logits, torch.Generator())
    assert together.tolist() == [[2, 1], [0, 0]]
    many = agent.sample(logits.repeat_interleave(count, 0), torch.Generator().manual_seed(0))[:, 0].view(2, count)
    shares = torch.stack([torch.bincount(row, minlength=3) / count for row in many])
    assert (shares - (logits[:, :3] / 2).softmax(-1)).abs().max() < 4 * math.sqrt(0.25 / count)


def test_probabilities_and_entropies_are_sums_over_the_parts():
    agent, logits = Agent((3, 2), None), torch.zeros(4, 5)
    assert agent.entropy(logits).tolist() == pytest.approx([math.log(3) + math.log(2)] * 4)
    action = torch.tensor([[0, 1], [2, 0], [1, 1], [0, 0]])
    assert agent.log_probability(logits, action).tolist() == pytest.approx([-math.log(6)] * 4)
    skewed = torch.tensor([[math.log(2.0), 0.0, 0.0, 0.0, 0.0]])
    assert agent.log_probability(skewed, torch.tensor([[0, 1]])).item() == pytest.approx(math.log(0.5 * 0.5))
    assert agent.entropy(skewed).item() == pytest.approx(1.5 * math.log(2) + math.log(2))


class Counter:
    """Ends after `seed` steps; step n has the reward 10^n. An observation is the seed and the number of steps before it."""

    def reset(self, seed):
        self.seed, self.steps = seed, 0
        return np.array([seed, 0.0], np.float32)

    def step(self, action):
        self.steps += 1
        return np.array([self.seed, self.steps], np.float32), 10.0**self.steps, self.steps == self.seed, False


class Recorder:
    """A network that keeps what it is given; its cache holds one position more after each call."""

    def __init__(self):
        self.calls = []

    def parameters(self):
        return iter([torch.zeros(1)])

    def __call__(self, inputs, kernel, cache=None):
        self.calls.append((inputs[:, 0].tolist(), None if cache is None else cache.max_length))
        return SimpleNamespace(logits=(torch.zeros(len(inputs), 1, 2),), cache=cache, hidden=inputs)


def test_returns_and_lengths_are_those_of_each_episode():
    """Five episodes in three environments: all are played to their end, and every observation is read."""
    network = Recorder()
    seeds, steps = [2, 1, 3, 1, 2], []
    agent = Agent((2,), memory=7)
    returns, lengths = play_episodes(
        agent, network, [Counter() for _ in range(3)], seeds, torch.Generator(), lambda: steps.append(1)
    )
    assert lengths == seeds and returns == [sum(10.0**n for n in range(1, seed + 1)) for seed in seeds]
    assert [rows for rows, _ in network.calls] == [
        [[2, 0], [1, 0], [3, 0]],
        [[2, 1], [3, 1]],
        [[3, 2]],
        [[1, 0], [2, 0]],
        [[2, 1]],
    ]
    assert {length for _, length in network.calls} == {7} and len(steps) == len(network.calls) + 1
    agent.forward(network, [np.zeros(2, np.float32)], Cache(), extra_memory=3)
    assert network.calls[-1][1] == 10
