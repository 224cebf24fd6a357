"""Whether a run is compiled: `run.compile=auto` chooses by the device, the model and the length of the run.

Compiling takes seconds, and then saves a share of each step. Both are estimated from the recipe alone, never from the clock, because
a compiled step differs by rounding and a resumed run must come to equal bits:

    cost    START + PER_LAYER * layers                                        seconds
    gain    steps * share saved * 6 * parameters * targets per step / RATE    seconds, at least LAUNCHES * layers a step

The run is compiled if the gain is at least twice the cost, and on CUDA only: on a CPU a compiled step was not faster.
docs/training.md has the rule, docs/results/training_step.md what was measured.
Compiled code is kept in the user's cache folder, so that the same model starts faster the next time.
"""

from __future__ import annotations

import os
import shutil
import warnings
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from everyformer.data.files import cache_folder
from everyformer.network.depth import Stack
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.size import parameters
from everyformer.train.cuda_graphs import unsupported_reason
from everyformer.train.recipe import Run

START, PER_LAYER = 15.0, 0.8  # seconds of compilation; 18 to 29 for 6 to 12 layers on an H200
SAVED = 0.25  # share of a step that compilation saves
RATE = 2e14  # operations a second
LAUNCHES = 1e-3  # seconds of a step for each layer, at least: launching its kernels
CONTEXT = 256  # targets of an example, where the task has no context
WORTHWHILE = 2.0  # the gain, in costs


class Compilation(NamedTuple):
    """How a run is compiled, and why, as one clause."""

    mode: Literal["no", "yes", "graphs"]
    reason: str


def compilation(
    run: Run, model: Model | EncoderDecoder, context: int | None, device: torch.device, processes: int = 1
) -> Compilation:
    """Returns how the run is compiled on the device: what `run.compile` says, or what fits best if that is auto."""
    if run.compile != "auto":
        return Compilation(run.compile, "as run.compile says")
    if run.gather:
        return Compilation("no", "run.gather reads which positions have halted")
    if reason := _missing(device):
        return Compilation("no", reason)
    side = model.decoder if isinstance(model, EncoderDecoder) else model
    layers = side.body.num_layers if isinstance(side.body, Stack) else len(side.body.layers)
    operations = 6 * parameters(model) * run.batch * (context or CONTEXT) // processes
    computing, launching = operations / RATE, LAUNCHES * layers
    cost, gain = START + PER_LAYER * layers, run.steps * SAVED * max(computing, launching)
    seconds = f"compiling takes about {cost:.0f} s and would save about {gain:.0f} s"
    if gain < WORTHWHILE * cost:
        return Compilation("no", seconds)
    if launching > computing and not run.batch_schedule and unsupported_reason(run, model, processes) is None:
        return Compilation("graphs", f"{seconds}; a step is mostly launches")
    return Compilation("yes", seconds)


def _missing(device: torch.device) -> str | None:
    """Returns which compiler this machine lacks, or None."""
    if device.type != "cuda":
        return f"auto compiles on a GPU only, and the device is {device.type}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++", "cl"))):
        return "there is no C++ compiler"
    return None


def compiled(module: nn.Module, device: torch.device, one_length: bool = True) -> Any:
    """Returns the compiled module. Compiled code is kept in the user's cache folder, unless the user has set another one.

    On a GPU many small kernels, such as the casts of the weights to bfloat16, become one: a step of the byte model of Bloem 2019
    (source B) takes 3.7 instead of 4.0 ms. With several lengths, those of a schedule, each has code of its own, which is faster than
    code for any length.
    """
    # PyTorch reads this attribute of the inputs of a graph itself, after a graph break.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    joined: dict[str, Any] | None = {"combo_kernels": True} if device.type == "cuda" else None
    return torch.compile(module, dynamic=None if one_length else False, options=joined)
