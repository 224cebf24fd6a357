"""How long the runs of an entry are follows from what is to be equal, and from the budget."""

from __future__ import annotations

import pytest

from everyformer.study.compare.api import make_request
from everyformer.study.compare.freeze import EVALUATIONS, freeze
from everyformer.study.compare.show import entry_seconds

WORDS = ("gpt2", "lstm", "run.batch=4", "task.context=16", "run.device=cpu", "run.steps=64", "model.layers=1")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path))


@pytest.mark.parametrize("match, unit", [("training-flops", "flops"), ("seconds", "seconds")])
def test_steps_make_training_equal(match, unit):
    (row,) = freeze(make_request(WORDS, size="tiny", match=match), workers=1).rows
    gpt2, lstm = row.entries
    assert gpt2.steps == 64 and not gpt2.mismatch
    whole = [entry.steps * getattr(entry, unit) for entry in row.entries]
    assert whole[1] == pytest.approx(whole[0], abs=getattr(lstm, unit))
    assert unit == "seconds" or lstm.steps != 64  # the times of both may happen to be equal


def test_width_and_steps_can_be_matched_at_once():
    (row,) = freeze(make_request(WORDS, size="tiny", match="parameters,training-flops"), workers=1).rows
    gpt2, lstm = row.entries
    assert abs(dict(lstm.mismatch)["parameters"]) < 0.1 and lstm.recipe.model["width"] != 64
    assert lstm.steps * lstm.flops == pytest.approx(64 * gpt2.flops, abs=lstm.flops)


def test_a_budget_decides_the_steps():
    """The estimate that is shown is within it; runs are evaluated a whole number of times."""
    frozen = freeze(make_request(WORDS, size="tiny", budget="3m", trials=3, seeds=2), workers=2)
    entries = frozen.rows[0].entries
    assert len({entry.steps for entry in entries}) == 1 and entries[0].steps % EVALUATIONS == 0
    assert 60 < sum(entry_seconds(frozen, entry) for entry in entries) / 2 < 180
    examples = {(entry.recipe.run.examples, entry.recipe.run.final_examples) for entry in entries}
    assert len(examples) == 1


def test_settings_of_one_entry_replace_those_of_all():
    words = (*WORDS, "model.layers=2", "lstm:model.layers=3", "lstm:model.width=24", "wide=gpt2", "wide:size=tiny")
    (row,) = freeze(make_request(words, size="tiny", trials=1), workers=1).rows
    assert [entry.recipe.model["layers"] for entry in row.entries] == [2, 3, 2]
    assert row.entry("lstm").recipe.model["width"] == 24 and dict(row.entry("lstm").mismatch)["parameters"] < 0
    assert row.entry("wide").recipe == row.entry("gpt2").recipe
