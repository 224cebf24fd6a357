"""Control: an agent learns to act in an environment by proximal policy optimization.

Papers: Schulman et al. 2017 (PPO) and 2016 (generalized advantage estimation); as a task for memories Parisotto et al. 2019.

`copies` of an environment run side by side. The agent acts for a `segment` of steps in each (`control_data`), then the network
is trained on these steps for some `epochs`, with run.batch copies in a batch (`control_objective`). The agent's memory is the
model's cache, of whatever kind: when an episode ends its row is reset, the others continue into the next segment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from everyformer.network.model import Model
from everyformer.task.control_data import RolloutData
from everyformer.task.task import Task
from everyformer.value import NotNegative, Part, Positive, Size, Value


class Control(Task, Value, frozen=True):
    """Act in an environment: popgym:NAME, minigrid:NAME, gymnasium:NAME, or recall, which is built in."""

    environment: str = "recall"  # popgym:NAME, minigrid:NAME, gymnasium:NAME, or recall, which is built in
    copies: Size = 64  # copies of the environment that run side by side
    segment: Size = 64  # steps in each copy between two phases of training
    epochs: Size = 4  # passes over the steps of a segment
    discount: Part = 0.99  # discount of later rewards (gamma)
    gae_lambda: Part = 0.95  # lambda of generalized advantage estimation
    clip: Positive = 0.2  # epsilon: largest change of the probability ratio
    value_weight: NotNegative = 0.5  # weight of the value loss
    entropy_weight: NotNegative = 0.01  # weight of the entropy bonus
    use_memory: bool = (
        True  # carry the cache from step to step; False: a feed-forward agent, which reads every observation on its own
    )
    memory: Size | None = None  # length of the agent's cache; None: the member's, or 64
    episodes: Annotated[int, Meta(ge=2)] = 200  # episodes of an evaluation without a limit
    actions: Literal["sample", "greedy"] = "sample"  # how an evaluation chooses actions

    def default_lr(self, model: Model) -> float:
        """Returns 1e-3 for any model: an agent's batches change with its weights, so that higher rates are unstable."""
        return 1e-3

    def open(self, data: str | None, folder: Path | None = None) -> RolloutData:
        if data is not None:
            raise ValueError(
                f"an agent learns from its own episodes in {self.environment}, not from {data}; leave --data out"
            )
        return RolloutData(self)
