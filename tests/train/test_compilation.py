"""`run.compile=auto` follows from the recipe: it compiles a run that earns the compilation back, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import everyformer
from everyformer.train import compilation as rule
from everyformer.train.compilation import compilation
from everyformer.train.learner import Learner
from everyformer.train.recipe import Run
from tests.train.small import recipe, text

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def chosen(name: str, size: str, device: torch.device, **fields: Any) -> str:
    return compilation(Run(**fields), everyformer.member(name, size), 256, device).mode


def test_a_short_run_is_not_compiled_and_a_long_one_is(monkeypatch):
    monkeypatch.setattr(rule, "find_spec", lambda name: name)
    assert chosen("gpt2", "small", CUDA, steps=2) == "no"
    assert chosen("gpt2", "tiny", CUDA, steps=300) == "no"
    assert chosen("gpt2", "small", CUDA, steps=20_000) == "yes"
    reason = compilation(Run(steps=2), everyformer.member("gpt2", "small"), 256, CUDA).reason
    assert reason.startswith("compiling takes about") and "would save about" in reason


def test_on_a_cpu_auto_does_not_compile():
    found = compilation(Run(steps=1_000_000), everyformer.member("gpt2", "small"), 256, CPU)
    assert found == ("no", "auto compiles on a GPU only, and the device is cpu")


def test_on_a_gpu_a_small_model_is_captured_and_a_large_one_compiled(monkeypatch):
    monkeypatch.setattr(rule, "find_spec", lambda name: name)
    assert chosen("byte-language", "tiny", CUDA, steps=100) == "no"
    assert chosen("byte-language", "paper", CUDA, steps=170_000) == "graphs"
    assert chosen("gpt2", "small", CUDA, steps=10_000, batch=64) == "yes"
    assert chosen("transformer-xl", "enwik8-12", CUDA, steps=100_000, batch=4) == "yes"  # its memory is carried over
    assert chosen("byte-language", "paper", CUDA, steps=170_000, precision="fp16") == "yes"


def test_auto_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(rule, "find_spec", lambda name: None)
    assert compilation(Run(), everyformer.member("gpt2"), 256, CUDA).reason == "Triton is not installed"
    monkeypatch.setattr(rule, "find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert compilation(Run(), everyformer.member("gpt2"), 256, CUDA).reason == "there is no C++ compiler"


def test_an_explicit_setting_is_followed():
    for mode in ("no", "yes"):
        assert chosen("gpt2", "tiny", CPU, compile=mode) == mode


def test_the_choice_does_not_depend_on_the_clock(tmp_path):
    """A resumed run must come to equal bits: the same recipe is compiled in the same way, whatever the machine does meanwhile."""
    value = everyformer.member("gpt2", "small")
    assert len({compilation(Run(steps=10_000), value, 256, CUDA) for _ in range(3)}) == 1


@pytest.mark.parametrize("compiled", ["auto", "yes"])
def test_a_learner_follows_the_choice(tmp_path, compiled):
    one = recipe(text(tmp_path), f"run.compile={compiled}")
    data = one.task.open(one.data)
    from everyformer.train.distributed import World

    learner = Learner(one, data, data.adapt(one.value(data.member_settings())), World())
    assert hasattr(learner.module, "_orig_mod") == (compiled == "yes")
    assert learner.compilation.mode == ("yes" if compiled == "yes" else "no")
