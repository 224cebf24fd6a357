"""Control: training computes what the agent did, nothing crosses the end of an episode, and memory helps."""

from __future__ import annotations

import math
import shutil
from typing import Any

import numpy as np
import pytest
import torch

from everyformer.data import environments
from everyformer.data.environments import Environment
from everyformer.infer.rollout import Agent, play_episodes
from everyformer.task.batch import step_generator
from everyformer.task.control import Control
from everyformer.task.control_data import advantages
from everyformer.task.control_objective import episode_seed
from everyformer.task.table import task_for
from everyformer.train import checkpoint
from everyformer.train.loop import resume, train
from everyformer.train.recipe import Recipe, override
from tests.spec import control as spec
from tests.train.small import same

# Short episodes of different lengths, and actions of two parts.
UNEVEN = "popgym:MineSweeperEasy"
MEMBERS = ["gtrxl", "transformer-xl", "lstm", "ablated-lstm", "act-rnn", "universal-transformer"]


def ready(member: str, segments: int = 3, **task: Any) -> tuple[Any, Any]:
    """The task after the agent has acted for some segments, and its network, in float64."""
    recipe = Recipe(member=member, size="tiny", task=Control(**{"copies": 5, "segment": 7, "memory": 4} | task))
    recipe = override(recipe, ["model.width=16"])
    task_data: Any = recipe.task.open(None, None)
    value = task_data.adapt(recipe.value(task_data.member_settings()))
    task = task_data.fit(value)
    torch.manual_seed(0)
    network = value.build().double()
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.2)
    for _ in range(segments):
        task.data.used = 10**6
        task.data.collect(network, 0, "auto")
    return task, network


@pytest.mark.parametrize(("discount", "gae_lambda"), [(0.9, 0.8), (1.0, 1.0), (0.9, 0.0)])
def test_advantages_equal_the_sums_of_the_paper(discount, gae_lambda):
    torch.manual_seed(0)
    reward_BT, value_BT, after_BT = torch.randn(3, 4, 11, dtype=torch.float64)
    end_BT = torch.rand(4, 11) < 0.3
    result = advantages(reward_BT, value_BT, after_BT, end_BT, discount, gae_lambda)
    expected = [
        spec.advantages(*row, discount, gae_lambda) for row in zip(reward_BT, value_BT, after_BT, end_BT, strict=True)
    ]
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("advantage", [1.5, -0.7])
@pytest.mark.parametrize("moved", [0.0, 0.05, 2.0])
def test_the_loss_equals_the_clipped_loss_of_the_paper(moved, advantage):
    """For probability ratios inside and outside of the clipping interval."""
    task, network = ready("lstm", environment=UNEVEN, clip=0.1, value_weight=0.3, entropy_weight=0.2)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn_like(weight), alpha=moved)
    batch = task.data.batch(0, 5, 0)
    batch.tensors["advantage_BT"][:] = advantage
    logits_NV, value_N, step_N, _ = task.objective.recompute(network, batch, "auto")
    expected = 0.0
    for logits, value, index in zip(logits_NV.tolist(), value_N.tolist(), step_N.tolist(), strict=True):
        row, time = divmod(index, 7)
        step = {name: batch[name][row, time].tolist() for name in ("action_BTP", "log_probability_BT", "return_BT")}
        expected += spec.ppo_loss(
            [logits[:4], logits[4:]],
            step["action_BTP"],
            step["log_probability_BT"],
            advantage,
            value,
            step["return_BT"],
            0.1,
            0.3,
            0.2,
        )
    assert sorted(step_N.tolist()) == list(range(35)) and task.data.count(batch) == 35
    assert task.objective.loss(network, batch, "auto").item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.spec(128)
@pytest.mark.parametrize("environment", [UNEVEN, "recall"])
@pytest.mark.parametrize("member", MEMBERS)
def test_training_recomputes_the_outputs_of_the_agent(member, environment):
    """The log-probabilities and values of a segment, computed by episodes from its cache, equal those of acting step by step.

    The memory is shorter than the segment, episodes begin and end anywhere in it, and `train` mode changes nothing."""
    task, network = ready(member, environment=environment)
    batch = task.data.batch(0, 5, 0)
    first_BT = batch["first_BT"]
    assert first_BT.any() and not first_BT[:, 0].all() and any(name.startswith("cache.") for name in batch.tensors)
    for other in (network.eval(), network.train()):
        logits_NV, value_N, step_N, _ = task.objective.recompute(other, batch, "auto")
        log_probability_N = task.objective.agent.log_probability(logits_NV, batch["action_BTP"].flatten(0, 1)[step_N])
        torch.testing.assert_close(log_probability_N, batch["log_probability_BT"].flatten()[step_N], rtol=0, atol=1e-10)
    # R_t - A_t is the value of the agent, but for the advantages' mean and std.
    difference_N = (batch["return_BT"].flatten()[step_N] - value_N).detach()
    advantage_N = batch["advantage_BT"].flatten()[step_N]
    torch.testing.assert_close(
        (difference_N - difference_N.mean()) / difference_N.std(correction=0), advantage_N, rtol=1e-6, atol=1e-6
    )


