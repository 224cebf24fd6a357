"""The loss of proximal policy optimization, and the evaluation of an agent.

Equations, of one step with the action a, the advantage A, the return R and the probability pi_old(a) of the agent that acted:
    loss = -min(r A, clip(r, 1 - eps, 1 + eps) A) + c_1 (V - R)^2 - c_2 S,   r = pi(a) / pi_old(a)
Symbols: `clip` eps, `value_weight` c_1, `entropy_weight` c_2, S the entropy of the policy.

A segment is computed again from the cache with which it began. The part of each episode in the segment is a separate
sequence: one that continues an episode starts from the cache, one that starts an episode has none. So nothing crosses the end of
an episode, whatever the layers are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from everyformer.data.environments import Environment
from everyformer.data.images import import_pillow
from everyformer.infer.estimate import Progress
from everyformer.infer.rollout import Agent, play_episodes
from everyformer.network.cache import Cache
from everyformer.network.network import Network, PairNetwork
from everyformer.task.batch import Batch, step_generator
from everyformer.task.check import check_split
from everyformer.task.probe_input import ProbeInput, refuse_text
from everyformer.task.task import Inference, Objective

if TYPE_CHECKING:
    from everyformer.task.control import Control

SPLITS = {"valid": 1, "test": 2}  # first number of the seeds of their episodes; training has 0
CONFIDENCE = 1.96  # standard errors on either side of the mean: a 95 % confidence interval


class ControlObjective(Objective):
    metric = "return"
    higher_is_better = True

    def __init__(self, task: Control, agent: Agent, new_environment: Callable[[], Environment]):
        self.task, self.agent, self.new_environment = task, agent, new_environment

    @cached_property
    def environments(self) -> list[Environment]:
        """Environments for evaluation."""
        return [self.new_environment() for _ in range(self.task.copies)]

    def loss(self, network: Network | PairNetwork, batch: Batch, kernel: str) -> Tensor:
        agent, task = self.agent, self.task
        logits_NV, value_N, step_N, auxiliary = self.recompute(network, batch, kernel)
        action_NP, old_N, advantage_N, return_N = (
            batch[name].flatten(0, 1)[step_N]
            for name in ("action_BTP", "log_probability_BT", "advantage_BT", "return_BT")
        )
        ratio_N = (agent.log_probability(logits_NV, action_NP) - old_N).exp()
        clipped_N = ratio_N.clamp(1 - task.clip, 1 + task.clip)
        policy_loss = -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N).sum()
        value_loss = (value_N.float() - return_N).square().sum()
        entropy = agent.entropy(logits_NV).sum()
        return policy_loss + task.value_weight * value_loss - task.entropy_weight * entropy + auxiliary

    def recompute(self, network: Any, batch: Batch, kernel: str) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
        """Returns the logits and values of all steps of a segment with the present weights, the steps' indices in the flattened
        batch, and the auxiliary losses.

        The network is called on the episodes that continue from the cache, then on those that start in the segment, grouped by
        length.
        """
        input_BTF, first_BT = batch["input_BTF"].to(next(network.parameters()).dtype), batch["first_BT"]
        length, steps = first_BT.shape[1], first_BT.numel()
        outputs: list[tuple[Tensor, Tensor, Tensor]] = []
        auxiliary: Tensor | float = 0.0
        if not self.task.use_memory:
            first_BT = torch.ones_like(first_BT)
        start_BT = first_BT.clone()
        start_BT[:, 0] = True
        start_P = start_BT.flatten().nonzero()[:, 0]
        length_P = torch.cat((start_P[1:], start_P.new_tensor([steps]))) - start_P
        cached, continued_P = cache_tensors(batch.tensors), ~first_BT.flatten()[start_P]
        for chosen_P in (continued_P, *_by_length(length_P, ~continued_P)):
            start_C, length_C = start_P[chosen_P], length_P[chosen_P]
            if not len(start_C):
                continue
            cache = (
                Cache.from_state_dict(cached).reorder(start_C // length) if cached and chosen_P is continued_P else None
            )
            time_T = torch.arange(int(length_C.max()), device=start_C.device)
            visible_CT = time_T < length_C[:, None]
            step_CT = (start_C[:, None] + time_T).clamp(max=steps - 1)
            output = network(
                input_BTF.flatten(0, 1)[step_CT],
                visible=None if bool(visible_CT.all()) else visible_CT,
                cache=cache,
                kernel=kernel,
            )
            logits_CTV, value_CT1 = output.logits
            outputs.append((logits_CTV[visible_CT], value_CT1[visible_CT][:, 0], step_CT[visible_CT]))
            auxiliary = auxiliary + sum(output.aux.values()) * int(length_C.sum())
        logits_NV, value_N, step_N = (torch.cat(part) for part in zip(*outputs, strict=True))
        return logits_NV, value_N, step_N, auxiliary

    @property
    def default_limit(self) -> int | None:
        return None  # task.episodes

    def evaluate(
        self,
        network: Network | PairNetwork,
        split: str,
        limit: int | None,
        kernel: str,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        check_split(split, SPLITS, self.task.environment)
        assert isinstance(network, Network)
        count = self.task.episodes if limit is None else limit
        if count < 2:
            raise ValueError(f"a confidence interval needs 2 episodes or more, not {count}; give 2 or more")
        temperature = 1.0 if self.task.actions == "sample" else 0.0
        agent = dataclasses.replace(self.agent, kernel=kernel, temperature=temperature)
        seeds = [episode_seed(SPLITS[split], number) for number in range(count)]
        generator = step_generator(SPLITS[split], 0)
        returns, lengths = play_episodes(agent, network.eval(), self.environments, seeds, generator, progress=progress)
        mean, half = float(np.mean(returns)), CONFIDENCE * float(np.std(returns, ddof=1)) / math.sqrt(count)
        return {
            "return": mean,
            "low": mean - half,
            "high": mean + half,
            "length": float(np.mean(lengths)),
            "split": split,
            "episodes": count,
            "actions": self.task.actions,
        }


class ControlInference(Inference):
    generates_images = True
    example = "--out episode.gif"
    file = "episode.gif"

    def __init__(self, task: Control, agent: Agent, new_environment: Callable[..., Environment], can_render: bool):
        self.task, self.agent, self.new_environment = task, agent, new_environment
        self.can_generate = can_render

    def _probe_input(self, network: Network | PairNetwork, text: str | None, example: int | None) -> ProbeInput:
        """An episode of the agent, in one pass from an empty memory. It may be longer than the memory."""
        refuse_text(text, "the observations of an environment")
        assert isinstance(network, Network)
        if self.agent.memory is None:
            raise ValueError("this agent reads every observation by itself; give the run of an agent with a memory")
        environment: Any = RecordedEnvironment(self.new_environment())
        seeds, generator = [episode_seed(SPLITS["valid"], example or 0)], step_generator(example or 0, 0)
        play_episodes(self.agent, network.eval(), [environment], seeds, generator)
        weight = next(network.parameters())
        input_BTF = torch.from_numpy(np.stack(environment.observations[:-1]))[None].to(weight.device, weight.dtype)
        return ProbeInput((input_BTF,), [str(step) for step in range(input_BTF.shape[1])])

    def generate_images(  # type: ignore[override]
        self, network: Network | PairNetwork, file: Path, *, temperature: float = 1.0, seed: int = 0
    ) -> str:
        """Write an episode as a GIF."""
        if not self.can_generate:
            raise ValueError(f"{self.task.environment} cannot be rendered (it has no mode rgb_array); use evaluate")
        if file.suffix != ".gif" or not file.parent.is_dir():
            raise ValueError(f"cannot write an episode to {file}; give a .gif file in a folder that exists")
        image = import_pillow()
        assert isinstance(network, Network)
        environment = self.new_environment(render=True)
        frames: list[Any] = []
        (total,), (length,) = play_episodes(
            dataclasses.replace(self.agent, temperature=temperature),
            network.eval(),
            [environment],
            [episode_seed(SPLITS["valid"], seed)],
            step_generator(seed, 0),
            lambda: frames.append(image.fromarray(environment.render())),
        )
        frames[0].save(file, save_all=True, append_images=frames[1:], duration=200, loop=0)
        return f"an episode of {length} steps with a return of {total:.4g}: {file}"


class RecordedEnvironment:
    """An environment that keeps its observations."""

    def __init__(self, inside: Environment):
        self.inside, self.observations = inside, list[Any]()

    def reset(self, seed: int) -> Any:
        self.observations.append(self.inside.reset(seed))
        return self.observations[-1]

    def step(self, action: list[int]) -> Any:
        result = self.inside.step(action)
        self.observations.append(result[0])
        return result


def episode_seed(*numbers: int) -> int:
    """Returns the seed of the episode that these numbers identify."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def cache_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of the cache at the beginning of a segment."""
    return {name.removeprefix("cache."): x for name, x in tensors.items() if name.startswith("cache.")}


def _by_length(length_P: Tensor, chosen_P: Tensor) -> list[Tensor]:
    """Groups of the chosen sequences for one call each: one group if at most half of it is padding, else by powers of 2."""
    length_C = length_P[chosen_P]
    if not len(length_C) or len(length_C) * int(length_C.max()) <= 2 * int(length_C.sum()):
        return [chosen_P]
    power_P = (length_P - 1).float().clamp(min=0.5).log2().floor()
    return [chosen_P & (power_P == power) for power in power_P[chosen_P].unique().tolist()]
