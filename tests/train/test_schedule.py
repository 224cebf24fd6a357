"""Learning rates and batch sizes at the steps where their definitions give known numbers."""

from __future__ import annotations

import math

import pytest

from everyformer import Convolution, Language, Layer, Model, PreNorm, Stack, Tokens
from everyformer.network.norm import LayerNorm
from everyformer.task.language import Language as LanguageTask
from everyformer.train.recipe import Optim, Recipe, Run
from everyformer.train.schedule import batch_size, lr_factor, sequences_before


@pytest.mark.spec(135)
@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "inverse_sqrt", "wsd"])
def test_warm_up_rises_to_one_in_a_straight_line(schedule):
    optim = Optim(schedule=schedule, warmup=10)
    assert [lr_factor(optim, step, 100) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])


@pytest.mark.spec(135)
def test_schedules_at_their_start_middle_and_end():
    steps, last = 101, 100
    assert lr_factor(Optim(schedule="cosine", warmup=0, min_lr=0.1), 0, steps) == 1
    assert lr_factor(Optim(schedule="cosine", warmup=0, min_lr=0.1), 50, steps) == pytest.approx(0.55)
    assert lr_factor(Optim(schedule="cosine", warmup=0, min_lr=0.1), last, steps) == pytest.approx(0.1)
    assert lr_factor(Optim(schedule="linear", warmup=0, min_lr=0.0), 25, steps) == pytest.approx(0.75)
    assert lr_factor(Optim(schedule="inverse_sqrt", warmup=4), 15, steps) == pytest.approx(math.sqrt(4 / 16))
    flat = Optim(schedule="wsd", warmup=0, decay=0.2, min_lr=0.0)
    assert lr_factor(flat, 80, steps) == pytest.approx(1) and lr_factor(flat, 90, steps) == pytest.approx(0.5)
    assert lr_factor(flat, last, steps) == pytest.approx(0)
    later = Optim(schedule="wsd", warmup=50, decay=0.2, min_lr=0.0)  # `decay` is a share of the steps after warm-up
    assert lr_factor(later, 90, steps) == pytest.approx(1) and lr_factor(later, 95, steps) == pytest.approx(0.5)
    assert lr_factor(Optim(schedule="constant", warmup=0), last, steps) == 1


@pytest.mark.spec(135)
@pytest.mark.parametrize("schedule, middle", [("cosine", 0.6), ("linear", 0.6), ("wsd", 1.0)])
def test_rates_fall_from_one_after_warm_up_to_min_lr_at_the_last_step(schedule, middle):
    optim = Optim(schedule=schedule, warmup=10, min_lr=0.2, decay=0.25)
    assert lr_factor(optim, 10, 111) == 1
    assert lr_factor(optim, 60, 111) == pytest.approx(middle)
    assert lr_factor(optim, 110, 111) == pytest.approx(0.2)


@pytest.mark.spec(135)
def test_schedules_of_one_and_two_steps_and_without_warm_up():
    linear = Optim(schedule="linear", warmup=0, min_lr=0.0)
    assert [lr_factor(linear, step, 2) for step in (0, 1)] == [1, 0]
    assert lr_factor(linear, 0, 1) == 1
    assert lr_factor(Optim(schedule="inverse_sqrt", warmup=0), 3, 100) == pytest.approx(1 / math.sqrt(4))


@pytest.mark.spec(136)
def test_the_batch_size_follows_its_schedule():
    run = Run(batch=4, batch_schedule=((10, 8), (20, 32)))
    assert [batch_size(run, step) for step in (0, 9, 10, 19, 20, 99)] == [4, 4, 8, 8, 32, 32]
    assert sequences_before(run, 25) == sum(batch_size(run, step) for step in range(25))
    assert sequences_before(run, 5) == 20 and sequences_before(run, 0) == 0
    assert sequences_before(Run(batch=3), 7) == 21


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"clip": -1.0}, ">= 0"),
        ({"min_lr": -5.0}, ">= 0"),
        ({"weight_decay": -0.1}, ">= 0"),
        ({"lr": math.inf}, "finite"),
        ({"decay": 2.0}, "<= 1"),
        ({"decay": 0.0}, "> 0"),
    ],
    ids=str,
)
def test_optimizer_settings_out_of_range_are_refused(wrong, reason):
    with pytest.raises(ValueError, match=f"optim.{next(iter(wrong))} is .*{reason}"):
        Optim(**wrong)


@pytest.mark.parametrize(
    "member, size, settings, lr, warmup",
    [
        ("gpt2", "tiny", [], 4e-3, 100),
        ("gpt2", "small", ["run.steps=100000"], 0.5 / 768, 1000),
        ("gpt2", "tiny", ["model.width=512", "run.steps=30"], 0.5 / 512, 3),
        ("gpt2", "tiny", ["optim.lr=0.5", "optim.warmup=7"], 0.5, 7),
        ("transformer", "tiny", [], 0.25 / 64, 100),
        ("graph-classifier", "tiny", [], 4e-3, 100),
        ("byte-language", "paper", [], 0.25 / 256 / math.sqrt(6), 100),  # post-norm, 12 layers
        ("universal-transformer", "tiny", [], 0.25 / 64 / math.sqrt(2), 100),  # post-norm, 4 steps
        ("lstm", "byte", [], 2 / 624, 100),  # four times that of attention
        ("lstm", "byte", ["model.width=2000"], 2e-3, 100),
    ],
)
def test_the_default_rate_falls_with_the_width_and_the_warm_up_is_a_tenth(member, size, settings, lr, warmup):
    optim = Recipe.of(member, *settings, size=size).optim
    assert optim.lr == pytest.approx(lr) and optim.warmup == warmup


def test_convolutions_have_the_rate_of_attention():
    body = Stack(2, (Layer((Convolution(64),)),), PreNorm(LayerNorm()))
    model = Model(width=512, embed=Tokens(256), body=body, outputs=(Language(),))
    assert LanguageTask().default_lr(model) == pytest.approx(0.5 / 512)


def test_trained_weights_classifiers_and_agents_have_lower_default_rates():
    assert Recipe.of("bert", size="tiny", init_from="run").optim.lr == pytest.approx(0.25 / 64 / 4)
    assert Recipe.of("lstm", size="tiny", task="classify").optim.lr == 4e-3
    assert Recipe.of("gtrxl", size="tiny", task="recall").optim.lr == 1e-3


def test_the_default_rate_does_not_depend_on_settings_that_must_fit_the_data():
    """Patches of 8 divide images of 32, but not those of the tiny size."""
    assert Recipe.of("vit", "model.patch=8", size="tiny").optim.lr == 4e-3
