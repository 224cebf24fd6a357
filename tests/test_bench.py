"""Small programs of bench run to their end, and print what the tables of docs read."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import everyformer
from bench import (
    algorithms,
    claims,
    compare,
    defaults,
    duplication,
    effective_context,
    ponder,
    pretraining,
    rates,
    reversible,
)


def lines_of(program, *words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program", *words])
    program.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


def test_the_rate_of_the_duplication_task_is_chosen_with_a_seed_that_is_not_reported(capsys, monkeypatch):
    words = "--length 8 --symbols 4 --steps 2 --batch 2 --width 8 --window 2 --buckets 2 --rounds 0,1 --rates 1e-3,1e-2 --seeds 2"
    lines = lines_of(duplication, *words.split(), capsys=capsys, monkeypatch=monkeypatch)
    assert [line.get("seed") for line in lines] == [None, 1, 2, None, 1, 2]
    assert lines[0]["accuracy_by_rate"].keys() == {"0.001", "0.01"}
    assert all(line["rate"] == lines[3]["rate"] for line in lines[3:])


def test_a_net_with_one_step_takes_one_step_on_every_input(capsys, monkeypatch):
    monkeypatch.setattr(ponder, "BATCH", 8)
    lines = lines_of(ponder, "--size", "3", "--steps", "2", capsys=capsys, monkeypatch=monkeypatch)
    assert len(lines) == len(ponder.KINDS) * (len(ponder.RATES) + len(ponder.SEEDS))
    assert {step for line in lines if line["kind"] == "one step" for step in line["steps"]} == {1.0}


def test_the_answer_of_the_parity_task_is_whether_the_number_of_ones_is_odd():
    x_BTF, odd_B, count_B = ponder.batch(6, "here")
    assert torch.equal((x_BTF[:, 0] == 1).sum(1) % 2, odd_B) and torch.equal((x_BTF[:, 0] != 0).sum(1), count_B)


def test_the_reversible_model_and_the_plain_one_have_the_same_layers():
    models = reversible.models()
    assert models["plain"].body.layers == models["reversible"].body.layers
    assert models["plain"].body.residual != models["reversible"].body.residual


def test_the_spans_of_the_final_runs_are_in_the_log_of_a_comparison(tmp_path, capsys, monkeypatch):
    words = ["adaptive-span", "run.steps=16", "run.batch=2", "--size", "tiny", "--trials", "1", "--seeds", "1"]
    words += ["--workers", "0", "--out", str(tmp_path / "out")]
    *_, spans = lines_of(compare, *words, capsys=capsys, monkeypatch=monkeypatch)
    assert spans["spans_of"] == "adaptive-span" and 0 < spans["mean_span"] < spans["most"]


def test_a_rate_at_which_training_diverges_is_named(capsys, monkeypatch):
    words = [
        "gpt2",
        "--size",
        "tiny",
        "--rates",
        "1e-3,1e9",
        "run.steps=40",
        "run.batch=2",
        "optim.warmup=0",
        "optim.patience=2",
    ]
    fine, diverged = lines_of(rates, *words, capsys=capsys, monkeypatch=monkeypatch)
    assert fine["bits_per_byte"] < 8.5 and "diverged" not in fine
    assert "skipped steps in a row" in diverged["diverged"]


@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_positions_are_tested_with_seeds_that_did_not_choose_the_rate(position, capsys, monkeypatch):
    monkeypatch.setattr(claims, "BATCH", 2)
    claims.positions(torch.device("cpu"), 2)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    mine = [line for line in lines if line["position"] == position]
    assert [line["seed"] for line in mine] == [0, 0, 0, *claims.FINAL_SEEDS]
    best = min(mine[:3], key=lambda line: line["tuning"])["lr"]
    assert {line["lr"] for line in mine[3:]} == {best} and "0-31" not in mine[0]


def test_norms_are_tested_with_seeds_and_windows_that_did_not_choose_the_rate(capsys, monkeypatch):
    monkeypatch.setattr(claims, "BATCH", 2)
    claims.norms(torch.device("cpu"), 6, ["BatchNorm", "LayerNorm"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    each = 2 * len(claims.NORM_RATES)
    assert [line["seed"] for line in lines] == [0, 1, 2, 3] * each
    assert all(("tuning" in line) == (line["seed"] == 0) and ("final" in line) == (line["seed"] > 0) for line in lines)


def test_the_first_run_of_the_defaults_is_the_default_recipe_and_the_others_differ_from_it(capsys, monkeypatch):
    words = ["lstm", "--data", "shakespeare", "--trials", "2", "--steps", "2", "--batch", "2", "--context", "8"]
    default, *trials = lines_of(defaults, *words, capsys=capsys, monkeypatch=monkeypatch)
    assert default["settings"] == [] and default["value"] > 0 and len(trials) == 2
    assert (default["metric"], default["higher_is_better"]) == ("bits_per_byte", False)
    for one in trials:
        given = dict(setting.split("=") for setting in one["settings"])
        assert 0.1 <= float(given["optim.lr"]) / default["lr"] <= 10 and "model.dropout" in given


def test_a_default_is_close_if_it_needs_at_most_3_percent_more_than_the_best_trial():
    runs = [("gpt2", 3.09), ("gpt2", 3.0), ("gpt2", None), ("lstm", 3.1), ("lstm", 3.0), ("lstm", 4.0)]
    log = "\n".join(json.dumps({"member": m, "data": "text", "lr": 0.004, "bits_per_byte": b}) for m, b in runs)
    rows = [dict(zip(defaults.defaults(log)[0], row, strict=True)) for row in defaults.defaults(log)[1:]]
    assert [(row["ratio"], row["within 3 %"], row["diverged"]) for row in rows] == [
        ("1.030", "yes", "1"),
        ("1.033", "no", "0"),
    ]


def test_a_default_of_a_classifier_may_have_an_accuracy_that_is_a_thirtieth_lower():
    runs = [0.98, 1.0, None, 0.9]
    log = "\n".join(
        json.dumps({"member": "vit", "data": "mnist", "lr": 1, "value": v, "higher_is_better": True}) for v in runs
    )
    (row,) = (dict(zip(defaults.defaults(log)[0], row, strict=True)) for row in defaults.defaults(log)[1:])
    assert (row["best of the trials"], row["ratio"], row["within 3 %"], row["diverged"]) == (
        "1.000 of 3",
        "1.020",
        "yes",
        "1",
    )


def test_every_letter_of_the_evaluated_context_is_of_the_document_of_its_target():
    a_document, other = effective_context.documents(2, 3)
    assert len(a_document) == len(other) == effective_context.LENGTH > max(effective_context.CONTEXTS)
    assert set(a_document) | set(other) <= set(effective_context.LETTERS)


def test_a_context_beyond_the_positions_of_a_model_is_refused():
    network = everyformer.build("byte-language", "tiny", width=8, heads=1, context=32).eval()
    bits = effective_context.bits_by_context(network, 4)
    assert [context for context, value in bits.items() if value is None] == ["64", "128"]


def test_the_effective_context_is_the_longest_that_gains():
    bits = dict(zip(("8", "16", "32", "64", "128"), (4.0, 4.0, 3.0, 2.99, 2.0), strict=True))
    assert effective_context.effective(bits) == 128
    assert effective_context.effective(bits | {"128": 2.98}) == 32


def test_a_rate_at_the_edge_of_its_range_is_not_chosen_before_the_next_one_is_tried():
    rates = (5e-4, 1e-3, 2e-3)
    assert pretraining.chosen(rates, lambda rate: -abs(rate - 4e-3)) == 4e-3
    assert pretraining.chosen(rates, lambda rate: rate) == rates[-1] * pretraining.STEP**pretraining.WIDER


def test_the_final_runs_of_copying_have_an_accuracy_by_length(tmp_path, capsys, monkeypatch):
    words = [
        "run.steps=16",
        "run.batch=2",
        "model.width=8",
        "model.heads=2",
        "run.final_examples=2",
        "--data",
        "copy",
        "--trials",
        "1",
    ]
    words += ["--seeds", "1", "--workers", "0", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(algorithms, "EXAMPLES", 1)
    lines = lines_of(algorithms, *words, capsys=capsys, monkeypatch=monkeypatch)
    right = {line["model"]: line["right"] for line in lines if "right" in line}
    assert right.keys() == {"universal", "transformer"}
    assert set(right["universal"]) == {"trained", *map(str, algorithms.LENGTHS)}
