"""A whole comparison: the same data for all, frozen before the first run, and equal results however often it is killed."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from everyformer import tune
from everyformer.cli.main import main
from everyformer.study.compare import Comparison, compare
from everyformer.study.compare import frozen as files
from everyformer.study.compare.engine import _record_crash
from everyformer.study.compare.jobs import open_jobs
from everyformer.study.compare.pool import pool
from everyformer.study.compare.run_job import _exploded, read_outcomes
from everyformer.study.compare.table import lines
from everyformer.study.suite import SUITES
from everyformer.train import checkpoint, load, train
from everyformer.train.evaluation import Evaluator, StopEvaluation
from everyformer.train.lock import InUse, only_writer
from everyformer.train.recipe import override
from everyformer.train.record import read
from tests.study.compare.small import WORDS, small


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("compare")
        patch.setenv("EVERYFORMER_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def table(place: Path) -> Comparison:
    return small(place)


def results(folder: Path) -> dict[str, Any]:
    """What the outcomes say, without times and memory."""
    return {
        name: (one["status"], one["metric"], [point[:2] for point in one["curve"]], one["test"])
        for name, one in read_outcomes(folder, {}).items()
    }


def test_entries_are_matched_and_trained_on_the_same_batches(table):
    gpt2, lstm = table.lines
    assert abs(dict(lstm.entry.mismatch)["parameters"]) < 0.1 and gpt2.entry.recipe.task == lstm.entry.recipe.task
    assert gpt2.result.count == lstm.result.count == 2 and lstm.difference.count == 2
    assert gpt2.verdict == "baseline" and lstm.verdict in ("better", "worse", "inconclusive")
    batches = []
    for line in (gpt2, lstm):
        run = load(table.folder / "runs" / "text" / line.entry.name / "seed-2", data=True)
        batches.append([run.task.data.batch(step, 4, run.recipe.run.seed)["token_BT"].tolist() for step in range(3)])
    assert batches[0] == batches[1]


def test_a_trial_that_goes_on_is_one_run(table):
    """Its schedule is that of the whole length: it ends with the weights of a run that was never paused."""
    (path,) = {path for path in (table.folder / "runs/text/gpt2").iterdir() if path.name == "trial-1"}
    begins = [line["step"] for line in read(path / "records.jsonl") if line["kind"] == "begin"]
    assert begins == [0, 4, 8]
    recipe = load(path).recipe
    from everyformer import train

    train(recipe, table.folder.parent / "whole")
    assert load(path).state["best"] == load(table.folder.parent / "whole").state["best"]


def test_the_test_split_is_scored_once_and_only_by_final_runs(table):
    outcomes = read_outcomes(table.folder, {})
    assert {name for name, one in outcomes.items() if one["test"]} == {name for name in outcomes if ".seed-" in name}
    assert table.frozen.rows[0].split == "test" and table.frozen.seeds == (1, 2) and table.frozen.search_seed == 0


def test_the_command_of_a_line_gives_its_run(table, place, capsys):
    """To the last bit."""
    words = shlex.split(table["lstm"].command)[1:]
    assert main([*words, "--out", str(place / "again")]) == 0
    test = load(place / "again", data=True).evaluate("test", 6)["bits_per_byte"]
    assert test == table["lstm"].metrics[1]
    capsys.readouterr()


def test_the_report_is_one_page_without_scripts(table):
    page = (table.folder / "report.html").read_text()
    assert "<script" not in page and "http" not in page.replace("http-equiv", "") and page.count("<svg") == 6
    text = (table.folder / "report.md").read_text()
    for line in table.lines:
        assert line.command in text and f"{line.result.mean:.4f} ± " in text and line.verdict in page
    rows = [json.loads(line) for line in (table.folder / "records.jsonl").read_text().splitlines()]
    assert [row["entry"] for row in rows] == ["gpt2", "lstm"] and rows[1]["values"].keys() == {"1", "2"}
    assert len(rows[0]["curves"]["1"]) == 8 and rows[0]["curves"]["1"][-1][0] == 16


def test_it_is_refused_to_go_on_as_another_comparison(table, place, monkeypatch):
    small(place)  # the same: nothing is run
    for change, message in (
        ({"trials": 3}, "trials is 3, and was 2"),
        ({"match": "none"}, "match"),
        ({"size": None}, r"entries\[0\].size is not given, and was tiny"),
    ):
        with pytest.raises(ValueError, match=message):
            small(place, **change)
    monkeypatch.setattr(files, "code_hash", lambda imports: "other")
    with pytest.raises(ValueError, match="other code: its hash is other"):
        compare(out=table.folder, workers=0)


def test_changed_data_are_noticed(table, place):
    text = (place / "text.txt").read_text()
    (place / "text.txt").write_text(text + "more\n")
    try:
        with pytest.raises(ValueError, match=r"the data of .* have changed: .*test"):
            compare(out=table.folder, workers=0)
    finally:
        (place / "text.txt").write_text(text)


def test_a_diverged_and_a_failed_run_do_not_stop_the_others(place):
    """A rate of 1e9 explodes; a data set that is gone fails, and is tried again by the next call."""
    found = small(place, "wild", search=("lstm:optim.lr=0.01,1e9",), trials=2, seeds=1)
    assert found["lstm"].count("diverged") == 1 and "diverged: " in found["lstm"].reasons[0]
    assert found["lstm"].rate == 0.01 and found["gpt2"].metrics and "1 of 4" in (found.folder / "report.md").read_text()
    name = "text.gpt2.seed-1.16"
    path = found.folder / "outcomes" / f"{name}.json"
    value = json.loads(path.read_text())
    path.write_text(json.dumps(value | {"status": "failed", "reason": "OSError: x", "test": None}))
    assert lines(found.frozen, read_outcomes(found.folder, {}))[0].verdict == "failed"
    again = compare(out=found.folder, workers=0)
    assert again["gpt2"].metrics == found["gpt2"].metrics


def test_a_process_that_the_system_kills_is_a_failed_run(place, table):
    _record_crash(place / "crash", "text.gpt2.seed-1.16", -signal.SIGKILL)
    found = lines(table.frozen, read_outcomes(table.folder, {}) | read_outcomes(place / "crash", {}))[0]
    assert list(found.metrics) == [2] and found.count("failed") == 1
    assert "was killed by SIGKILL; perhaps the machine has too little memory" in found.reasons[0]


@pytest.mark.parametrize("last, diverged", [(5.0, False), (6.5, False), (12.0, True), (math.nan, True)])
def test_a_run_has_diverged_if_its_loss_ends_far_above_its_first(last, diverged):
    """A loss that is a little higher, as of few steps or of an agent, is a bad result, but a result."""
    steps = [{"loss": 5.5}, *({"loss": last} for _ in range(20))]
    assert bool(_exploded(steps, 2.0)) == diverged and _exploded(steps[:1], math.nan)


def start(folder: Path) -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "everyformer", "compare", "--out", str(folder), "--workers", "2"]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_killed_comparison_ends_as_one_that_was_not(number, table, place):
    """No run is repeated, and no step that a checkpoint holds."""
    folder = place / f"killed-{number}"
    folder.mkdir()
    shutil.copy(table.folder / files.FILE, folder)
    process = start(folder)
    while len(read_outcomes(folder, {})) < 5 and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(number)
    output = process.communicate(timeout=120)[0].decode()
    assert process.returncode == (-9 if number == signal.SIGKILL else 143), output
    _wait_until_unlocked(folder)
    saved = {path: max(checkpoint.steps(path), default=0) for path in folder.glob("runs/*/*/*")}
    begun = {path: len(_begins(path)) for path in saved}
    done = {path: path.stat().st_mtime_ns for path in (folder / "outcomes").iterdir()}
    assert 5 <= len(done) < len(results(table.folder))
    compare(out=folder, workers=0)
    for path, step in saved.items():
        assert all(again >= step for again in _begins(path)[begun[path] :])
    assert all(path.stat().st_mtime_ns == changed for path, changed in done.items())
    assert results(folder) == results(table.folder)


def test_a_run_that_is_stopped_while_it_is_evaluated_has_not_diverged(table, place, monkeypatch):
    folder = place / "unevaluated"
    folder.mkdir()
    shutil.copy(table.folder / files.FILE, folder)
    row = table.frozen.rows[0]
    job = next(one for one in open_jobs(table.frozen, {}) if one.entry == "gpt2")
    evaluate = Evaluator._score

    def stop_at_the_end(self: Evaluator, network: Any, step: int, *rest: Any, **options: Any) -> dict[str, Any]:
        if step == job.until:
            raise StopEvaluation
        return evaluate(self, network, step, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "_score", stop_at_the_end)
        train(override(row.entry("gpt2").recipe, job.settings), folder / job.path, until=job.until)
    again = compare(out=folder, workers=0)
    assert again["gpt2"].count("diverged") == 0 and results(folder) == results(table.folder)


def _begins(path: Path) -> list[int]:
    """The step of each start of a run."""
    return [line["step"] for line in read(path / "records.jsonl") if line["kind"] == "begin"]


def _wait_until_unlocked(folder: Path) -> None:
    """The children of a killed process save and end by themselves."""
    for claim in (folder / "claims").iterdir():
        for _ in range(1200):
            try:
                with only_writer(claim):
                    break
            except InUse:
                time.sleep(0.05)


def test_a_rate_is_found_in_short_runs(place):
    words = [word for word in WORDS[2:] if not word.startswith(("gpt2:", "run.steps"))]
    found = tune(
        "lstm", "run.steps=64", *words, size="tiny", data=place / "text.txt", trials=3, out=place / "tuned", workers=0
    )
    assert found.steps == 16 and found.settings == (f"optim.lr={found.rate:g}",)
    assert "run.steps=64" in found.command and found.command.endswith(found.settings[0])
    assert "Search for lstm" in (place / "tuned" / "report.html").read_text()


def test_a_killed_server_of_runs_is_an_error_with_a_remedy(tmp_path):
    with (
        pytest.raises(ValueError, match="code -9; give the same command again to go on"),
        pool(tmp_path, [""], ()) as runs,
    ):
        runs.server.kill()
        while True:
            runs.ended()


def test_a_dry_run_says_what_would_be_run_and_writes_nothing(place, capsys):
    words = [*WORDS, "--size", "tiny", "--data", str(place / "text.txt"), "--out", str(place / "dry"), "--dry-run"]
    assert main(["compare", *words]) == 0
    printed = capsys.readouterr().out
    assert "16 steps of 32 tokens" in printed and "6 whole runs of each entry: 5 trials, 3 seeds" in printed
    assert not (place / "dry").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        (["gpt2", "gpt9"], "no member of the family is named 'gpt9'; did you mean gpt2"),
        (["gpt2", "odd=gpt2", "odd:model.heads=3", "--size", "tiny"], "odd: "),
        (["gpt2", "lstm", "lstn:model.layers=1"], "no entry is named 'lstn'; did you mean lstm"),
        (["gpt2", "gpt2"], "two entries are named gpt2; name one of them, as in gpt2-2=gpt2"),
        (["gpt2", "bert"], "gpt2 has the task language and bert the task masked"),
        (["gpt2", "lstm", "--budget", "20"], "'20' is not a time; write a number with its unit"),
        (["gpt2", "lstm", "--match", "flop"], "--match flop: did you mean flops"),
        (["gpt2", "lstm", "--match", "flops,memory"], "asks for the same width twice"),
        (["gpt2", "lstm", "--baseline", "bert"], "the baseline 'bert' is no entry; the names are gpt2, lstm"),
        (["gpt2", "lstm", "--size", "tiny", "--budget", "1s"], "leaves fewer than 16 steps for a run; raise it"),
        (["gpt2", "sparse=gpt2", "sparse:run.kernel=hashed", "--size", "tiny"], "sparse: the kernel hashed does not support"),
        (["gpt2", "run.evaluate=0", "--size", "tiny"], "gpt2: run.evaluate is 0, but evaluations choose among trials"),
        (["optim.lr=1"], "no member is given; name at least one"),
        ([], "has no compare.json; give the folder of a comparison, or members to start one"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(words, message, place, capsys):
    assert main(["compare", *words, "--out", str(place / "none")]) == 2
    assert message in capsys.readouterr().err and not (place / "none").exists()


def test_a_suite_is_compared_row_by_row_and_profiled(place, monkeypatch):
    rows = (("copy", ("task.length=8", "task.test_length=8")), ("parity", ("task.length=8", "task.test_length=8")))
    monkeypatch.setitem(SUITES, "two", rows)
    words = [word for word in WORDS if not word.startswith("task.")]
    found = compare(*words, size="tiny", suite="two", trials=1, seeds=1, out=place / "suite", workers=0)
    assert [(line.row.name, line.entry.name) for line in found.lines] == [
        ("copy", "gpt2"), ("copy", "lstm"), ("parity", "gpt2"), ("parity", "lstm"),
    ]  # fmt: skip
    text = (found.folder / "report.md").read_text()
    assert (
        all(line.metrics for line in found.lines)
        and f"| copy | {found.lines[0].row.metric.replace('_', ' ')} | " in text
    )
    assert "<h2>Profile</h2>" in (found.folder / "report.html").read_text()
    with pytest.raises(ValueError, match="there is no suite 'thre'"):
        compare("gpt2", suite="thre", out=place / "none")


@pytest.mark.slow
def test_processes_of_torchrun_share_the_runs(table, place):
    """Each runs in its own process; the first writes the report. They share nothing but the folder."""
    folder = place / "ranks"
    root = Path(__file__).parents[3]
    script = "from pathlib import Path; from tests.study.compare.small import small; small(Path(), 'ranks', trials=1)"
    processes = []
    for rank in range(2):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        environment = os.environ | ranks | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", script]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE))
    for process in processes:
        assert process.communicate(timeout=300)[1] == b"" and process.returncode == 0
    assert len(results(folder)) == 4 and (folder / "report.html").is_file()
