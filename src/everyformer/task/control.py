"""Control: act so that the reward is large, by proximal policy optimisation.

Papers: Schulman et al. 2017 (PPO) and 2016 (generalised advantage estimation); as a task for memories Parisotto et al. 2019.

Equations, of one step with the action a, the advantage A and the old probability pi_old(a):
    loss = -min(r A, clip(r, 1 - eps, 1 + eps) A) + c_1 (V - R)^2 - c_2 S,   r = pi(a) / pi_old(a)
    A_t = sum_l (gamma lambda)^l delta_{t+l} to the end of the episode,  delta_t = r_t + gamma V_{t+1} - V_t,  R_t = A_t + V_t
Symbols: `discount` gamma, `trace` lambda, `clip` eps, `critic` c_1, `entropy` c_2 (S is the policy's).

`copies` of an environment are acted in for a `segment` of steps, then the learner goes over these `epochs` times, some copies at
a time (run.batch). The agent's memory is the model's past, whatever it is: at the end of an episode its row begins anew
(`Past.reset`), the others go on into the next segment. The learner computes a segment anew from the past with which it began. An
episode's part of it is a sequence of its own, one that goes on with its past, one that begins without, so that nothing
crosses an end, whatever the layers are. Within a segment nothing is dropped from the past, so the learner sees what the agent saw.

Departures: advantages have mean 0 and deviation 1 over the whole segment, not over each batch, so that pieces of a batch change
nothing. After a step that a time limit cut off, V of what was seen last stands for the rest (Pardo et al. 2018).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from msgspec import Meta
from msgspec.structs import replace
from torch import Tensor

from everyformer.data.environments import Environment, Vector, fingerprint
from everyformer.data.images import import_pillow
from everyformer.infer.act import Agent, play
from everyformer.network.cache import Cache, SegmentMemory
from everyformer.network.embed import Features
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, Output, PairNetwork
from everyformer.network.output_head import OutputHead, PerToken
from everyformer.task.work import Batch, Task, Work, check_split, draw, epoch_rows
from everyformer.value import NotNegative, Part, Positive, Size, Value

MEMORY = 64  # where neither the member nor the recipe says
RECENT = 100  # episodes whose mean return is told while training
SPLITS = {"valid": 1, "test": 2}  # what seeds of episodes begin with; those of training begin with 0
SURE = 1.96  # deviations of a mean to either side that hold the truth in 19 of 20 cases


class Control(Task, Value, frozen=True):
    """Act in an environment: popgym:NAME, minigrid:NAME, gymnasium:NAME, or recall, our own."""

    environment: str = "recall"
    copies: Size = 64  # environments that are acted in side by side
    segment: Size = 64  # steps in each of them before the learner goes over them
    epochs: Size = 4  # how often it does
    discount: Part = 0.99
    trace: Part = 0.95
    clip: Positive = 0.2
    critic: NotNegative = 0.5
    entropy: NotNegative = 0.01
    remembers: bool = True  # False: a feed-forward agent, to which all but what it sees now is unknown
    memory: Size | None = None  # how many positions are remembered; None: as the member says, or 64
    episodes: Annotated[int, Meta(ge=2)] = 200  # of an evaluation that is not limited
    choose: Literal["draw", "likeliest"] = "draw"  # how actions are chosen in evaluations

    def open(self, data: str | None, context: int | None, folder: Path | None = None) -> Work:
        if data is not None:
            raise ValueError(
                f"an agent learns from what it does in {self.environment}, not from {data}; leave --data out"
            )
        return ControlWork(self)


class Copy:
    """An environment that goes from episode to episode, each with a seed of its own."""

    def __init__(self, environment: Environment, *seed: int):
        self.environment, self.seed = environment, seed
        self.episode, self.total = -1, 0.0
        self.taken: list[list[int]] = []  # actions in this episode
        self.seen: Vector
        self.begin()

    def begin(self) -> None:
        self.episode, self.total, self.taken = self.episode + 1, 0.0, []
        self.seen = self.environment.reset(seeded(0, *self.seed, self.episode))

    def step(self, action: list[int]) -> tuple[float, bool, bool]:
        self.seen, reward, ended, cut = self.environment.step(action)
        self.total += reward
        self.taken.append(action)
        return reward, ended, cut

    def return_to(self, episode: int, actions: list[list[int]]) -> None:
        """Take the actions of an episode again."""
        self.episode = episode - 1
        self.begin()
        for action in actions:
            self.step(action)


class ControlWork(Work):
    metric = "return"
    higher_is_better = True
    paints = True
    hint = "--out episode.gif"
    file = "episode.gif"
    value: Model
    agent: Agent

    def __init__(self, task: Control):
        self.task = task
        self.one = self._another()
        self.fingerprint = fingerprint(task.environment)
        self.writes = self.one.can_render()
        self.copies: list[Copy] = []
        self.kept: dict[str, Tensor] = {}  # the past of the copies, where they stand
        self.rollout: dict[str, Tensor] = {}  # what the learner goes over
        self.used = 0  # how many sequences of it, counted as often as it goes over them
        self.rollouts = self.steps = 0  # so far
        self.returns: list[float] = []  # of the last episodes

    def changes(self) -> dict[str, Any]:
        return {"dropout": 0.0}  # with it the learner would be another agent than the one that acted

    def heads(self) -> tuple[OutputHead, ...]:
        """The actor and the critic."""
        return PerToken(sum(self.one.choices)), PerToken(1)

    def adapt(self, value: Model | EncoderDecoder) -> Model | EncoderDecoder:
        one = _reader(value)
        length = self.task.memory or (one.memory.length if one.memory else MEMORY)
        memory = SegmentMemory(length) if self.task.remembers else None
        return replace(one, embed=Features(self.one.inputs), outputs=self.heads(), memory=memory, auxiliary=None)

    def fit(self, value: Model | EncoderDecoder) -> None:
        self.value = one = _reader(value)
        if (one.embed, one.outputs) != (Features(self.one.inputs), self.heads()):
            raise ValueError(
                f"{self.task.environment} shows {self.one.inputs} numbers and has actions of {self.one.choices} choices, but the "
                f"model is made for {one.embed} and {one.outputs}; begin a new run"
            )
        needs = {part.needs for part in one.body.patterns()}
        if needs & {"documents", "edges"}:
            raise ValueError(
                "the model asks of every call which document or edges a position has, but an agent is told none: its episodes are kept "
                "apart without; leave model.episodes out, or choose another member"
            )
        self.agent = Agent(
            self.one.choices,
            self.task.memory or (one.memory.length if one.memory else None) if self.task.remembers else None,
        )

    def examples(self) -> int:
        return self.task.copies

    @torch.no_grad()
    def gather(self, network: Network | PairNetwork, seed: int, kernel: str) -> None:
        """Act for a segment, if the last one has been gone over often enough."""
        task = self.task
        if self.rollout and self.used < task.epochs * task.copies:
            return
        assert isinstance(network, Network)
        weight = next(network.eval().parameters())
        if hasattr(weight, "full_tensor"):
            raise ValueError(
                "each process reads the episodes that it learns from in calls of its own, but a sharded model is called by all at once; "
                "leave run.shard out"
            )
        if not self.copies:
            self.copies = [Copy(self._another(), seed, row) for row in range(task.copies)]
        agent, random = dataclasses.replace(self.agent, kernel=kernel), draw(seed, self.rollouts)
        rows: dict[str, list[Any]] = {
            name: [] for name in ("input", "first", "action", "told", "value", "reward", "end", "after")
        }
        kept = {name: x.to(weight.device) for name, x in self.kept.items()}
        cache = Cache.from_state_dict(kept) if kept else Cache(segment_memory=True)
        for time in range(task.segment):
            seen = [copy.seen for copy in self.copies]
            rows["input"].append(torch.from_numpy(np.stack(seen)))
            rows["first"].append(torch.tensor([not copy.taken for copy in self.copies]))
            output = agent.look(network, seen, cache, longer=time + 1)
            cache, (logits_BV, value_B) = output.cache or cache, _told(output)
            action_BP = agent.draw(logits_BV, random)
            rows["action"].append(action_BP)
            rows["told"].append(agent.log_share(logits_BV, action_BP))
            rows["value"].append(value_B)
            found = [copy.step(action) for copy, action in zip(self.copies, action_BP.tolist(), strict=True)]
            reward_B, ended_B, cut_B = (torch.tensor(one) for one in zip(*found, strict=True))
            cut_B &= ~ended_B
            rows["reward"].append(reward_B)
            rows["end"].append(ended_B | cut_B)
            rows["after"].append(self._cut_off(agent, network, cache, cut_B))
            cache = self._begin_anew(cache, ended_B | cut_B)
        last = self._values(agent, network, cache)
        x = {name: torch.stack(some, dim=1) for name, some in rows.items()}
        after_BT = torch.where(x["end"], x["after"], torch.cat((x["value"][:, 1:], last[:, None]), dim=1))
        gain_BT = advantages(x["reward"], x["value"], after_BT, x["end"], task.discount, task.trace)
        self.rollout = {
            "input_BTF": x["input"],
            "first_BT": x["first"],
            "action_BTP": x["action"],
            "told_BT": x["told"],
            "gain_BT": (gain_BT - gain_BT.mean()) / (gain_BT.std(correction=0) + 1e-8),
            "worth_BT": gain_BT + x["value"],
        } | {f"past.{name}": x for name, x in self.kept.items()}
        self.kept = {}
        if cache.entries:
            assert agent.memory is not None
            self.kept = {name: x.cpu() for name, x in cache.trim(agent.memory).state_dict().items()}
        self.used, self.rollouts, self.steps = 0, self.rollouts + 1, self.steps + task.copies * task.segment

    def _another(self, pictures: bool = False) -> Environment:
        return Environment(self.task.environment, self.task.remembers, pictures)

    def _values(self, agent: Agent, network: Network, cache: Cache) -> Tensor:
        """What each copy is still worth as it stands."""
        return _told(agent.look(network, [copy.seen for copy in self.copies], cache))[1]

    def _cut_off(self, agent: Agent, network: Network, cache: Cache, cut_B: Tensor) -> Tensor:
        """What was still to come where a time limit ended an episode; 0 elsewhere."""
        nothing_B = torch.zeros(len(cut_B))
        return torch.where(cut_B, self._values(agent, network, cache), nothing_B) if bool(cut_B.any()) else nothing_B

    def _begin_anew(self, cache: Cache, end_B: Tensor) -> Cache:
        for row in end_B.nonzero()[:, 0].tolist():
            self.returns = [*self.returns, self.copies[row].total][-RECENT:]
            self.copies[row].begin()
        return cache.reset(end_B.to(cache.entries[0].tensors[0].device)) if cache.entries else cache

    def batch(self, step: int, size: int, seed: int) -> Batch:
        if not self.rollout:  # asked by a plan. Two segments, because the first has nothing to remember.
            network = self.value.build()
            for _ in range(2):
                self.used = self.task.epochs * self.task.copies
                self.gather(network, seed, "auto")
        row_B = epoch_rows(self.task.copies, self.used, size, seed * 1_000_003 + self.rollouts)
        self.used += size
        return Batch({name: x[row_B] for name, x in self.rollout.items()})

    def count(self, batch: Batch) -> int:
        return batch["told_BT"].numel()

    def loss(self, network: Network | PairNetwork, batch: Batch, kernel: str) -> Tensor:
        agent, task = self.agent, self.task
        logits_NV, value_N, place_N, costs = self.again(network, batch, kernel)
        action_NP, told_N, gain_N, worth_N = (
            batch[name].flatten(0, 1)[place_N] for name in ("action_BTP", "told_BT", "gain_BT", "worth_BT")
        )
        ratio_N = (agent.log_share(logits_NV, action_NP) - told_N).exp()
        clipped_N = ratio_N.clamp(1 - task.clip, 1 + task.clip)
        actor = -torch.minimum(ratio_N * gain_N, clipped_N * gain_N).sum()
        critic = (value_N.float() - worth_N).square().sum()
        return actor + task.critic * critic - task.entropy * agent.entropy(logits_NV).sum() + costs

    def again(self, network: Any, batch: Batch, kernel: str) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
        """Logits and values of all steps in a segment, as the network is now; which steps they are of; and costs to be added.

        Sequences are the parts of episodes, in several calls: those that were going on when it began, and those that began in it,
        together as far as they are about as long.
        """
        input_BTF, first_BT = batch["input_BTF"].to(next(network.parameters()).dtype), batch["first_BT"]
        length = first_BT.shape[1]
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        costs: Tensor | float = 0.0
        if not self.task.remembers:
            first_BT = torch.ones_like(first_BT)
        start_BT = first_BT.clone()
        start_BT[:, 0] = True
        place_P = start_BT.flatten().nonzero()[:, 0]
        end_P = torch.cat((place_P[1:], place_P.new_tensor([first_BT.numel()])))
        kept, going_P, length_P = _pasts(batch.tensors), ~first_BT.flatten()[place_P], end_P - place_P
        for chosen_P in (going_P, *_alike(length_P, ~going_P)):
            here_P, size_P = place_P[chosen_P], length_P[chosen_P]
            if not len(here_P):
                continue
            cache = Cache.from_state_dict(kept).reorder(here_P // length) if kept and chosen_P is going_P else None
            time_T = torch.arange(int(size_P.max()), device=here_P.device)
            visible_PT = time_T < size_P[:, None]
            place_PT = (here_P[:, None] + time_T).clamp(max=first_BT.numel() - 1)
            output = network(
                input_BTF.flatten(0, 1)[place_PT],
                visible=None if bool(visible_PT.all()) else visible_PT,
                cache=cache,
                kernel=kernel,
            )
            logits_PTV, value_PT1 = output.logits
            parts.append((logits_PTV[visible_PT], value_PT1[visible_PT][:, 0], place_PT[visible_PT]))
            costs = costs + sum(output.aux.values()) * int(size_P.sum())
        logits_NV, value_N, place_N = (torch.cat(some) for some in zip(*parts, strict=True))
        return logits_NV, value_N, place_N, costs

    def facts(self) -> dict[str, Any]:
        told = {"return": float(np.mean(self.returns))} if self.returns else {}
        return told | {"acted": self.steps}

    def evaluate(self, network: Network | PairNetwork, split: str, limit: int | None, kernel: str) -> dict[str, Any]:
        check_split(split, SPLITS, self.task.environment)
        assert isinstance(network, Network)
        count = self.task.episodes if limit is None else limit
        if count < 2:
            raise ValueError(f"{count} episodes have no interval; give 2 or more")
        warmth = 1.0 if self.task.choose == "draw" else 0.0
        agent = dataclasses.replace(self.agent, kernel=kernel, temperature=warmth)
        seeds = [seeded(SPLITS[split], number) for number in range(count)]
        found, lengths = play(agent, network.eval(), self.stages, seeds, draw(SPLITS[split], 0))
        mean, half = float(np.mean(found)), SURE * float(np.std(found, ddof=1)) / math.sqrt(count)
        return {
            "return": mean,
            "low": mean - half,
            "high": mean + half,
            "length": float(np.mean(lengths)),
            "split": split,
            "episodes": count,
            "actions": "drawn" if self.task.choose == "draw" else "the likeliest",
        }

    @cached_property
    def stages(self) -> list[Environment]:
        """Where episodes are played that nobody learns from."""
        return [self._another() for _ in range(self.task.copies)]

    def paint(  # type: ignore[override]
        self, network: Network | PairNetwork, file: Path, *, temperature: float = 1.0, seed: int = 0
    ) -> str:
        """An episode as a GIF."""
        if not self.writes:
            raise ValueError(f"{self.task.environment} cannot be seen in pictures (it has no rgb_array); use evaluate")
        if file.suffix != ".gif" or not file.parent.is_dir():
            raise ValueError(f"cannot write an episode to {file}; give a .gif file in a folder that exists")
        image = import_pillow()
        assert isinstance(network, Network)
        stage = self._another(pictures=True)
        frames: list[Any] = []
        agent = dataclasses.replace(self.agent, temperature=temperature)
        (total,), (length,) = play(
            agent,
            network.eval(),
            [stage],
            [seeded(SPLITS["valid"], seed)],
            draw(seed, 0),
            lambda: frames.append(image.fromarray(stage.render())),
        )
        frames[0].save(file, save_all=True, append_images=frames[1:], duration=200, loop=0)
        return f"an episode of {length} steps with a return of {total:.4g}: {file}"

    def state(self) -> dict[str, Tensor]:
        if not self.copies:
            return {}
        found = {f"rollout.{name}": x for name, x in self.rollout.items()}
        found |= {f"past.{name}": x for name, x in self.kept.items()}
        length_B = torch.tensor([len(copy.taken) for copy in self.copies])
        parts = len(self.one.choices)
        action_NP = torch.tensor([action for copy in self.copies for action in copy.taken]).reshape(-1, parts)
        return found | {
            "seen_BF": torch.from_numpy(np.stack([copy.seen for copy in self.copies])),
            "episode_B": torch.tensor([copy.episode for copy in self.copies]),
            "length_B": length_B,
            "action_NP": action_NP,
            "returns": torch.tensor(self.returns, dtype=torch.float64),
            "counts": torch.tensor([self.used, self.rollouts, self.steps]),
        }

    def restore(self, found: Mapping[str, Tensor], seed: int) -> None:
        self.rollout = {name.removeprefix("rollout."): x for name, x in found.items() if name.startswith("rollout.")}
        self.kept = _pasts(found)
        self.returns = found["returns"].tolist()
        self.used, self.rollouts, self.steps = found["counts"].tolist()
        self.copies = [Copy(self._another(), seed, row) for row in range(self.task.copies)]
        actions = found["action_NP"].split(found["length_B"].tolist())
        for copy, episode, taken, seen in zip(
            self.copies, found["episode_B"].tolist(), actions, found["seen_BF"].numpy(), strict=True
        ):
            copy.return_to(episode, taken.tolist())
            if not np.array_equal(copy.seen, seen):
                raise ValueError(
                    f"{self.task.environment} shows something else after the same seed and actions, so that the run cannot go on from "
                    "where it was; begin a new one"
                )


def advantages(
    reward_BT: Tensor, value_BT: Tensor, after_BT: Tensor, end_BT: Tensor, discount: float, trace: float
) -> Tensor:
    """Generalised advantage estimation. `after_BT` is what was still to come after each step; nothing comes from behind an end."""
    delta_BT = reward_BT + discount * after_BT - value_BT
    weight_BT = discount * trace * (~end_BT).to(delta_BT.dtype)
    found, gain_B = [], torch.zeros_like(delta_BT[:, 0])
    for time in reversed(range(delta_BT.shape[1])):
        gain_B = delta_BT[:, time] + weight_BT[:, time] * gain_B
        found.append(gain_B)
    return torch.stack(found[::-1], dim=1)


def seeded(*numbers: int) -> int:
    """The seed of an episode, from what tells it from all others."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def _reader(value: Model | EncoderDecoder) -> Model:
    """The model, if it can act on what it has seen so far."""
    if not isinstance(value, Model) or value.class_token or not value.body.is_causal():
        raise ValueError(
            "an agent acts before it sees what comes, but this member reads whole sequences; choose gtrxl, transformer-xl or lstm"
        )
    return value


def _alike(length_P: Tensor, chosen_P: Tensor) -> list[Tensor]:
    """Which of the chosen sequences are read together: all, if padding is no more than they are, else those up to 1, 2, 4, ... long."""
    some = length_P[chosen_P]
    if not len(some) or len(some) * int(some.max()) <= 2 * int(some.sum()):
        return [chosen_P]
    power_P = (length_P - 1).float().clamp(min=0.5).log2().floor()
    return [chosen_P & (power_P == power) for power in power_P[chosen_P].unique().tolist()]


def _told(output: Output) -> tuple[Tensor, Tensor]:
    """Logits and values of one step, where the environments are."""
    logits_BTV, value_BT1 = (one.to(torch.promote_types(one.dtype, torch.float32)).cpu() for one in output.logits)
    return logits_BTV[:, 0], value_BT1[:, 0, 0]


def _pasts(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("past."): x for name, x in found.items() if name.startswith("past.")}
