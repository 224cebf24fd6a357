"""The files of a run: damage is noticed and named, and one process writes at a time."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys

import pytest

from everyformer.cli.main import main
from everyformer.task.language import LanguageData
from everyformer.train import checkpoint
from everyformer.train.checksums import FILE, read_checksums
from everyformer.train.folder import read_recipe, write_recipe
from everyformer.train.init_from import load_weights
from everyformer.train.lock import LOCK, is_in_use, only_writer
from everyformer.train.loop import resume, train
from everyformer.train.recipe import override
from everyformer.train.trained import load
from tests.train.small import recipe, text

TOKENIZER = ("task.tokenizer=characters", "run.steps=6")
PARTS = """
from everyformer import Pattern, Value


class Near(Pattern, Value, frozen=True):
    reach: int = 2

    def allows(self, b, h, q, k):
        return (q - k).abs() <= self.reach
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with a tokenizer and with a copy of parts of your own, and its data."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "near_parts.py").write_text(PARTS)
    settings = ["run.steps=6", "run.save=3", "run.batch=4", "run.evaluate=0", "run.device=cpu", "task.context=8"]
    line = ["train", "gpt2", "--size", "tiny", *settings, "model.layers=1", "task.tokenizer=characters"]
    options = ["--data", str(text(folder)), "--out", str(folder / "run"), "--import", str(folder / "near_parts.py")]
    assert main([*line, *options]) == 0
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def flip(path, byte, bit=0):
    content = bytearray(path.read_bytes())
    content[byte % len(content)] ^= 1 << bit
    path.write_bytes(content)


def decides(folder):
    """The files that decide a result, in the folder of a run and in its last checkpoint."""
    last = checkpoint.path_of(folder, 6)
    return sorted(path for root in (folder, last) for path in (root / name for name in read_checksums(root)))


def test_every_file_that_decides_a_result_has_a_checksum(run):
    names = {str(path.relative_to(run)) for path in decides(run)}
    described = {"recipe.json", "model.json", "characters.json", "imports.txt", "imports/near_parts.py"}
    saved = {"state.json", "model.safetensors", "optimizer.safetensors"}
    assert names == described | {f"checkpoints/00000006/{name}" for name in described | saved}
    check = subprocess.run(["sha256sum", "--quiet", "-c", FILE], cwd=run, check=False)
    assert check.returncode == 0


def check(folder):
    read_recipe(folder)
    checkpoint.verify(folder, 6)


@pytest.mark.parametrize("harm", ["flip", "cut", "lose"])
def test_a_damaged_file_is_named_with_the_remedy(run, harm):
    check(run)
    for number, path in enumerate(decides(run)):
        before = path.read_bytes()
        if harm == "lose":
            path.unlink()
        elif harm == "cut":
            path.write_bytes(before[:-1])
        else:
            flip(path, 11 + number, bit=number % 8)
        with pytest.raises(ValueError, match=rf"{path} (is missing|was changed after it was written); ") as error:
            check(run)
        remedy = re.search(r"cp (\S+) (\S+)|--step 3", str(error.value))
        assert remedy, error.value
        if remedy[1]:  # the remedy works
            shutil.copyfile(remedy[1], remedy[2])
        else:
            path.write_bytes(before)
        check(run)


@pytest.mark.parametrize("name", ["model.json", "recipe.json", "characters.json", "checkpoints/00000006/state.json"])
def test_evaluation_refuses_a_flipped_bit_in_a_small_file(run, name, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "near_parts")  # else the copy would be a second module of this name
    flip(run / name, 60, bit=3)
    assert main(["evaluate", str(run), "--limit", "1", "--import", str(run / "imports" / "near_parts.py")]) != 0
    shown = capsys.readouterr().err.replace("\n", " ")
    assert "changed after it was written" in shown and "Traceback" not in shown


def test_damaged_or_missing_checksums_are_refused_in_one_sentence(run):
    content = (run / FILE).read_bytes()
    for byte in range(0, len(content), 37):
        flip(run / FILE, byte, bit=byte % 8)
        with pytest.raises(ValueError, match=str(run)):
            load(run)
        (run / FILE).write_bytes(content)


@pytest.mark.parametrize("name", ["model.json", "model.safetensors", "state.json"])
def test_checksums_without_a_line_for_a_file_of_the_result_are_refused(run, name):
    sums = checkpoint.path_of(run, 6) / FILE
    sums.write_text("".join(line for line in sums.read_text().splitlines(True) if not line.endswith(f"  {name}\n")))
    with pytest.raises(ValueError, match=rf"{FILE} was changed after it was written: it has no line for {name}; "):
        load(run)