def test_episodes_of_very_different_lengths_are_not_padded_to_the_longest():
    task, network = ready("gtrxl", environment=UNEVEN, segment=24)
    batch, read = task.data.batch(0, 5, 0), []
    network.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape[:2]))
    logits_NV, _, step_N, _ = task.objective.recompute(network, batch, "auto")
    log_probability_N = task.objective.agent.log_probability(logits_NV, batch["action_BTP"].flatten(0, 1)[step_N])
    torch.testing.assert_close(log_probability_N, batch["log_probability_BT"].flatten()[step_N], rtol=0, atol=1e-10)
    assert len(read) > 2 and sum(rows * length for rows, length in read) <= 2 * task.data.count(batch)


@pytest.mark.spec(128)
@pytest.mark.parametrize("member", MEMBERS[:5])
def test_nothing_crosses_the_end_of_an_episode(member):
    """Observations before the first step of an episode, and the cache, do not change its outputs by a bit."""
    task, network = ready(member, environment=UNEVEN)
    batch = task.data.batch(0, 5, 0)
    new_episode_BT = batch["first_BT"].long().cumsum(1) > 0
    assert new_episode_BT.any() and not new_episode_BT[:, 0].all()

    def outputs(batch):
        logits_NV, value_N, step_N, _ = task.objective.recompute(network, batch, "auto")
        order_N = step_N.argsort()
        return torch.cat((logits_NV, value_N[:, None]), dim=1)[order_N].unflatten(0, new_episode_BT.shape)

    before = outputs(batch)
    other = batch.rows(0, 5)
    tensors = {name: x.clone() for name, x in other.tensors.items()}
    tensors["input_BTF"][~new_episode_BT] += 1
    for name in tensors:
        if name.startswith(("cache.layer", "cache.state")):
            tensors[name] = tensors[name] + 1
    moved = (outputs(type(batch)(tensors)) - before).abs().amax(-1)
    assert moved[new_episode_BT].max().item() == 0 and moved[~new_episode_BT].min().item() > 0


def test_an_agent_without_memory_reads_one_observation():
    """Its outputs follow from the observation alone."""
    task, network = ready("gtrxl", environment=UNEVEN, use_memory=False)
    batch = task.data.batch(0, 5, 0)
    assert not any(name.startswith("cache.") for name in batch.tensors)
    logits_NV, _, step_N, _ = task.objective.recompute(network, batch, "auto")
    alone = network(batch["input_BTF"].double().flatten(0, 1)[:, None]).logits[0][:, 0]
    torch.testing.assert_close(logits_NV, alone[step_N])
    log_probability_N = task.objective.agent.log_probability(logits_NV, batch["action_BTP"].flatten(0, 1)[step_N])
    torch.testing.assert_close(log_probability_N, batch["log_probability_BT"].flatten()[step_N])


class Ramp:
    """An environment that counts up, with a reward of 1 per step and a time limit of 3."""

    metadata: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        from gymnasium import spaces

        self.observation_space, self.action_space = spaces.Box(0, np.inf, (1,)), spaces.Discrete(2, start=3)
        self.count = 0
        self.actions: list[int] = []

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return np.array([0.0]), {}

    def step(self, action):
        self.count += 1
        self.actions.append(action)
        return np.array([self.count / 10]), 1.0, False, self.count == 3, {}


