"""Checkpoints: safetensors and JSON, whole or not at all.

A checkpoint is a folder named after its step. It is written under another name, flushed to the disk and then renamed, so
at any moment every folder with a number for a name is complete. `state.json` holds the checksums of the other files;
a truncated or changed file is named and refused. Weights and optimizer state are gathered to full tensors, so a run saved
by several processes goes on in one and the other way round.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from everyformer.data.files import checksum
from everyformer.train.distributed import World
from everyformer.train.record import writing

VERSION = 1
RESULT = ("model.safetensors", "average.safetensors")  # the files with the weights that are a run's result
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, oldest first."""
    found = folder / "checkpoints"
    return sorted(int(one.name) for one in found.iterdir() if one.name.isdigit()) if found.is_dir() else []


def find(folder: Path, step: int | Literal["best"] | None) -> int:
    """The step of the last checkpoint, of the best, or of the one named."""
    found = steps(folder)
    if not found:
        raise ValueError(f"{folder} has no checkpoint yet; train it further, or look at its records.jsonl")
    if step == "best":
        best = check(folder, found[-1], result=True).get("best")
        if best is None or best["step"] not in found:
            raise ValueError(
                f"{folder} has no best checkpoint: none was evaluated; let run.save be a multiple of run.evaluate, or leave "
                "--step out for the last one"
            )
        return int(best["step"])
    if step is not None and step not in found:
        raise ValueError(f"{folder} has no checkpoint of step {step}; there are {', '.join(map(str, found))}")
    return found[-1] if step is None else step


def place(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"{step:08d}"


def write(
    folder: Path,
    network: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    average: dict[str, Tensor] | None,
    more: dict[str, dict[str, Tensor]],
    state: dict[str, Any],
    model_json: str,
    here: World,
    keep: int,
) -> None:
    """Save everything a run needs to go on, then drop checkpoints older than the last `keep`, but for the best."""
    weights = gathered(network)
    found: Any = get_optimizer_state_dict(network, optimizers, options=FULL)  # empty but on the first process
    moments = {
        f"{name}/{moment}": x for name, moments in found.get("state", {}).items() for moment, x in moments.items()
    }
    whole = None if average is None else {name: _full(x) for name, x in average.items()}
    if here.first:
        target = place(folder, state["step"])
        part = target.with_name(f"part-{target.name}")
        try:
            with writing(folder):
                target.parent.mkdir(exist_ok=True)
                for left in target.parent.iterdir():  # by a kill
                    if not left.name.isdigit():
                        shutil.rmtree(left)
                part.mkdir()
                _save(once(network, weights), part / "model.safetensors")
                _save(moments, part / "optimizer.safetensors")
                if whole is not None:
                    _save(whole, part / "average.safetensors")
                for name, tensors in more.items():
                    if tensors:
                        _save(tensors, part / f"{name}.safetensors")
                (part / "model.json").write_text(model_json + "\n")
                sums = {one.name: checksum(one) for one in sorted(part.iterdir())}
                record = {"version": VERSION, **state, "groups": found["param_groups"], "files": sums}
                (part / "state.json").write_text(json.dumps(record, indent=1) + "\n")
                for one in (*part.iterdir(), part):
                    _flush(one)
        except ValueError:
            shutil.rmtree(part, ignore_errors=True)
            raise
        if target.exists():
            _drop(target)
        part.rename(target)
        _flush(target.parent)
        best = state["best"]["step"] if state["best"] else None
        cache = [one for one in steps(folder) if one <= state["step"]]
        for old in steps(folder):  # later ones are there when a run went on from an earlier one: it takes their place
            if old not in cache[-keep:] and old != best:
                _drop(place(folder, old))
    here.wait()


def _drop(found: Path) -> None:
    """Remove a checkpoint. It loses its name first: one that a kill leaves half removed is no checkpoint."""
    gone = found.with_name(f"gone-{found.name}")
    found.rename(gone)
    shutil.rmtree(gone)


def gathered(network: nn.Module) -> dict[str, Any]:
    """The full weights, on the first process; all take part. Of a network that is not sharded, on every process."""
    return get_model_state_dict(network, options=FULL)


def check(folder: Path, step: int, *, result: bool = False) -> dict[str, Any]:
    """The state of a checkpoint whose files, or those of its result alone, are all as they were written."""
    found = place(folder, step)
    try:
        state: dict[str, Any] = json.loads((found / "state.json").read_text())
        files = state["files"]
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"the checkpoint {found} has no readable state.json ({error}); {_remedy(folder, step)}"
        ) from None
    if state.get("version") != VERSION:
        raise ValueError(
            f"the checkpoint {found} is of version {state.get('version')}, this program reads version {VERSION}; "
            "use the everyformer that wrote it"
        )
    for name, wanted in files.items():
        if result and name not in RESULT:
            continue
        if not (found / name).is_file():
            raise ValueError(f"the checkpoint {found} has lost {name}; {_remedy(folder, step)}")
        if checksum(found / name) != wanted:
            raise ValueError(f"{found / name} is not as it was written (truncated or changed); {_remedy(folder, step)}")
    return state


