"""Damaged files with checksums to match, and wrong values: each command ends with one line. `bench/hostile.py` tries thousands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from bench.hostile_generated import keep_files_in
from bench.hostile_inputs import write_sums
from bench.hostile_types import drawn, values
from everyformer import Pattern, from_json, load
from everyformer.cli.main import main
from everyformer.data.tokenizer import load as load_tokenizer
from tests.cli.small_run import train

pytestmark = pytest.mark.usefixtures("place")
DEEP = "[" * 100_000 + "]" * 100_000
TINY = (
    "run.steps=1",
    "run.batch=2",
    "run.examples=2",
    "run.device=cpu",
    "model.width=8",
    "model.heads=2",
    "model.layers=1",
)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 30)
    words = ["--size", "tiny", "--data", str(folder / "text.txt"), "--out", str(folder / "run"), "task.context=8"]
    assert main(["train", "byte-language", *words, *TINY]) == 0
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "copy")


def refusal(capsys, *words):
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def damaged(run, name, change):
    file = run / "checkpoints" / "00000001" / name
    file.write_bytes(change(file.read_bytes()))
    write_sums(run)


@pytest.mark.parametrize("change", [lambda all_: all_[:-5], lambda all_: b"\xff" * 8 + all_[8:]])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_tensors_that_cannot_be_read_are_named(run, name, change, capsys):
    damaged(run, name, change)
    error = refusal(capsys, "resume", str(run), "--steps", "2")
    assert f"{name} cannot be read" in error and "restore it" in error


def test_tensors_of_another_model_are_named(run, capsys):
    damaged(run, "optimizer.safetensors", lambda content: content.replace(b"exp_avg_sq", b"exp/avg_sq"))
    assert "optimizer.safetensors does not fit" in refusal(capsys, "resume", str(run), "--steps", "2")
    damaged(run, "model.safetensors", lambda content: content.replace(b"[256,8]", b"[8,256]"))
    assert "does not fit its model.json" in refusal(capsys, "generate", str(run))


@pytest.mark.parametrize(
    "name, wrong, told",
    [("watch", 0.5, "at `$.watch`"), ("best", [], "best"), ("step", 2, "is of step 2")],
)
def test_a_state_of_another_form_is_refused(run, name, wrong, told, capsys):
    damaged(run, "state.json", lambda content: json.dumps(json.loads(content) | {name: wrong}).encode())
    error = refusal(capsys, "evaluate", str(run))
    assert told in error and "restore the file that train wrote" in error


def test_a_state_without_the_count_of_skipped_steps_is_evaluated_as_it_is_resumed(run):
    damaged(run, "state.json", lambda content: json.dumps(json.loads(content) | {"watch": {"patience": 9}}).encode())
    assert load(run).skipped_steps == 0


def test_a_best_evaluation_without_its_metric_is_refused(run, capsys):
    damaged(run, "state.json", lambda content: json.dumps(json.loads(content) | {"best": {"step": 1}}).encode())
    assert "a best evaluation without its bits_per_byte; restore" in refusal(capsys, "resume", str(run), "--steps", "2")


def test_token_ids_that_are_too_large_are_refused(capsys):
    Path("ids.json").write_text(json.dumps([{"text": [1, 2, 10**30]}, {"text": [1]}]))
    error = refusal(capsys, "train", "gpt2", "--size", "tiny", "--data", "ids.json")
    assert f"are from 1 to {10**30}; give integers from 0 to 2147483647" in error


def test_json_that_is_nested_too_deeply_is_refused(run, capsys):
    damaged(run, "state.json", lambda _: DEEP.encode())
    assert "nested too deeply" in refusal(capsys, "evaluate", str(run))
    (run / "recipe.json").write_text(DEEP)
    write_sums(run)
    assert "nested too deeply" in refusal(capsys, "evaluate", str(run))
    Path("graph.json").write_text(DEEP)
    assert "nested too deeply" in refusal(capsys, "train", "graph-classifier", "--size", "tiny", "--data", "graph.json")
    assert "nested too deeply" in refusal(capsys, "train", "gpt2", "--size", "tiny", f"run.batch_schedule={DEEP}")
    assert "nested too deeply" in refusal(capsys, "show", "pattern", "~" * 5000 + "causal")


def test_a_model_that_is_not_utf8_is_refused(run, capsys):
    Path("model.json").write_bytes((run / "model.json").read_bytes().replace(b'"width"', b'"wi\xc7th"'))
    error = refusal(capsys, "plan", "model.json", "--data", "text.txt")
    assert "model.json: this JSON is not a Model: byte " in error and "is not text in UTF-8" in error


def test_an_id_beyond_the_vocabulary_is_refused_before_memory_is_taken_for_it(tmp_path):
    tree = {"model": {"type": "BPE", "vocab": {"a": 0, "o": 2**31}, "merges": []}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(ValueError, match=r"the token 'o' has the id 2147483648, but there are 2 tokens.*restore"):
        load_tokenizer(tmp_path)


def test_an_array_with_a_damaged_header_is_refused(capsys):
    np.save("ids.npy", np.arange(300))
    Path("ids.npy").write_bytes(Path("ids.npy").read_bytes().replace(b"(300,)", b"(((((,"))
    assert "ids.npy cannot be read as an array" in refusal(
        capsys, "train", "byte-language", "--size", "tiny", "--data", "ids.npy"
    )


def test_a_model_without_an_output_head_is_refused(run, capsys):
    Path("model.json").write_text(json.dumps(json.loads((run / "model.json").read_text()) | {"outputs": []}))
    assert "no output head" in refusal(capsys, "plan", "model.json", "--data", "text.txt")


def test_a_language_model_cannot_begin_from_a_tokenizer_that_loses_text(capsys):
    Path("films.csv").write_text("text,label\n" + "a good film,1\na bad film,0\n" * 8)
    assert main(["train", "byte-classifier", "--size", "tiny", "--data", "films.csv", "--out", "films", *TINY]) == 0
    assert train("--init-from", "films", "--out", "run", "model.width=8", "model.heads=2", "model.layers=1") == 2
    assert "leave out --init-from" in capsys.readouterr().err


def test_text_in_parquet_that_is_not_utf8_is_named(capsys):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    lines = [f"line {number} of this file" for number in range(20)]
    parquet.write_table(pyarrow.table({"text": lines, "label": lines}), "a.parquet", compression="none")
    Path("a.parquet").write_bytes(Path("a.parquet").read_bytes().replace(b"line 7 of", b"line \xff of"))
    assert "a.parquet cannot be read as Parquet" in refusal(
        capsys, "train", "byte-classifier", "--size", "tiny", "--data", "a.parquet"
    )


def test_moments_of_another_optimizer_are_named(run, capsys):
    for file in run.rglob("recipe.json"):
        file.write_text(file.read_text().replace('"adamw"', '"muon"'))
    write_sums(run)
    error = refusal(capsys, "resume", str(run), "--steps", "2")
    assert "optimizer.safetensors has no " in error and "restore it and recipe.json" in error


def test_a_prompt_that_is_not_utf8_is_named(run, capsys):
    prompt = os.fsdecode(b"caf\xe9")  # as Python reads such a word of the command line
    error = refusal(capsys, "generate", str(run), "--prompt", prompt)
    assert r"'caf\udce9' is not text in UTF-8; give a text in UTF-8" in error


def test_attention_is_drawn_of_an_example_of_the_data(place, capsys):
    words = ["--size", "tiny", "--out", "run", *TINY, "run.evaluate=0"]
    assert main(["train", "graph-classifier", *words]) == 0
    assert main(["show", "attention", "run", "--out", "attention.png"]) == 0 and (place / "attention.png").exists()


def test_a_character_without_a_token_is_refused(tmp_path):
    vocabulary = {"a": 0, "[PAD]": 1, "[CLS]": 2, "[SEP]": 3}
    tree = json.loads(Tokenizer(models.WordPiece(vocabulary, unk_token="a")).to_str())
    tree["model"]["unk_token"] = "[UNK]"
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_all(["a"])[0].tolist() == [0]
    with pytest.raises(ValueError, match=r"cannot read a text \(.*UNK.*restore its tokenizer.json"):
        tokenizer.encode_all(["b"])


def test_the_examples_of_hypothesis_follow_from_their_seed(tmp_path):
    keep_files_in(tmp_path)
    strategy = values(Pattern)
    first, again, other = (drawn(strategy, 5, number) for number in (1, 1, 2))
    assert first == again != other


def test_random_values_of_a_type_are_legal_and_nearly_legal(tmp_path):
    keep_files_in(tmp_path)
    reasons = set()
    for tree in drawn(values(Pattern), 40, 0):
        try:
            reasons.add(type(from_json(json.dumps(tree), Pattern)).__name__)
        except ValueError as error:
            reasons.add(str(error))
    legal = [name for name in reasons if name.isidentifier()]
    assert len(legal) >= 5 and len(reasons) - len(legal) >= 2


def test_a_small_campaign_has_no_failure(tmp_path):
    log = tmp_path / "log.txt"
    command = [sys.executable, "-m", "bench.hostile", "--count", "26", "--seed", "3", "--log", str(log)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert log.read_text().splitlines()[-1].startswith("| all | 26 |")
