"""Two processes on gloo: equal curves, equal checkpoints, and a worker that is restarted.

It holds the command of docs/several_gpus.md.
"""

from __future__ import annotations

import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file

from everyformer.train import checkpoint
from everyformer.train.distributed import World
from everyformer.train.loop import resume, train
from everyformer.train.recipe import Recipe
from everyformer.train.record import read
from tests.train.small import finish, recipe, same, text

SETTINGS = ("model.dropout=0.0", "run.batch=8")
WAYS = {"ddp": "run.shard=false", "fsdp": "run.shard=true"}
SKIPS = ("optim.name=muon", "run.steps=6", "run.save=1", "run.keep=6", "run.evaluate=0")
TORCHRUN = (
    sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
    "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
)  # fmt: skip


def spans(data, *settings):
    """A table that all layers share, and a penalty of each layer."""
    every = (
        "run.steps=4",
        "run.save=2",
        "run.keep=5",
        "run.batch=8",
        "run.evaluate=0",
        "run.device=cpu",
        "task.valid=0.02",
    )
    own = ("model.cost=1", "model.initial_span=0.5", "model.dropout=0")
    return Recipe.of("adaptive-span", *every, *own, *settings, size="tiny", data=data)


def deep(data, *settings):
    """Losses of every layer."""
    every = ("run.steps=2", "run.batch=4", "run.evaluate=0", "run.device=cpu", "model.dropout=0", "task.valid=0.02")
    return Recipe.of("deep-character", *every, *settings, size="tiny", data=data)


# Everything that needs two processes, in one launch: most of the time is the launch.
ALL = """
import math, os, shutil, sys, time, warnings
from pathlib import Path
import pytest
import torch
import torch.distributed as dist
from everyformer.data import tokenizer
from everyformer.train import loop
from everyformer.train.loop import resume, train
from tests.train.small import recipe
from tests.train.test_distributed import SETTINGS, SKIPS, WAYS, deep, spans
from tests.train.test_in_flight import broken_steps
torch.set_num_threads(1)
warnings.filterwarnings("error", "FSDP2-wrapped module")  # returned a view
folder, data = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
for way, setting in WAYS.items():
    train(recipe(data, *SETTINGS, setting), folder / way)
    resume(folder / f"one-{way}", settings=[setting])
train(spans(data, "run.shard=true"), folder / "shared")
train(deep(data, "run.shard=true"), folder / "deep")
if os.environ["RANK"] == "0":
    shutil.copytree(folder / "shared", folder / "again")
dist.barrier()
resume(folder / "again", step=2)
with pytest.MonkeyPatch.context() as patch:
    broken_steps(patch, {15: math.nan})  # the fourth of six
    patch.setattr(loop, "steps_ahead", lambda device: 2)
    for way, setting in WAYS.items():
        train(recipe(data, *SETTINGS, *SKIPS, setting), folder / f"skip-{way}")
train_tokenizer = tokenizer.train
def learned(*args):
    (folder / f"learned-{os.environ['RANK']}").touch()
    time.sleep(1)  # so that the other process would start too, if it did not wait
    return train_tokenizer(*args)
tokenizer.train = learned
train(recipe(data, *SETTINGS, "task.tokenizer=bpe", "task.vocabulary=300", "run.steps=1"))
dist.destroy_process_group()
"""

# The second process dies in its eighth step, the first time.
DIES = """
import os, signal, sys
import torch
from everyformer.train.loop import Loop, train
from tests.train.small import recipe
from tests.train.test_distributed import SETTINGS
torch.set_num_threads(1)
step = Loop._step
def dies(loop, number, records):
    if number == 7 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    step(loop, number, records)
Loop._step = dies
train(recipe(sys.argv[2], *SETTINGS), sys.argv[1] + "/run")
"""


def torchrun(folder, script, *options):
    (folder / "script.py").write_text(script)
    return finish([*TORCHRUN, *options, str(folder / "script.py"), str(folder), str(folder / "text.txt")])


def recorded(folder, kind, name):
    return [line[name] for line in read(folder / "records.jsonl") if line["kind"] == kind]


def same_run(one, two):
    """Asserts equal losses, metrics and weights."""
    for kind, name in (("step", "loss"), ("step", "norm"), ("evaluate", "bits_per_byte")):
        torch.testing.assert_close(torch.tensor(recorded(one, kind, name)), torch.tensor(recorded(two, kind, name)))
    for name in ("model", "ema"):
        a, b = (load_file(checkpoint.path_of(folder, 12) / f"{name}.safetensors") for folder in (one, two))
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(a[key], b[key], rtol=1e-4, atol=1e-5)


def cut(folder, new):
    """Copies a run as if it had ended after step 6."""
    shutil.copytree(folder, new)
    for step in (9, 12):
        shutil.rmtree(checkpoint.path_of(new, step))


def test_two_processes_have_the_curve_of_one_and_resume_each_others_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "cache"))
    one = tmp_path / "one"
    train(recipe(text(tmp_path), *SETTINGS), one)
    assert len(recorded(one, "step", "loss")) == 12 and len(recorded(one, "evaluate", "bits_per_byte")) == 2
    for way in WAYS:
        cut(one, tmp_path / f"one-{way}")
    torchrun(tmp_path, ALL)
    for way in WAYS:
        same_run(one, tmp_path / way)
        same_run(one, tmp_path / f"one-{way}")  # saved by one, resumed by two
        cut(tmp_path / way, tmp_path / f"{way}-one")
        resume(tmp_path / f"{way}-one")  # saved by two, resumed by one
        same_run(one, tmp_path / f"{way}-one")
    paths = (checkpoint.path_of(tmp_path / name, 4) for name in ("shared", "again"))
    a, b = (load_file(path / "model.safetensors") for path in paths)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    for make, name in ((spans, "shared"), (deep, "deep")):
        train(make(tmp_path / "text.txt"), tmp_path / f"{name}-one")
        losses = (torch.tensor(recorded(tmp_path / one, "step", "loss")) for one in (name, f"{name}-one"))
        torch.testing.assert_close(*losses)
    for way in WAYS:  # a skipped step changes nothing in any process
        assert recorded(tmp_path / f"skip-{way}", "skip", "step") == [4]
        paths = [checkpoint.path_of(tmp_path / f"skip-{way}", step) for step in (3, 4, 5)]
        assert same(*paths[:2]) and not same(*paths[1:])
    # The main process learned the tokenizer, the other one found it in the cache.
    assert [(tmp_path / f"learned-{rank}").exists() for rank in (0, 1)] == [True, False]


def test_a_killed_worker_is_restarted_and_the_run_is_resumed(tmp_path):
    train(recipe(text(tmp_path), *SETTINGS), tmp_path / "one")
    torchrun(tmp_path, DIES, "--max-restarts=1")
    same_run(tmp_path / "one", tmp_path / "run")
    assert recorded(tmp_path / "run", "begin", "step") == [0, 6]


def test_main_first_runs_in_a_single_process_and_propagates_errors():
    done = []
    with World().main_first():
        done.append(1)
    assert done == [1]
    with pytest.raises(OSError, match="full"), World().main_first():
        raise OSError("full")
