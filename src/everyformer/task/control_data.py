"""The episodes of an agent as training data.

Each copy of the environment goes from episode to episode; the agent acts in all copies for a segment of steps. For each step the
data hold the observation, the action with its log-probability, the advantage A_t and the return R_t:
    A_t = sum_l (gamma lambda)^l delta_{t+l} to the end of the episode,  delta_t = r_t + gamma V_{t+1} - V_t,  R_t = A_t + V_t
and the cache with which the segment began. Within a segment nothing is dropped from the cache, so that training computes the
same outputs as the agent did.

Departures: advantages are normalized over the whole segment, not over each batch, so that gradient accumulation changes nothing.
After a step that a time limit cut off, V of the last observation stands for the rest of the episode (Pardo et al. 2018).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from everyformer.data.environments import Environment, Vector, fingerprint
from everyformer.infer.rollout import Agent
from everyformer.network.cache import Cache, SegmentMemory
from everyformer.network.embed import Features
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, Output, PairNetwork
from everyformer.network.output_head import OutputHead, PerToken
from everyformer.task.batch import Batch, epoch_rows, step_generator
from everyformer.task.control_objective import ControlInference, ControlObjective, cache_tensors, episode_seed
from everyformer.task.task import FittedTask, TaskData

if TYPE_CHECKING:
    from everyformer.task.control import Control

MEMORY = 64  # default length of the agent's cache
RECENT = 100  # episodes whose mean return is recorded while training


class EnvironmentCopy:
    """An environment that goes from episode to episode, each with its own seed."""

    def __init__(self, environment: Environment, *seed: int):
        self.environment, self.seed = environment, seed
        self.episode, self.total_reward = -1, 0.0
        self.actions: list[list[int]] = []  # of the current episode
        self.observation: Vector
        self.start_episode()

    def start_episode(self) -> None:
        self.episode, self.total_reward, self.actions = self.episode + 1, 0.0, []
        self.observation = self.environment.reset(episode_seed(0, *self.seed, self.episode))

    def step(self, action: list[int]) -> tuple[float, bool, bool]:
        self.observation, reward, terminated, truncated = self.environment.step(action)
        self.total_reward += reward
        self.actions.append(action)
        return reward, terminated, truncated

    def replay(self, episode: int, actions: list[list[int]]) -> None:
        """Return to a state by repeating the actions of its episode."""
        self.episode = episode - 1
        self.start_episode()
        for action in actions:
            self.step(action)


class RolloutData(TaskData):
    has_state = True
    model: Model
    agent: Agent

    def __init__(self, task: Control):
        self.task = task
        self.environment = self.new_environment()
        self.fingerprint = fingerprint(task.environment)
        self.copies: list[EnvironmentCopy] = []
        self.cache: dict[str, Tensor] = {}  # of the copies at the end of the last segment
        self.rollout: dict[str, Tensor] = {}  # the last segment
        self.used = 0  # rows of it that were used in batches, counted once per epoch
        self.rollouts = self.steps = 0  # so far
        self.returns: list[float] = []  # of the last episodes

    def new_environment(self, render: bool = False) -> Environment:
        return Environment(self.task.environment, self.task.use_memory, render)

    def member_settings(self) -> dict[str, Any]:
        return {"dropout": 0.0}  # with dropout, training would not compute the outputs of the agent that acted

    def output_heads(self) -> tuple[OutputHead, ...]:
        """The logits of the actions, and the value."""
        return PerToken(sum(self.environment.choices)), PerToken(1)

    def adapt(self, model: Model | EncoderDecoder) -> Model | EncoderDecoder:
        one = _causal(model)
        length = self.task.memory or (one.memory.length if one.memory else MEMORY)
        memory = SegmentMemory(length) if self.task.use_memory else None
        embed, outputs = Features(self.environment.inputs), self.output_heads()
        return replace(one, embed=embed, outputs=outputs, memory=memory, auxiliary=None, generator=None)

    def fit(self, model: Model | EncoderDecoder) -> FittedTask:
        self.model = one = _causal(model)
        if (one.embed, one.outputs) != (Features(self.environment.inputs), self.output_heads()):
            raise ValueError(
                f"{self.task.environment} has observations of {self.environment.inputs} numbers and actions of "
                f"{self.environment.choices} choices, but the model has {one.embed} and {one.outputs}; start a new run"
            )
        needs = {part.needs for part in one.body.patterns()}
        if needs & {"documents", "edges"}:
            raise ValueError(
                "the model needs the document or the edges of every position, but an agent has none: its episodes are separated "
                "without them; leave model.episodes out, or choose another member"
            )
        memory = self.task.memory or (one.memory.length if one.memory else None)
        self.agent = Agent(self.environment.choices, memory if self.task.use_memory else None)
        objective = ControlObjective(self.task, self.agent, self.new_environment)
        inference = ControlInference(self.task, self.agent, self.new_environment, self.environment.can_render())
        return FittedTask(self, objective, inference)

    def examples(self) -> int:
        return self.task.copies

    @torch.no_grad()
    def collect(self, network: Network | PairNetwork, seed: int, kernel: str) -> None:
        """Act for a segment, if the last one has been used for all its epochs."""
        task = self.task
        if self.rollout and self.used < task.epochs * task.copies:
            return
        assert isinstance(network, Network)
        weight = next(network.eval().parameters())
        if hasattr(weight, "full_tensor"):
            raise ValueError(
                "an agent's processes call the network at different times, but all processes must call a sharded network "
                "together; leave run.shard out"
            )
        if not self.copies:
            self.copies = [EnvironmentCopy(self.new_environment(), seed, row) for row in range(task.copies)]
        agent, generator = dataclasses.replace(self.agent, kernel=kernel), step_generator(seed, self.rollouts)
        cached = {name: x.to(weight.device) for name, x in self.cache.items()}
        cache = Cache.from_state_dict(cached) if cached else Cache(segment_memory=True)
        steps = []
        for time in range(task.segment):
            step, cache = self._step(agent, network, cache, generator, time)
            steps.append(step)
        last_value_B = self._values(agent, network, cache)
        x = {name: torch.stack([step[name] for step in steps], dim=1) for name in steps[0]}
        next_value_BT = torch.cat((x["value"][:, 1:], last_value_B[:, None]), dim=1)
        next_value_BT = torch.where(x["end"], x["truncated_value"], next_value_BT)
        advantage_BT = advantages(x["reward"], x["value"], next_value_BT, x["end"], task.discount, task.gae_lambda)
        self.rollout = {
            "input_BTF": x["input"],
            "first_BT": x["first"],
            "action_BTP": x["action"],
            "log_probability_BT": x["log_probability"],
            "advantage_BT": (advantage_BT - advantage_BT.mean()) / (advantage_BT.std(correction=0) + 1e-8),
            "return_BT": advantage_BT + x["value"],
        } | {f"cache.{name}": x for name, x in self.cache.items()}
        self.cache = {}
        if cache.entries:
            assert agent.memory is not None
            self.cache = {name: x.cpu() for name, x in cache.trim(agent.memory).state_dict().items()}
        self.used, self.rollouts, self.steps = 0, self.rollouts + 1, self.steps + task.copies * task.segment

    def _step(
        self, agent: Agent, network: Network, cache: Cache, generator: torch.Generator, time: int
    ) -> tuple[dict[str, Tensor], Cache]:
        """Act once in every copy. Returns what is kept of the step, and the cache after it."""
        observations = [copy.observation for copy in self.copies]
        first_B = torch.tensor([not copy.actions for copy in self.copies])
        output = agent.forward(network, observations, cache, extra_memory=time + 1)
        cache, (logits_BV, value_B) = output.cache or cache, _logits_and_value(output)
        action_BP = agent.sample(logits_BV, generator)
        results = [copy.step(action) for copy, action in zip(self.copies, action_BP.tolist(), strict=True)]
        reward_B, terminated_B, truncated_B = (torch.tensor(one) for one in zip(*results, strict=True))
        truncated_B &= ~terminated_B
        end_B = terminated_B | truncated_B
        truncated_value_B = torch.zeros(len(end_B))
        if bool(truncated_B.any()):
            truncated_value_B = torch.where(truncated_B, self._values(agent, network, cache), truncated_value_B)
        step = {
            "input": torch.from_numpy(np.stack(observations)),
            "first": first_B,
            "action": action_BP,
            "log_probability": agent.log_probability(logits_BV, action_BP),
            "value": value_B,
            "reward": reward_B,
            "end": end_B,
            "truncated_value": truncated_value_B,
        }
        return step, self._start_episodes(cache, end_B)

    def _values(self, agent: Agent, network: Network, cache: Cache) -> Tensor:
        """The value of the last observation of each copy."""
        return _logits_and_value(agent.forward(network, [copy.observation for copy in self.copies], cache))[1]

    def _start_episodes(self, cache: Cache, end_B: Tensor) -> Cache:
        for row in end_B.nonzero()[:, 0].tolist():
            self.returns = [*self.returns, self.copies[row].total_reward][-RECENT:]
            self.copies[row].start_episode()
        return cache.reset(end_B.to(cache.entries[0].tensors[0].device)) if cache.entries else cache

    def batch(self, step: int, size: int, seed: int) -> Batch:
        if not self.rollout:  # for a plan. Two segments, because the first one begins with an empty cache.
            network = self.model.build()
            for _ in range(2):
                self.used = self.task.epochs * self.task.copies
                self.collect(network, seed, "auto")
        row_B = epoch_rows(self.task.copies, self.used, size, seed * 1_000_003 + self.rollouts)
        self.used += size
        return Batch({name: x[row_B] for name, x in self.rollout.items()})

    def count(self, batch: Batch) -> int:
        return batch["log_probability_BT"].numel()

    def statistics(self) -> dict[str, Any]:
        mean = {"return": float(np.mean(self.returns))} if self.returns else {}
        return mean | {"environment_steps": self.steps}

    def state(self) -> dict[str, Tensor]:
        if not self.copies:
            return {}
        state = {f"rollout.{name}": x for name, x in self.rollout.items()}
        state |= {f"cache.{name}": x for name, x in self.cache.items()}
        parts = len(self.environment.choices)
        actions = [action for copy in self.copies for action in copy.actions]
        return state | {
            "observation_BF": torch.from_numpy(np.stack([copy.observation for copy in self.copies])),
            "episode_B": torch.tensor([copy.episode for copy in self.copies]),
            "length_B": torch.tensor([len(copy.actions) for copy in self.copies]),
            "action_NP": torch.tensor(actions).reshape(-1, parts),
            "returns": torch.tensor(self.returns, dtype=torch.float64),
            "counts": torch.tensor([self.used, self.rollouts, self.steps]),
        }

    def load_state(self, state: Mapping[str, Tensor], seed: int) -> None:
        self.rollout = {name.removeprefix("rollout."): x for name, x in state.items() if name.startswith("rollout.")}
        self.cache = cache_tensors(state)
        self.returns = state["returns"].tolist()
        self.used, self.rollouts, self.steps = state["counts"].tolist()
        self.copies = [EnvironmentCopy(self.new_environment(), seed, row) for row in range(self.task.copies)]
        actions = state["action_NP"].split(state["length_B"].tolist())
        for copy, episode, action_NP, observation in zip(
            self.copies, state["episode_B"].tolist(), actions, state["observation_BF"].numpy(), strict=True
        ):
            copy.replay(episode, action_NP.tolist())
            if not np.array_equal(copy.observation, observation):
                raise ValueError(
                    f"{self.task.environment} gives another observation after the same seed and actions, so the run cannot be "
                    "resumed; start a new one"
                )


def advantages(
    reward_BT: Tensor, value_BT: Tensor, next_value_BT: Tensor, end_BT: Tensor, discount: float, gae_lambda: float
) -> Tensor:
    """Generalized advantage estimation. `next_value_BT` is the value after each step; nothing crosses the end of an episode."""
    delta_BT = reward_BT + discount * next_value_BT - value_BT
    weight_BT = discount * gae_lambda * (~end_BT).to(delta_BT.dtype)
    reversed_advantages, advantage_B = [], torch.zeros_like(delta_BT[:, 0])
    for time in reversed(range(delta_BT.shape[1])):
        advantage_B = delta_BT[:, time] + weight_BT[:, time] * advantage_B
        reversed_advantages.append(advantage_B)
    return torch.stack(reversed_advantages[::-1], dim=1)


def _causal(model: Model | EncoderDecoder) -> Model:
    """Returns the model. Raises ValueError if it cannot act on the observations so far."""
    if not isinstance(model, Model) or model.class_token or not model.body.is_causal():
        raise ValueError(
            "an agent acts before it sees later observations, but this member reads whole sequences; choose gtrxl, "
            "transformer-xl or lstm"
        )
    return model


def _logits_and_value(output: Output) -> tuple[Tensor, Tensor]:
    """The logits and the values of one step, on the CPU, in float32 at least."""
    logits_BTV, value_BT1 = (one.to(torch.promote_types(one.dtype, torch.float32)).cpu() for one in output.logits)
    return logits_BTV[:, 0], value_BT1[:, 0, 0]
