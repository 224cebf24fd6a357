"""Rollouts: a network acts in environments, one step at a time; its cache is the agent's memory.

The network has two outputs per observation: the logits of the parts of an action, concatenated, and the value, which is the
expected discounted return. The parts of an action are sampled independently of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from everyformer.data.environments import Environment, Vector
from everyformer.infer.estimate import Progress
from everyformer.infer.sample import check_sampling
from everyformer.network.cache import Cache
from everyformer.network.network import Network, Output


@dataclass(frozen=True)
class Agent:
    """How a network acts."""

    choices: tuple[int, ...]  # number of choices of each part of an action
    memory: int | None  # cached positions; None: every observation is read on its own
    kernel: str = "auto"
    temperature: float = 1.0  # 0: the most likely action

    def __post_init__(self) -> None:
        check_sampling(self.temperature)

    def forward(self, network: Network, observations: Sequence[Vector], cache: Cache, extra_memory: int = 0) -> Output:
        """Run the network on one observation of each environment. The cache may hold `extra_memory` more positions."""
        weight = next(network.parameters())
        input_BTF = torch.from_numpy(np.stack(observations))[:, None].to(weight.device, weight.dtype)
        if self.memory is None:
            return network(input_BTF, kernel=self.kernel)
        return network(input_BTF, cache=replace(cache, max_length=self.memory + extra_memory), kernel=self.kernel)

    def sample(self, logits_BV: Tensor, generator: torch.Generator) -> Tensor:
        """Returns one action per row: the index of the choice for each part (B, P)."""
        action = []
        for part_BC in logits_BV.cpu().double().split(self.choices, dim=-1):
            if self.temperature == 0:
                action.append(part_BC.argmax(-1))
            else:
                probability_BC = (part_BC / self.temperature).softmax(-1)
                action.append(torch.multinomial(probability_BC, 1, generator=generator)[:, 0])
        return torch.stack(action, dim=-1)

    def log_probabilities(self, logits: Tensor) -> tuple[Tensor, ...]:
        """Returns the log-probabilities of the choices of each part, in float32 at least."""
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return tuple(part.log_softmax(-1) for part in exact.split(self.choices, dim=-1))

    def log_probability(self, logits: Tensor, action: Tensor) -> Tensor:
        """Returns the log-probability of an action, whose parts are on the last axis."""
        parts = zip(self.log_probabilities(logits), action.unbind(-1), strict=True)
        return torch.stack([part.gather(-1, choice[..., None])[..., 0] for part, choice in parts]).sum(0)

    def entropy(self, logits: Tensor) -> Tensor:
        """Returns the entropy of the distribution of actions, in nats."""
        return torch.stack([-(part.exp() * part).sum(-1) for part in self.log_probabilities(logits)]).sum(0)


@torch.no_grad()
def play_episodes(
    agent: Agent,
    network: Network,
    environments: Sequence[Environment],
    seeds: Sequence[int],
    generator: torch.Generator,
    on_step: Callable[[], None] | None = None,
    progress: Progress | None = None,
) -> tuple[list[float], list[int]]:
    """Returns the return and the length of one episode per seed. `on_step` is called before each step and after the last,
    `progress` with the number of episodes that have ended, and of all.

    Every episode is played to its end, so short episodes are not counted more often than long ones.
    """
    returns, lengths = [0.0] * len(seeds), [0] * len(seeds)
    for first in range(0, len(seeds), len(environments)):
        running = list(range(first, min(first + len(environments), len(seeds))))
        observations = [environments[episode - first].reset(seeds[episode]) for episode in running]
        cache = Cache()  # of keys and values: the weights do not change during an evaluation
        while running:
            if on_step is not None:
                on_step()
            output = agent.forward(network, observations, cache)
            action_BP = agent.sample(output.logits[0][:, 0], generator)
            observations, rows = [], []
            for row, (episode, action) in enumerate(zip(running, action_BP.tolist(), strict=True)):
                observation, reward, terminated, truncated = environments[episode - first].step(action)
                returns[episode] += reward
                lengths[episode] += 1
                if not (terminated or truncated):
                    observations.append(observation)
                    rows.append(row)
            cache = output.cache or cache
            if cache.entries and 0 < len(rows) < len(running):
                cache = cache.reorder(torch.tensor(rows, device=output.hidden.device))
            running = [running[row] for row in rows]
            if progress is not None:
                progress(min(first + len(environments), len(seeds)) - len(running), len(seeds))
    if on_step is not None:
        on_step()
    return returns, lengths
