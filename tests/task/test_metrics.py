"""Metrics: which way is better, the interval of a mean, auxiliary losses for each example, and what is shown of a classifier."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer.infer.rollout import Agent
from everyformer.task import control_objective
from everyformer.task.batch import Batch
from everyformer.task.classify_objective import ClassifyObjective, TextClassifierInference
from everyformer.task.control import Control
from everyformer.task.control_objective import ControlInference, ControlObjective
from everyformer.task.language import LanguageObjective
from everyformer.task.target import ClassTarget, NumberTarget


@dataclass
class Answer:
    logits: Tensor
    aux: dict[str, Tensor] = field(default_factory=dict)

    def logits_of(self, head: int) -> Tensor:
        return self.logits


def test_more_is_better_for_returns_and_accuracies_and_worse_for_losses():
    assert ControlObjective.higher_is_better and ClassTarget.higher_is_better
    assert not LanguageObjective.higher_is_better and not NumberTarget.higher_is_better


def test_an_auxiliary_loss_counts_once_for_each_example():
    """The loss is a sum over the examples, and an auxiliary loss is a mean."""
    logits, label = torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 1.0]]), torch.tensor([1, 1, 0])
    data: Any = SimpleNamespace(inputs="x", target=ClassTarget(("a", "b")))
    batch = Batch({"x": torch.zeros(3, 1), "label_B": label})
    answer: Any = lambda *_, **__: Answer(logits, {"ponder": torch.tensor(0.5)})  # noqa: E731
    loss = ClassifyObjective(data, 0).loss(answer, batch, "auto")
    assert loss.item() == pytest.approx(F.cross_entropy(logits, label, reduction="sum").item() + 3 * 0.5)


def test_an_auxiliary_loss_of_an_agent_counts_once_for_each_step():
    """Whatever the episodes into which the steps fall."""

    class Auxiliary(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2, 3))

        def forward(self, x_BTF: Tensor, **_: Any) -> Any:
            logits: Any = x_BTF @ self.weight.T, x_BTF[..., :1]
            return Answer(logits, {"span": torch.tensor(0.5)})

    objective = ControlObjective(Control(), Agent((2,), 4), lambda: None)  # type: ignore[return-value]
    first = torch.tensor([[True, False, False, True, False], [True, True, False, False, False]])
    batch = Batch({"input_BTF": torch.randn(2, 5, 3), "first_BT": first})
    *_, step_N, auxiliary = objective.recompute(Auxiliary(), batch, "auto")
    assert sorted(step_N.tolist()) == list(range(10)) and auxiliary == pytest.approx(10 * 0.5)


def test_the_interval_of_a_return_is_that_of_95_percent(monkeypatch):
    """The mean, and 1.96 standard errors (with n - 1) on both sides."""
    monkeypatch.setattr(control_objective, "play_episodes", lambda *_, **__: ([1.0, 2.0, 6.0], [1, 2, 3]))
    from everyformer.network.network import Network

    network: Any = Network.__new__(Network)
    monkeypatch.setattr(Network, "eval", lambda self: self)
    objective = ControlObjective(Control(), Agent((2,), None), lambda: None)  # type: ignore[return-value]
    found = objective.evaluate(network, "valid", 3, "auto")
    assert objective.metric in found and objective.higher_is_better
    error = (7.0 / 3) ** 0.5  # the variance of 1, 2, 6 is 7
    assert (found["return"], found["length"]) == (3.0, 2.0)
    assert (found["low"], found["high"]) == (pytest.approx(3 - 1.96 * error), pytest.approx(3 + 1.96 * error))
    with pytest.raises(ValueError, match="train"):
        objective.evaluate(network, "train", 3, "auto")


@pytest.mark.parametrize("file", ["episode.png", "nowhere/episode.gif"])
def test_an_episode_goes_to_a_gif_in_a_folder_that_exists(file, tmp_path):
    inference = ControlInference(Control(), Agent((2,), None), lambda **_: SimpleNamespace(), True)
    with pytest.raises(ValueError, match=r"give a \.gif file in a folder that exists"):
        inference.generate_images(None, tmp_path / Path(file))


def test_an_episode_is_drawn_in_an_environment_made_for_it_with_the_first_seed(monkeypatch, tmp_path):
    from everyformer.network.network import Network

    given: dict[str, Any] = {}

    def play(agent: Agent, network: Any, environments: Any, seeds: Any, generator: Any, on_step: Any) -> Any:
        on_step()
        given["seeds"] = seeds
        return [2.5], [1]

    def make(render: bool = False) -> Any:
        return SimpleNamespace(render=lambda: np.zeros((4, 4, 3), np.uint8) if render else None)

    monkeypatch.setattr(control_objective, "play_episodes", play)
    monkeypatch.setattr(Network, "eval", lambda self: self)
    inference, network = ControlInference(Control(), Agent((2,), None), make, True), Network.__new__(Network)
    description = inference.generate_images(network, tmp_path / "episode.gif")
    assert description.startswith("an episode of 1 steps with a return of 2.5")
    assert given["seeds"] == [control_objective.episode_seed(1, 0)]
    inference.generate_images(network, tmp_path / "episode.gif", seed=3)
    assert given["seeds"] == [control_objective.episode_seed(1, 3)]


def test_a_sample_shows_the_text_its_five_likeliest_classes_and_its_label():
    classes, texts = tuple("abcdefg"), ["one  two", "x" * 160, "y" * 161]
    data: Any = SimpleNamespace(
        target=ClassTarget(classes),
        labelled=SimpleNamespace(splits={"valid": (texts, None)}),
        label={"valid": torch.tensor([6, 0, 1])},
        encode=list,
        as_text=str,
        collate=lambda _: {"x": torch.zeros(1)},
    )
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    objective: Any = SimpleNamespace(forward=lambda *_: (None, logits))
    inference = TextClassifierInference(data, objective)
    network: Any = SimpleNamespace(parameters=lambda: iter([torch.zeros(1)]))
    shares = [f"{name} {share:.1%}" for name, share in zip(classes, logits[0].softmax(0).tolist(), strict=True)]
    likeliest = ", ".join(reversed(shares[2:]))
    assert inference.can_generate and inference.generate_text(network, "one") == likeliest
    assert inference.sample(network, 3) == f"one two\n-> {likeliest} (label: g)"
    assert inference.sample(network, 1).startswith("x" * 160 + "\n")
    assert inference.sample(network, 2).startswith("y" * 160 + "...\n")