def read(
    folder: Path,
    step: int,
    network: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    average: dict[str, Tensor] | None,
) -> dict[str, Any]:
    """Put a checkpoint into a network, its optimizers and its average; the state comes back."""
    state, found = check(folder, step), place(folder, step)
    weights: dict[str, Any] = once(network, load_file(found / "model.safetensors"))
    if wrong := sorted(weights.keys() ^ once(network, network.state_dict()).keys()):
        raise ValueError(f"{found} does not fit {folder / 'model.json'}: {wrong}")
    set_model_state_dict(
        network, weights, options=replace(FULL, strict=False)
    )  # of shards torch knows first names alone
    moments: dict[str, Any] = {}
    for key, x in load_file(found / "optimizer.safetensors").items():
        name, moment = key.rsplit("/", 1)
        moments.setdefault(name, {})[moment] = x
    known_state = {"state": moments, "param_groups": state["groups"]}
    set_optimizer_state_dict(network, optimizers, optim_state_dict=known_state, options=FULL)
    if average is not None:
        for name, saved in load_file(found / "average.safetensors").items():
            _put(average[name], saved)
    return state


def result(place: Path) -> dict[str, Tensor]:
    """The weights that are a run's result: the averaged ones, if it keeps an average; buffers come with the others."""
    average = place / "average.safetensors"
    return load_file(place / "model.safetensors") | (load_file(average) if average.is_file() else {})


def kept(folder: Path, step: int, name: str) -> dict[str, Tensor]:
    """What else was kept under a name, if anything: what the step before left for the next one, or the work's state."""
    path = place(folder, step) / f"{name}.safetensors"
    return load_file(path) if path.is_file() else {}


def _remedy(folder: Path, step: int) -> str:
    earlier = [one for one in steps(folder) if one < step]
    return f"go on from an earlier one with --step {earlier[-1]}" if earlier else "begin the run anew"


def second_names(network: nn.Module) -> dict[str, str]:
    """The other names of shared weights, with the first of each."""
    every = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    return {name: one for name, x in every if (one := first.setdefault(id(x), name)) != name}


def once(network: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights without the second names of those that are there by their first."""
    others = second_names(network)
    return {name: x for name, x in weights.items() if others.get(name) not in weights}


def _full(x: Tensor) -> Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().cpu()


def _put(x: Tensor, saved: Tensor) -> None:
    if hasattr(x, "full_tensor"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(x, DTensor)
        x.copy_(distribute_tensor(saved.to(x.device), x.device_mesh, x.placements))
    else:
        x.copy_(saved)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: x.contiguous() for name, x in tensors.items()}, path)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
