"""Two processes on gloo: the same curve, the same checkpoints, and a worker that dies and comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file

from everyformer.train import checkpoint
from everyformer.train.record import read
from tests.train.small import command, finish, start, text

SETTINGS = ("model.dropout=0.0", "run.evaluate=0", "run.batch=8")


def losses(folder):
    return [line["loss"] for line in read(folder / "records.jsonl") if line["kind"] == "step"]


def close(one, two):
    for name in ("model", "average"):
        a, b = load_file(one / f"{name}.safetensors"), load_file(two / f"{name}.safetensors")
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(a[key], b[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shard", ["false", "true"], ids=["ddp", "fsdp"])
def test_two_processes_follow_the_curve_of_one_and_go_on_as_one_and_back(tmp_path, shard):
    data, settings = text(tmp_path), (*SETTINGS, f"run.shard={shard}")
    finish(command(tmp_path / "one", data, "train", *settings))
    finish(command(tmp_path / "two", data, "train", *settings, processes=2))
    torch.testing.assert_close(torch.tensor(losses(tmp_path / "one")), torch.tensor(losses(tmp_path / "two")))
    close(checkpoint.place(tmp_path / "one", 12), checkpoint.place(tmp_path / "two", 12))
    # Saved on two, resumed on one; saved on one, resumed on two.
    for folder, processes in (("two", 1), ("one", 2)):
        for step in (9, 12):
            found = checkpoint.place(tmp_path / folder, step)
            found.rename(tmp_path / f"{folder}-{step}")
        finish(command(tmp_path / folder, data, "resume", processes=processes))
        close(checkpoint.place(tmp_path / folder, 12), tmp_path / f"{folder}-12")


@pytest.mark.slow
def test_a_killed_worker_is_restarted_and_goes_on(tmp_path):
    data = text(tmp_path)
    settings = (*SETTINGS, "run.steps=400", "run.save=10")
    line = command(tmp_path / "run", data, "begin", *settings, processes=2)
    line.insert(line.index("-m") + 2, "--max-restarts=3")
    (tmp_path / "script.py").write_text(
        "import sys\nfrom pathlib import Path\nfrom everyformer.train.loop import resume, train\n"
        "from tests.train.small import recipe\nfolder, data, verb, *settings = sys.argv[1:]\n"
        "begun = (Path(folder) / 'checkpoints').is_dir()\n"
        "resume(folder) if begun else train(recipe(data, *settings), folder)\n"
    )
    process = start(line)
    while not checkpoint.steps(tmp_path / "run"):
        time.sleep(0.1)
        assert process.poll() is None, process.communicate()[0]
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    begins = [line["step"] for line in read(tmp_path / "run" / "records.jsonl") if line["kind"] == "begin"]
    assert checkpoint.steps(tmp_path / "run")[-1] == 400 and begins[-1] > 0