def test_after_a_time_limit_the_value_stands_for_the_rest_of_the_episode(monkeypatch):
    """The return of a truncated step is its reward and the discounted value of the last observation."""
    monkeypatch.setattr(environments, "Recall", Ramp)
    task, network = ready("gtrxl", segments=1, discount=0.9, gae_lambda=0.0)
    assert set(task.data.copies[0].environment.inner.actions) <= {3, 4}  # the action space starts at 3
    batch = task.data.batch(0, 5, 0)
    value_T = []
    for start in range(0, 6, 3):  # episodes of three steps, and the observation after them
        after_B1F = torch.tensor([0.3, 0, 0]).expand(5, 1, 3).clone()
        after_B1F[range(5), 0, 1 + batch["action_BTP"][:, start + 2, 0]] = 1
        whole = torch.cat((batch["input_BTF"][:, start : start + 3], after_B1F), dim=1).double()
        value_T.append(network(whole).logits[1][..., 0])
    for number, value_BT in enumerate(value_T):
        expected_BT = 1 + 0.9 * value_BT[:, 1:]
        torch.testing.assert_close(batch["return_BT"][:, 3 * number : 3 * number + 3], expected_BT)


@pytest.mark.parametrize("member", ["gtrxl", "lstm"])
def test_episodes_played_together_equal_those_played_alone(member):
    """With greedy actions an episode does not depend on the others."""
    task, network = ready(member, environment=UNEVEN)
    agent = Agent(task.objective.agent.choices, 4, temperature=0.0)
    seeds = [episode_seed(1, number) for number in range(7)]
    many = play_episodes(agent, network, [Environment(UNEVEN) for _ in range(3)], seeds, step_generator(0, 0))
    alone = [play_episodes(agent, network, [Environment(UNEVEN)], [seed], step_generator(0, 0)) for seed in seeds]
    assert many == ([one[0][0] for one in alone], [one[1][0] for one in alone]) and len(set(many[1])) > 1


def test_an_evaluation_has_the_mean_return_and_its_confidence_interval():
    task, network = ready("lstm", environment=UNEVEN)
    result = task.objective.evaluate(network, "valid", 20, "auto")
    seeds = [episode_seed(1, number) for number in range(20)]
    returns, lengths = play_episodes(
        task.objective.agent, network, task.objective.environments, seeds, step_generator(1, 0)
    )
    mean = sum(returns) / 20
    half = 1.96 * math.sqrt(sum((one - mean) ** 2 for one in returns) / 19 / 20)
    assert (result["return"], result["low"], result["high"]) == pytest.approx((mean, mean - half, mean + half))
    assert result["length"] == sum(lengths) / 20 and result["episodes"] == 20
    assert task.objective.evaluate(network, "test", 20, "auto")["length"] != result["length"]  # other episodes
    with pytest.raises(ValueError, match="give 2 or more"):
        task.objective.evaluate(network, "valid", 1, "auto")


SMALL = (
    "task.copies=4", "task.segment=5", "task.epochs=2", "run.batch=3", "run.steps=7", "run.save=1", "run.keep=9",
    "run.evaluate=0", "run.device=cpu", "task.episodes=4", "model.width=16", "optim.warmup=1", "optim.schedule=constant",
)  # fmt: skip


def recipe(member: str, environment: str, *settings: str) -> Recipe:
    return override(Recipe(member=member, size="tiny", task=task_for(member, "tiny", environment)), [*SMALL, *settings])


@pytest.mark.parametrize(("member", "pieces"), [("gtrxl", 1), ("lstm", 2)])
def test_a_resumed_run_continues_its_episodes(tmp_path, member, pieces):
    """Resumed between two segments or within one: weights, environments and rollouts are bitwise equal."""
    train(recipe(member, UNEVEN, f"run.accumulate={pieces}"), tmp_path / "whole")
    first, second, last = (checkpoint.path_of(tmp_path / "whole", step) for step in (3, 4, 7))
    assert not same(first, second, ("data",))
    for cut in (3, 4):
        shutil.copytree(tmp_path / "whole", tmp_path / f"cut{cut}")
        shutil.rmtree(checkpoint.path_of(tmp_path / f"cut{cut}", 7))
        resume(tmp_path / f"cut{cut}", step=cut)
        assert same(last, checkpoint.path_of(tmp_path / f"cut{cut}", 7), ("model", "optimizer", "data"))


def test_large_seeds_are_accepted():
    assert train(recipe("lstm", "control", "run.steps=1", f"run.seed={2**31 - 1}")).step == 1


def test_a_sharded_agent_is_refused():
    task, network = ready("lstm")
    next(network.parameters()).full_tensor = None
    task.data.used = 10**6
    with pytest.raises(ValueError, match=r"leave run.shard out"):
        task.data.collect(network, 0, "auto")


