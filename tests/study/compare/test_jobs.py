"""Which runs come next follows from what is frozen and from the outcomes alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from everyformer.study.compare.frozen import Entry, Frozen, Row
from everyformer.study.compare.jobs import open_jobs, search_runs, state
from everyformer.study.compare.request import EntryRequest, Request, RowRequest
from everyformer.study.compare.search import trials
from everyformer.study.compare.table import lines
from everyformer.train import Recipe

RECIPE = Recipe.of("gpt2", "run.steps=64", "optim.lr=0.004", size="tiny")


def frozen(*names: str, count: int = 5, search: tuple[str, ...] = (), higher_is_better: bool = False) -> Frozen:
    """A comparison that is not run."""
    found = trials(RECIPE, RECIPE.value({}), count, search)
    entries = tuple(
        Entry(
            name=name,
            recipe=RECIPE,
            command=("gpt2",),
            trials=found,
            parameters=1,
            flops=1,
            tokens=1,
            memory=1,
            seconds=1.0,
        )
        for name in names
    )
    row = Row(
        name="text", data=None, metric="bits_per_byte", higher_is_better=higher_is_better, split="test", fingerprints={}, notes=(),
        entries=entries,
    )  # fmt: skip
    request = Request(
        entries=tuple(EntryRequest(name, "gpt2") for name in names),
        rows=(RowRequest(None),),
        baseline=names[0],
        trials=count,
    )
    return Frozen(
        request=request, rows=(row,), seeds=(1, 2, 3), search_seed=0, code="", commit="", machine="", versions=""
    )


def play(one: Frozen, quality: Callable[[str, float, int], float]) -> tuple[dict[str, Any], list[str]]:
    """Runs all jobs with a made-up metric of (entry, rate, seed). Returns the outcomes, and the names of the jobs in order."""
    outcomes, order = dict[str, Any](), list[str]()
    while jobs := list(open_jobs(one, outcomes)):
        for job in jobs:
            settings = dict(setting.split("=") for setting in job.settings)
            value = quality(job.entry, float(settings["optim.lr"]), int(settings["run.seed"]))
            status = "done" if math.isfinite(value) else "diverged"
            test = {"bits_per_byte": value} if job.is_final else None
            outcomes[job.name] = {
                "status": status, "reason": "", "metric": value if status == "done" else None, "test": test, "memory": 1,
                "seconds": 1.0, "steps": job.until, "curve": [],
            }  # fmt: skip
            order.append(job.name)
    return outcomes, order


def from_best(best: float) -> Callable[[str, float, int], float]:
    return lambda entry, rate, seed: 2 + math.log(rate / best) ** 2


def test_the_worse_half_ends_early_and_the_best_gets_new_seeds():
    one = frozen("a")
    outcomes, order = play(one, from_best(0.0045))
    assert [name for name in order if name.endswith(".16")] == [f"text.a.trial-{n}.16" for n in range(1, 6)]
    assert [name for name in order if name.endswith(".32")] == [
        "text.a.trial-1.32",
        "text.a.trial-2.32",
        "text.a.trial-3.32",
    ]
    assert order[8:] == ["text.a.trial-1.64", "text.a.trial-2.64", *(f"text.a.seed-{n}.64" for n in (1, 2, 3))]
    assert state(one, one.rows[0], one.rows[0].entries[0], outcomes).is_done


def test_a_best_rate_at_the_edge_widens_the_range():
    for best, rate, count in ((0.03, 0.032, 7), (0.0001, 0.000125, 8), (1e-9, 0.000125, 8)):
        outcomes, _ = play(frozen("a"), from_best(best))
        (line,) = lines(frozen("a"), outcomes)
        assert line.rate == pytest.approx(rate) and len(line.trials) == count


def test_diverged_trials_lose_and_are_counted():
    one = frozen("a")
    outcomes, _ = play(one, lambda entry, rate, seed: math.inf if rate > 0.005 else 2 - rate)
    (line,) = lines(one, outcomes)
    assert line.rate == 0.004 and line.count("diverged") == 2  # the range is not widened to rates that diverge
    outcomes, _ = play(one, lambda *_: math.inf)
    (line,) = lines(one, outcomes)
    assert line.verdict == "failed" and line.chosen is None and not line.finals


def test_a_higher_metric_may_be_better():
    one = frozen("a", "b", higher_is_better=True)
    outcomes, _ = play(one, lambda entry, rate, seed: 5 - math.log(rate / 0.002) ** 2 + (entry == "b") + seed * 1e-3)
    a, b = lines(one, outcomes)
    assert a.rate == b.rate == 0.002 and b.verdict == "better" and a.verdict == "baseline"


@pytest.mark.parametrize("shift, verdict", [(-0.1, "better"), (0.1, "worse"), (0.0, "inconclusive")])
def test_the_verdict_is_that_of_the_paired_difference(shift, verdict):
    """Seeds differ by far more than entries do: only pairs tell."""
    one = frozen("a", "b")
    noise = {1: 1e-3, 2: -1e-3, 3: 5e-4}
    outcomes, _ = play(
        one, lambda entry, rate, seed: 2 + seed + rate + (shift + noise.get(seed, 0) if entry == "b" else 0)
    )
    b = lines(one, outcomes)[1]
    assert b.verdict == verdict and b.difference is not None and b.difference.mean == pytest.approx(shift + 1 / 6000)


def test_one_seed_or_a_missing_run_is_inconclusive():
    one = frozen("a", "b")
    outcomes, _ = play(one, lambda entry, rate, seed: 2 + rate + seed - (entry == "b") * (1 + seed * 1e-4))
    assert lines(one, outcomes)[1].verdict == "better"
    outcomes["text.b.seed-3.64"] |= {"status": "diverged"}
    assert lines(one, outcomes)[1].verdict == "inconclusive"
    single = replace(one, seeds=(1,))
    assert lines(single, outcomes)[1].verdict == "inconclusive"


def test_settings_are_searched_over_in_equal_shares():
    found = trials(RECIPE, RECIPE.value({}), 6, ("optim.weight_decay=0,0.01,0.1",))
    values = [trial[1] for trial in found]
    assert values[0] == "optim.weight_decay=0" and sorted(map(values.count, set(values))) == [2, 2, 2]
    assert found[0][0] == "optim.lr=0.004" and len({trial[0] for trial in found}) == 6


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_the_cost_of_a_search_is_that_of_its_runs(count):
    one = frozen("a", count=count)
    wider = replace(one, wider=0)
    _, order = play(wider, from_best(0.0045))
    furthest = dict(name.removeprefix("text.a.").split(".") for name in order if "trial" in name)
    assert search_runs(count, one.shares, one.least) == sum(map(int, furthest.values())) / 64
