"""Trains sb3-contrib's RecurrentPPO on a task of `bench.control`, with the same observations, test seeds and number of steps.

    pip install -c constraints.txt sb3-contrib==2.9.2      # in a separate environment: it is not a dependency
    python -m bench.control_peer --task popgym:RepeatPreviousEasy --acted 258048 --seed 0
    python -m bench.control_peer --task popgym:RepeatPreviousEasy --acted 258048 --seed 0 --own

Its settings are those of our task and of the `lstm` of `bench.control`, where it has them: 64 environments, 64 steps, 4 epochs,
batches of 2,048 steps, the same learning rate, discount, lambda, clipping and entropy cost; two layers of 112 shared by actor and
critic. With `--own` it uses its own defaults and 8 environments. Prints one JSON line with the mean return over the test
episodes and its interval.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from typing import Any

import gymnasium
import numpy as np
import torch
from sb3_contrib import RecurrentPPO  # type: ignore[import-not-found]

from everyformer.data.environments import Environment
from everyformer.task.control_objective import CONFIDENCE, SPLITS, episode_seed
from everyformer.train.provenance import start_log


class GymnasiumEnvironment(gymnasium.Env[Any, Any]):
    """Our environment with gymnasium's interface and the episode seeds of one of our runs."""

    def __init__(self, name: str, *seed: int):
        self.inside, self.seed, self.episode = Environment(name), seed, -1
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (self.inside.inputs,))
        choices = self.inside.choices
        self.action_space = (
            gymnasium.spaces.Discrete(choices[0]) if len(choices) == 1 else gymnasium.spaces.MultiDiscrete(choices)
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.episode += 1
        return self.inside.reset(episode_seed(0, *self.seed, self.episode)), {}

    def step(self, action: Any) -> Any:
        return *self.inside.step(np.atleast_1d(action).tolist()), {}


def test_returns(model: Any, name: str, episodes: int) -> list[float]:
    returns = []
    environment = Environment(name)
    for number in range(episodes):
        seen, state, first, total, ended = (
            environment.reset(episode_seed(SPLITS["test"], number)),
            None,
            True,
            0.0,
            False,
        )
        while not ended:
            action, state = model.predict(seen, state=state, episode_start=np.array([first]), deterministic=False)
            seen, reward, over, cut = environment.step(np.atleast_1d(action).tolist())
            total, first, ended = total + reward, False, over or cut
        returns.append(total)
    return returns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="popgym:RepeatPreviousEasy")
    parser.add_argument("--acted", type=int, default=258_048, help="environment steps: 63 segments")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--own", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start_log(seed=options.seed, packages=("sb3-contrib", "popgym", "gymnasium"))
    from stable_baselines3.common.vec_env import DummyVecEnv  # type: ignore[import-not-found]

    environments = DummyVecEnv(
        [
            lambda row=row: GymnasiumEnvironment(options.task, options.seed, row)
            for row in range(8 if options.own else 64)
        ]
    )
    ours = {
        "n_steps": 64, "batch_size": 2048, "n_epochs": 4, "gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.2, "ent_coef": 0.01,
        "vf_coef": 0.5, "max_grad_norm": 1.0,
        "learning_rate": lambda left: 1e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (1 - left)))),
        "policy_kwargs": {
            "lstm_hidden_size": 112, "n_lstm_layers": 2, "shared_lstm": True, "enable_critic_lstm": False, "net_arch": [],
        },
    }  # fmt: skip
    model = RecurrentPPO(
        "MlpLstmPolicy", environments, seed=options.seed, device="cpu", **({} if options.own else ours)
    )
    start = time.process_time()
    model.learn(options.acted)
    seconds = time.process_time() - start
    returns = test_returns(model, options.task, options.episodes)
    mean, half = float(np.mean(returns)), CONFIDENCE * float(np.std(returns, ddof=1)) / math.sqrt(len(returns))
    result = {
        "agent": "sb3-contrib RecurrentPPO" + (" with its defaults" if options.own else ""), "task": options.task, "seed": options.seed,
        "return": mean, "low": mean - half, "high": mean + half, "episodes": len(returns), "acted": int(model.num_timesteps),
        "parameters": sum(p.numel() for p in model.policy.parameters()), "seconds": round(seconds, 1),
        "steps_a_second": round(model.num_timesteps / seconds),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