def test_a_run_in_a_nondeterministic_environment_cannot_be_resumed(tmp_path, monkeypatch):
    train(recipe("lstm", "control", "run.steps=2"), tmp_path / "run")
    monkeypatch.setattr(environments.Recall, "observation", property(lambda one: 3))
    with pytest.raises(ValueError, match="recall gives another observation after the same seed and actions"):
        resume(tmp_path / "run", steps=3)


@pytest.mark.spec(128)
def test_an_agent_with_memory_learns_what_one_without_cannot():
    """Which of four colours was shown five steps ago: without memory the same network reaches chance level, a quarter."""
    settings = (
        "model.width=32", "model.layers=1", "task.copies=64", "task.segment=12", "task.epochs=4", "task.memory=6", "run.batch=64",
        "run.steps=72", "optim.lr=5e-3", "optim.warmup=5", "task.episodes=100",
    )  # fmt: skip
    with_it, without = (
        train(recipe("gtrxl", "control", *settings, f"task.use_memory={how}")).metrics for how in (True, False)
    )
    assert with_it["low"] > 0.6 > 0.5 > without["high"]


def test_unknown_environments_and_unsupported_spaces_are_refused(monkeypatch):
    wrong = {
        "popgym:RepeatPrevious": r"popgym has no environment 'RepeatPrevious'; did you mean .*RepeatPreviousEasy",
        "minigrid:MemoryEnv": r"minigrid has no environment 'MemoryEnv'; did you mean .*MemoryS7",
        "popgim:RepeatPreviousEasy": r"LIBRARY:NAME with one of the libraries popgym, minigrid, gymnasium",
        "popgym:PositionOnlyPendulumEasy": r"the actions of .* are Box.*choose another environment",
        "minigrid:Fetch-5x5-N2": r"states a mission in words",
    }
    for name, reason in wrong.items():
        with pytest.raises(ValueError, match=reason):
            task_for("gtrxl", "tiny", name).open(None, None)
    with pytest.raises(ValueError, match=r"leave model.episodes out"):
        train(recipe("gtrxl", "control", "model.episodes=true"))
    with pytest.raises(ValueError, match=r"not from text.txt; leave --data out"):
        Control().open("text.txt", None)
    for member in ("bert", "transformer"):
        with pytest.raises(ValueError, match="choose gtrxl, transformer-xl or lstm"):
            train(recipe(member, "control"))

    def missing(name):
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr(environments, "import_module", missing)
    with pytest.raises(ValueError, match=r"needs gymnasium.*pip install 'everyformer\[control\]'"):
        Control().open(None, None)


def test_a_grid_observation_is_one_hot_in_each_cell():
    """Kind, colour and state of 7 x 7 cells as one-hot vectors, the direction of the agent, and its last action."""
    import gymnasium

    environment = Environment("minigrid:MemoryS7")
    plain = gymnasium.make("MiniGrid-MemoryS7-v0")
    observation, _ = plain.reset(seed=5)
    vector = environment.reset(5)
    for action in (None, 2, 1):
        if action is not None:
            observation, (vector, _, _, _) = plain.step(action)[0], environment.step([action])
        expected = [0.0] * (7 * 7 * 20 + 4 + 7)
        for number, (kind, colour, state) in enumerate(observation["image"].reshape(-1, 3).tolist()):
            for index in (kind, 11 + colour, 17 + state):
                expected[number * 20 + index] = 1.0
        expected[980 + int(observation["direction"])] = 1.0
        if action is not None:
            expected[984 + action] = 1.0
        assert vector.tolist() == expected


def test_an_episode_is_written_as_a_gif(tmp_path):
    from PIL import Image, ImageSequence

    run = train(recipe("gtrxl", "control", "run.steps=1"))
    description = run.task.inference.generate_images(run.network, tmp_path / "episode.gif", temperature=1.0, seed=3)
    with Image.open(tmp_path / "episode.gif") as gif:
        frames = [np.asarray(one.convert("RGB"))[0, 0].tolist() for one in ImageSequence.Iterator(gif)]
    assert "an episode of 6 steps" in description
    grey = [190, 190, 190]
    assert frames[0] in environments.COLOURS[:4].tolist() and frames[1] == grey  # equal frames are merged
    with pytest.raises(ValueError, match="temperature is -1: give 0"):
        run.task.inference.generate_images(run.network, tmp_path / "episode.gif", temperature=-1)
    run = train(recipe("gtrxl", UNEVEN, "run.steps=1"))
    with pytest.raises(ValueError, match="cannot be rendered"):
        run.task.inference.generate_images(run.network, tmp_path / "episode.gif")
