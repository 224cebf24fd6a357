"""Curves have training and validation in one unit, and the final evaluation apart."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from everyformer.study.curves import curves, draw, short_names, smooth

NATS = 2 * math.log(2)  # 2 bits


def records(metric: str, size: float | None, evaluation: dict[str, float], **step: float) -> list[dict[str, Any]]:
    return [
        {"kind": "begin", "step": 0, "steps": 2, "metric": metric, "bytes": size},
        {"kind": "step", "step": 1, "loss": NATS, **step},
        {"kind": "evaluate", "step": 1, **evaluation},
        {"kind": "step", "step": 2, "loss": NATS, **step},
        {"kind": "final", "step": 2, **evaluation},
    ]


@pytest.mark.parametrize(
    "metric, size, evaluation, unit, train, valid",
    [
        ("bits_per_byte", 4.0, {"bits_per_byte": 0.7, "perplexity": 9.0}, "bits per byte", 0.5, 0.7),
        ("bits_per_dimension", None, {"bits_per_dimension": 3.0, "loss": 1.0}, "bits per dimension", 2.0, 3.0),
        ("accuracy", None, {"accuracy": 0.9, "loss": 1.5}, "loss in nats per target", NATS, 1.5),
        ("perplexity", None, {"perplexity": math.e}, "loss in nats per target", NATS, 1.0),
        (
            "perplexity",
            None,
            {"perplexity": 2.0, "loss": 0.7, "smoothed_loss": 0.9},
            "loss in nats per target",
            NATS,
            0.9,
        ),
        ("masked_perplexity", None, {"masked_perplexity": math.e}, "loss in nats per target", NATS, 1.0),
    ],
)
def test_training_and_validation_have_one_unit(metric, size, evaluation, unit, train, valid):
    run = curves(records(metric, size, evaluation))
    assert run.unit == unit
    assert curves(line for line in records(metric, size, evaluation) if line["kind"] in ("begin", "step")).unit == unit
    assert [step for step, _ in (*run.train, *run.valid, *run.final)] == [1, 2, 1, 2]
    assert [value for _, value in run.train] == pytest.approx([train, train])
    assert [value for _, value in (*run.valid, *run.final)] == pytest.approx([valid, valid])


def test_a_metric_that_steps_record_is_the_unit():
    run = curves(records("return", None, {"return": 0.5}, **{"return": 0.25}))
    assert run.unit == "return" and run.train[0] == (1, 0.25) and run.final == [(2, 0.5)]


def test_a_resumed_run_has_a_final_evaluation_for_each_end():
    lines = records("accuracy", None, {"accuracy": 0.9, "loss": 1.5})
    more = [{**line, "step": line["step"] + 2} for line in lines]
    more[0] |= {"step": 2, "steps": 4}
    run = curves([*lines, *more])
    assert [step for step, _ in run.valid] == [1, 3] and [step for step, _ in run.final] == [2, 4]


def test_evaluations_have_their_intervals_and_only_those_on_the_same_examples_are_joined(tmp_path):
    """So there is no rise at the end which is only a change of examples."""
    lines = records("bits_per_byte", 1.0, {"bits_per_byte": 2.0, "low": 1.5, "high": 2.75})
    lines.insert(4, {"kind": "evaluate", "step": 2, "bits_per_byte": 1.9, "low": math.nan, "high": math.nan})
    run = curves(lines)
    assert run.valid == [(1, 2.0), (2, 1.9)] and run.final == [(2, 2.0)]
    assert run.intervals == {(1, 2.0): (1.5, 2.75), (2, 2.0): (1.5, 2.75)}
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert draw(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_the_training_curve_says_what_else_it_contains():
    lines = records("masked_perplexity", None, {"masked_perplexity": math.e})
    lines[0]["includes"] = "the loss of next sentences"
    assert curves(lines).training == "training, with the loss of next sentences (moving average)"


def test_skipped_steps_have_no_point():
    lines = records("accuracy", None, {"accuracy": 0.9, "loss": 1.5})
    lines[1]["loss"] = math.nan
    assert [step for step, _ in curves(lines).train] == [2]


def test_the_moving_average_of_a_line_is_the_line():
    points = [(step, 2.0 * step) for step in range(200)]
    assert [value for _, value in smooth(points)[4:-4]] == pytest.approx([value for _, value in points[4:-4]])
    step, mean = smooth(points)[0]
    assert step == 0 and mean == pytest.approx(4 * 2.0 / 2)  # the mean of the first five
    assert smooth(points[:3]) == points[:3]


def test_runs_are_named_by_what_tells_their_folders_apart(tmp_path):
    assert short_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert short_names([tmp_path / "x" / "a", tmp_path / "y" / "a"]) == ["x/a", "y/a"]
    assert short_names([tmp_path / "a", tmp_path / "b" / ".." / "a"]) == ["a", "a"]