def test_a_run_of_an_older_version_gets_its_checksums_by_the_command_of_the_message(run):
    for folder in (run, *(checkpoint.path_of(run, step) for step in (3, 6))):
        (folder / FILE).unlink()
    for folder in (run, checkpoint.path_of(run, 6)):
        with pytest.raises(ValueError, match=rf"{folder} has no SHA256SUMS") as error:
            load(run)
        (command,) = re.findall(r"sha256sum .* > SHA256SUMS", str(error.value))
        subprocess.run(command, shell=True, cwd=folder, check=True)
    assert resume(run, steps=7).step == 7


def test_a_model_of_another_run_is_refused_even_with_its_checksum(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    content = (other / "model.json").read_text().replace('"dropout": 0.0', '"dropout": 0.3')
    assert "0.3" in content
    (run / "model.json").write_text(content)
    subprocess.run(f"sha256sum {' '.join(read_checksums(other))} > {FILE}", shell=True, cwd=run, check=True)
    with pytest.raises(ValueError, match=r"model.json is not the one of its checkpoint 6; restore it: cp "):
        load(run)


def test_weights_are_not_loaded_from_a_run_with_a_damaged_model(run):
    network = load(run).network
    flip(checkpoint.path_of(run, 6) / "model.json", 40)
    with pytest.raises(ValueError, match=r"model\.json was changed"):
        load_weights(network, run)


def test_a_kill_while_a_recipe_is_replaced_leaves_a_run_that_opens(run, monkeypatch):
    """Either the old or the new recipe is there, and both are accepted."""
    old = load(run).recipe
    new, calls, limit = override(old, ["run.keep=7"]), 0, 0
    original = os.replace

    def killed(*args):
        nonlocal calls
        calls += 1
        if calls > limit:
            raise KeyboardInterrupt
        original(*args)

    monkeypatch.setattr(os, "replace", killed)
    seen = []
    for number in range(4):
        calls, limit = 0, number
        try:
            write_recipe(new, run)
        except KeyboardInterrupt:
            seen.append(load(run).recipe.run.keep)
        else:
            break
    assert seen[0] == old.run.keep and seen[-1] == 7 and load(run).recipe == new
    assert set(seen) == {old.run.keep, 7}


def test_a_second_writer_is_refused_and_the_lock_of_a_killed_one_is_taken_over(run):
    ready, write = os.pipe()
    if (child := os.fork()) == 0:
        with only_writer(run):
            os.write(write, b"x")
            signal.pause()
    os.read(ready, 1)
    message = rf"run is in use: process {child} on .* writes there since .*; wait until it ends, or stop it"
    with pytest.raises(ValueError, match=message):
        train(load(run).recipe, run)  # reading needs no lock
    with pytest.raises(ValueError, match=message):
        resume(run, steps=7)
    assert is_in_use(run)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (run / LOCK).is_file() and not is_in_use(run)
    assert resume(run, steps=7).step == 7
    assert not (run / LOCK).exists() and not is_in_use(run)


def test_a_lock_of_another_machine_says_what_to_do_and_one_from_before_a_reboot_is_taken_over(run):
    owner = {"process": 7, "host": "elsewhere", "boot": "other", "since": "2020-01-01 00:00:00"}
    (run / LOCK).write_text(json.dumps(owner))
    match = r"process 7 on elsewhere .* cannot be seen from here; if it has ended, delete \S+lock"
    with pytest.raises(ValueError, match=match):
        resume(run, steps=7)
    assert is_in_use(run)
    for content in (json.dumps(owner | {"host": os.uname().nodename}), "", "{"):
        (run / LOCK).write_text(content)
        with only_writer(run):
            assert json.loads((run / LOCK).read_text())["process"] == os.getpid()
        assert not (run / LOCK).exists()


def test_one_process_cannot_write_twice_and_a_refused_folder_is_removed(tmp_path):
    with only_writer(tmp_path / "run"), pytest.raises(ValueError, match="is in use"), only_writer(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()


def test_a_training_that_died_before_its_recipe_was_written_starts_anew(tmp_path, monkeypatch):
    data = text(tmp_path)
    monkeypatch.setattr(LanguageData, "save", lambda *_: os._exit(9))
    if (child := os.fork()) == 0:
        train(recipe(data, *TOKENIZER), tmp_path / "run")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    monkeypatch.undo()
    (tmp_path / "run" / "characters.json").write_text("half")
    assert train(recipe(data, *TOKENIZER), tmp_path / "run").step == 6
    assert load(tmp_path / "run", device="cpu").step == 6


def test_a_run_that_cannot_be_written_leaves_an_empty_folder(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    data = text(tmp_path)
    for size in (300, 900, 2500):  # the tokenizer, the model and the recipe fit, or not
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            with pytest.raises(ValueError, match="cannot write to"):
                train(recipe(data, *TOKENIZER), tmp_path / "run")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not (tmp_path / "run").exists() or (tmp_path / "run" / "recipe.json").is_file()
