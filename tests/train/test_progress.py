"""The progress of a run follows from its records, and fits the terminal."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

import everyformer
from everyformer.train.loop import train
from everyformer.train.progress import Progress, show_progress
from tests.train.small import recipe, text

BEGIN = {"kind": "begin", "step": 0, "seconds": 0.0, "steps": 5000, "parameters": 9_660_000}
LANGUAGE, LABELS = {"metric": "bits_per_byte", "bytes": 2.0}, {"metric": "accuracy", "bytes": None}
RETURN = {"metric": "return", "bytes": None}


def step(number, loss, seconds=0.0, rate=12_345.0):
    return {
        "kind": "step", "step": number, "seconds": seconds, "loss": loss, "norm": 1.0, "lr": 1e-3, "batch": 4,
        "targets": 1000, "rate": rate, "memory": 812 << 20,
    }  # fmt: skip


def shown(state, width):
    screen = Console(file=io.StringIO(), width=width, height=30, force_terminal=True, color_system=None, record=True)
    screen.print(state)
    return screen.export_text().rstrip("\n").split("\n")


def a_run(task, evaluated):
    state = Progress()
    state.take(BEGIN | task)
    state.take(step(1000, 1.75, seconds=50.0))
    state.take(step(1200, 1.75, seconds=90.0))
    state.take({"kind": "evaluate", "step": 1200, "seconds": 91.0, **evaluated})
    return state


def test_a_wide_terminal_shows_everything_on_one_line():
    bits = 1.75 / math.log(2) / 2
    numbers = f"loss 1.750  bits/byte {bits:.3f} (valid 1.312)  12.3k targets/s  812 MiB  12:40 left"
    (line,) = shown(a_run(LANGUAGE, {"bits_per_byte": 1.3123}), 120)
    assert line.endswith(f"  1,200/5,000  {numbers}")  # 3,800 steps at 0.2 seconds
    assert line.count("━") >= 8


def test_a_narrow_terminal_shows_two_lines_without_wrapping():
    for task, evaluated, words in (
        (LANGUAGE, {"bits_per_byte": 1.3123}, "bits/byte 1.262 (valid 1.312)"),
        (LABELS, {"accuracy": 0.8512}, "valid accuracy 0.851"),
    ):
        first, second = shown(a_run(task, evaluated), 60)
        assert first.endswith("━  1,200/5,000  812 MiB  12:40 left")
        assert second == f"loss 1.750  {words}  12.3k targets/s"


def test_the_training_return_of_an_agent_is_shown():
    state = a_run(RETURN, {"return": 0.25})
    assert "valid return 0.250" in str(state)  # before an episode has ended
    state.take(step(1201, 1.75) | {"return": 0.125})
    state.take(step(1202, 1.75))
    assert "loss 1.750  return 0.125 (valid 0.250)  12.3k targets/s" in str(state)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width):
    lines = shown(a_run(LANGUAGE, {"bits_per_byte": 1.3123}), width)
    assert len(lines) <= 2 and all(len(line) <= width for line in lines)


def test_the_progress_of_an_evaluation_is_shown():
    state = a_run(LANGUAGE, {"bits_per_byte": 1.3123})
    state.take({"kind": "evaluating", "step": 1200, "seconds": 95.0, "done": 4096, "of": 262_144, "final": False})
    assert "  evaluating: 4,096/262,144 targets  " in str(state)
    state.take(step(1201, 1.75))
    assert "evaluating" not in str(state)


def test_loss_and_speed_are_smoothed():
    state = Progress()
    state.take(BEGIN | LANGUAGE)
    for number, loss, rate in ((1, 2.0, 1000.0), (2, 4.0, 500.0), (3, math.nan, 500.0)):
        state.take(step(number, loss, rate=rate))
    assert state.numbers[0] == "loss 3.000" and "667 targets/s" in state.numbers  # 2,000 targets in 1 + 2 seconds
    for number in range(4, 400):
        state.take(step(number, 1.0 + number % 2))
    assert state.loss == pytest.approx(1.5, abs=0.05)


def test_a_pipe_gets_lines_of_text():
    file = io.StringIO()
    with show_progress(Console(file=file, width=10_000)) as listen:
        listen(BEGIN | LANGUAGE)
        listen(step(1, 3.0))
        listen(step(2, 3.0))  # too soon for another line
        listen({"kind": "evaluate", "step": 2, "seconds": 1.0, "bits_per_byte": 2.5, "sample": "a\tb\x1b[31mc\nd"})
        listen(step(5000, 3.0))
        listen({"kind": "evaluating", "step": 5000, "seconds": 2.0, "done": 100, "of": 4000, "final": True})
        last: dict[str, Any] = {
            "step": 5000,
            "seconds": 3.0,
            "bits_per_byte": 2.5,
            "low": 2.25,
            "high": 2.75,
            "perplexity": 5.657,
        }
        last |= {"split": "valid", "targets": 4000, "targets_in_split": 100_000}
        listen({"kind": "evaluate", **last})
        listen({"kind": "final", **last})  # the same metrics are not printed again
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert lines == [
        "9,660,000 parameters, 5,000 steps left",
        "step 1/5,000  loss 3.000  bits/byte 2.164  12.3k targets/s  812 MiB",
        "step 2  bits per byte 2.5",
        "  | a       b·[31mc",
        "  | d",
        "step 5,000/5,000  loss 3.000  bits/byte 2.164 (valid 2.500)  12.3k targets/s  812 MiB",
        "evaluating on 4,000 held-out targets; Ctrl-C skips it",
        "step 5000  valid: bits per byte 2.5 (95% interval 2.25 to 2.75)  perplexity 5.657  targets 4,000 of 100,000",
    ]


def test_python_can_show_the_progress(tmp_path, capsys):
    train(recipe(text(tmp_path), "run.steps=2"), tmp_path / "run", progress=True)
    out = capsys.readouterr().out
    assert "parameters, 2 steps left" in out and "\nstep 2  valid: bits per byte" in out
    assert out.count("final, step 2  valid: bits per byte") == 1
    everyformer.train(recipe(text(tmp_path), "run.steps=1"), tmp_path / "quiet")
    assert capsys.readouterr().out == ""
    everyformer.resume(tmp_path / "quiet", steps=2, progress=True)
    assert "1 step left" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"quiet already exists and is not empty; choose another folder, or resume"):
        everyformer.train(recipe(text(tmp_path)), tmp_path / "quiet")
