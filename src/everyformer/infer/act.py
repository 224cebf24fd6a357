"""Acting: a network as the agent of environments, one step at a time, with its past for a memory.

The network tells two things of every observation: the logits of the action's parts, side by side, and how much reward is to
come (discounted). An action's parts are drawn independently of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from everyformer.data.environments import Environment, Vector
from everyformer.infer.sample import check
from everyformer.network.cache import Cache
from everyformer.network.network import Network, Output


@dataclass(frozen=True)
class Agent:
    """How a network acts. Without a `memory` every observation is all that it knows."""

    choices: tuple[int, ...]  # how many each part of an action has
    memory: int | None  # positions of the past that it keeps
    kernel: str = "auto"
    temperature: float = 1.0  # 0 takes the most likely action

    def __post_init__(self) -> None:
        check(self.temperature)

    def look(self, network: Network, seen: Sequence[Vector], cache: Cache, longer: int = 0) -> Output:
        """What a network makes of an observation of each environment; it may keep `longer` than its memory."""
        weight = next(network.parameters())
        input_BTF = torch.from_numpy(np.stack(seen))[:, None].to(weight.device, weight.dtype)
        if self.memory is None:
            return network(input_BTF, kernel=self.kernel)
        return network(input_BTF, cache=replace(cache, max_length=self.memory + longer), kernel=self.kernel)

    def draw(self, logits_BV: Tensor, random: torch.Generator) -> Tensor:
        """An action of each: its parts are numbers."""
        found = []
        for part_BC in logits_BV.cpu().double().split(self.choices, dim=-1):
            if self.temperature == 0:
                found.append(part_BC.argmax(-1))
            else:
                share_BC = (part_BC / self.temperature).softmax(-1)
                found.append(torch.multinomial(share_BC, 1, generator=random)[:, 0])
        return torch.stack(found, dim=-1)

    def log_shares(self, logits: Tensor) -> tuple[Tensor, ...]:
        """The logarithms of the probabilities of each part's choices, in float32 at least."""
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return tuple(part.log_softmax(-1) for part in exact.split(self.choices, dim=-1))

    def log_share(self, logits: Tensor, action: Tensor) -> Tensor:
        """The logarithm of the probability of an action, whose parts are on the last axis."""
        parts = zip(self.log_shares(logits), action.unbind(-1), strict=True)
        return torch.stack([part.gather(-1, number[..., None])[..., 0] for part, number in parts]).sum(0)

    def entropy(self, logits: Tensor) -> Tensor:
        """Of the distribution of actions, in nats."""
        return torch.stack([-(part.exp() * part).sum(-1) for part in self.log_shares(logits)]).sum(0)


@torch.no_grad()
def play(
    agent: Agent,
    network: Network,
    environments: Sequence[Environment],
    seeds: Sequence[int],
    random: torch.Generator,
    watch: Callable[[], None] | None = None,
) -> tuple[list[float], list[int]]:
    """The return and the length of an episode of each seed. `watch` is called at every step.

    Each of them is played to its end, however long it takes: those that end first count no more than others.
    """
    returns, lengths = [0.0] * len(seeds), [0] * len(seeds)
    for begin in range(0, len(seeds), len(environments)):
        live = list(range(begin, min(begin + len(environments), len(seeds))))
        seen = [environments[number - begin].reset(seeds[number]) for number in live]
        cache = Cache()  # keys: the weights stand still
        while live:
            if watch is not None:
                watch()
            output = agent.look(network, seen, cache)
            action_BP = agent.draw(output.logits[0][:, 0], random)
            seen, rows = [], []
            for row, (number, action) in enumerate(zip(live, action_BP.tolist(), strict=True)):
                vector, reward, ended, cut = environments[number - begin].step(action)
                returns[number] += reward
                lengths[number] += 1
                if not (ended or cut):
                    seen.append(vector)
                    rows.append(row)
            cache = output.cache or cache
            if cache.entries and 0 < len(rows) < len(live):
                cache = cache.reorder(torch.tensor(rows, device=output.hidden.device))
            live = [live[row] for row in rows]
    if watch is not None:
        watch()
    return returns, lengths
