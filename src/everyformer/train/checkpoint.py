"""Checkpoints: safetensors and JSON, written atomically.

A checkpoint is a folder named after its step. It is written under another name, flushed to disk and then renamed, so every
folder with a number for a name is complete at any moment. It has copies of the files that describe the run, and `SHA256SUMS`
with the checksums of all its files; a damaged file is refused by name. Weights and optimizer states are gathered to full tensors,
so that a run saved by several processes can be resumed by one, and the other way round.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import torch
from msgspec import convert
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from everyformer.data.files import checksum, read_json
from everyformer.network.store import read_tensors
from everyformer.train.checksums import FILE, Checksums, damaged, flush, read_checksums, write_checksums
from everyformer.train.distributed import World
from everyformer.train.gradient_watch import GradientWatch
from everyformer.train.record import report_write_errors

VERSION = 2
TRAINING = ("optimizer.safetensors", "cache.safetensors", "data.safetensors")  # what only a resumed run needs
NOTHING = torch.empty(0, 0, 0, 0, 0, 0)  # a shape that no weight has
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Best(TypedDict):
    """The best evaluation so far; its metrics are other keys."""

    step: int


class State(TypedDict):
    """What state.json holds."""

    version: int
    step: int
    data: str
    splits: NotRequired[dict[str, str]]
    watch: GradientWatch
    scaler: dict[str, Any]
    best: Best | None
    unevaluated: NotRequired[bool]


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds."""

    network: nn.Module
    optimizers: list[torch.optim.Optimizer]
    ema: dict[str, Tensor] | None
    extra: dict[str, dict[str, Tensor]]  # other tensors, by the name of their file
    state: dict[str, Any]


def steps(folder: Path) -> list[int]:
    """Returns the steps of a run's checkpoints, oldest first."""
    parent = folder / "checkpoints"
    return sorted(int(path.name) for path in parent.iterdir() if path.name.isdigit()) if parent.is_dir() else []


def find_step(folder: Path, step: int | Literal["best"] | None) -> int:
    """Returns the step of the last checkpoint (None), of the best, or the given step. Raises ValueError if there is none."""
    saved = steps(folder)
    if not saved:
        raise ValueError(f"{folder} has no checkpoint yet; resume its training, or look at its records.jsonl")
    if step == "best":
        best = verify(folder, saved[-1], result=True).get("best")
        if best is None or best["step"] not in saved:
            raise ValueError(
                f"{folder} has no best checkpoint: none was evaluated yet; resume the run, or leave out the step for the last one"
            )
        return int(best["step"])
    if step is not None and step not in saved:
        kept = f"are at the steps {', '.join(map(str, saved))}" if len(saved) > 1 else f"is at step {saved[0]}"
        raise ValueError(
            f"{folder} has no checkpoint of step {step}; its checkpoint{'s' * (len(saved) > 1)} {kept} (run.keep sets how many are kept)"
        )
    return saved[-1] if step is None else step


def path_of(folder: Path, step: int) -> Path:
    """Returns the folder of a run's checkpoint."""
    return folder / "checkpoints" / f"{step:08d}"


def save(folder: Path, contents: Contents, world: World, keep: int) -> None:
    """Save a checkpoint, then remove the checkpoints before the last `keep`, except the best. All processes take part."""
    weights = full_state_dict(contents.network)
    # Empty except in the main process.
    optimizer_state: Any = {}  # as of weights that were imported
    if contents.optimizers:
        optimizer_state = get_optimizer_state_dict(contents.network, contents.optimizers, options=FULL)
    ema = None if contents.ema is None else {name: _full(x) for name, x in contents.ema.items()}
    if world.is_main:
        target = path_of(folder, contents.state["step"])
        part = target.with_name(f"part-{target.name}")
        try:
            with report_write_errors(folder):
                target.parent.mkdir(exist_ok=True)
                for leftover in target.parent.iterdir():  # of a killed process
                    if not leftover.name.isdigit():
                        shutil.rmtree(leftover)
                _write(part, contents, drop_aliases(contents.network, weights), optimizer_state, ema)
                if target.exists():
                    _remove(target)
                part.rename(target)
                flush(target.parent)
                _remove_old(folder, contents.state, keep)
        except ValueError:
            shutil.rmtree(part, ignore_errors=True)
            raise
    world.barrier()


def _write(
    part: Path, contents: Contents, weights: dict[str, Tensor], optimizer_state: Any, ema: dict[str, Tensor] | None
) -> None:
    part.mkdir()
    moments = {
        f"{name}/{moment}": x
        for name, moments in optimizer_state.get("state", {}).items()
        for moment, x in moments.items()
    }
    files = {"model": weights, "optimizer": moments, **({} if ema is None else {"ema": ema})}
    files |= {name: tensors for name, tensors in contents.extra.items() if tensors}
    for name, tensors in files.items():
        save_file({key: x.contiguous() for key, x in tensors.items()}, part / f"{name}.safetensors")
    state = {"version": VERSION, **contents.state}
    (part / "state.json").write_text(json.dumps(state, indent=1) + "\n")
    sums = {path.name: (checksum(path),) for path in part.iterdir()}
    run_sums = read_checksums(part.parent.parent)
    for name in run_sums:
        (part / name).parent.mkdir(exist_ok=True)
        with suppress(
            FileNotFoundError
        ):  # a run's file that was lost or changed since it began is noticed by its checksum
            shutil.copyfile(part.parent.parent / name, part / name)
    write_checksums(part, sums | run_sums)
    for path in (*part.rglob("*"), part):
        flush(path)


def _remove_old(folder: Path, state: dict[str, Any], keep: int) -> None:
    """Remove all but the last `keep` checkpoints up to this step, and the best.

    There are later ones if the run was resumed from an earlier checkpoint: this run replaces them.
    """
    best = state["best"]["step"] if state["best"] else None
    last = [step for step in steps(folder) if step <= state["step"]][-keep:]
    for step in steps(folder):
        if step not in last and step != best:
            _remove(path_of(folder, step))


def _remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that one that a kill leaves half removed is not a checkpoint."""
    renamed = path.with_name(f"gone-{path.name}")
    path.rename(renamed)
    shutil.rmtree(renamed)


def full_state_dict(network: nn.Module) -> dict[str, Any]:
    """Returns the full weights of a sharded network in the main process (all take part), of others in every process."""
    return get_model_state_dict(network, options=FULL)


def verify_run(folder: Path) -> Checksums:
    """Returns the checksums of the files that describe a run. Raises ValueError if one is missing or changed."""
    sums = read_checksums(folder)
    for name, problem in damaged(folder, sums):
        raise ValueError(f"{problem}; {_remedy(folder, name, sums[name], None)}")
    for name in ("recipe.json", "model.json"):
        if name not in sums:
            raise ValueError(f"{folder / FILE} was changed after it was written: it has no line for {name}; restore it")
    return sums


def verify(folder: Path, step: int, *, result: bool = False) -> dict[str, Any]:
    """Returns the state of a checkpoint. Raises ValueError if one of its files, or of the run's, is missing or changed.

    With `result`, the files that only a resumed run needs are not checked.
    """
    path, run_sums = path_of(folder, step), verify_run(folder)
    try:
        sums = read_checksums(path)
    except ValueError as error:
        raise ValueError(f"{error}; {_remedy(folder, FILE, (), step)}") from None
    for name in ("model.json", "model.safetensors", "state.json"):
        if name not in sums:
            raise ValueError(
                f"{path / FILE} was changed after it was written: it has no line for {name}; {_remedy(folder, FILE, (), step)}"
            )
    needed = {name: digests for name, digests in sums.items() if not (result and name in TRAINING)}
    for name, problem in damaged(path, needed):
        raise ValueError(f"{problem}; {_remedy(folder, name, sums[name], step)}")
    for name in sums.keys() & run_sums.keys() - {"recipe.json"}:  # settings of the run may change
        if sums[name] != run_sums[name]:
            raise ValueError(
                f"{folder / name} is not the one of its checkpoint {step}; restore it: cp {path / name} {folder / name}"
            )
    return _read_state(path)


def _read_state(path: Path) -> dict[str, Any]:
    """Returns the state of a checkpoint. Raises ValueError if it is not one that this program writes."""
    state: Any = read_json(path / "state.json")
    version = state.get("version") if isinstance(state, dict) else None
    if isinstance(version, int) and version != VERSION:
        raise ValueError(
            f"the checkpoint {path} has version {version}, but this program reads version {VERSION}; "
            "use the everyformer that wrote it"
        )
    try:
        read = convert(state, State)
    except ValueError as error:
        raise ValueError(f"{path / 'state.json'} cannot be read ({error}); restore the file that train wrote") from None
    if read["step"] != int(path.name):
        raise ValueError(f"{path / 'state.json'} is of step {read['step']}; restore the file that train wrote")
    return dict(state)


def load(
    folder: Path,
    step: int,
    network: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    ema: dict[str, Tensor] | None,
) -> dict[str, Any]:
    """Load a checkpoint into a network, its optimizers and its EMA. Returns the state."""
    state, path = verify(folder, step), path_of(folder, step)
    weights: dict[str, Any] = fitting(network, read_tensors(path / "model.safetensors"), path)
    # Not strict: of a shared weight torch saves the first name alone.
    set_model_state_dict(network, weights, options=replace(FULL, strict=False))
    moments: dict[str, Any] = {}
    parameters = dict(network.named_parameters(remove_duplicate=False))
    for key, x in read_tensors(path / "optimizer.safetensors").items():
        name, _, moment = key.rpartition("/")
        if name not in parameters or x.shape not in ((), parameters[name].shape):
            raise ValueError(
                f"{path / 'optimizer.safetensors'} does not fit {path / 'model.json'}: {key}; restore it from a copy"
            )
        moments.setdefault(name, {})[moment] = x
    names = {weight: name for name, weight in network.named_parameters()}
    groups = [  # as they are: their settings are those of the recipe, which may be new
        group | {"params": [names[weight] for weight in group["params"]]}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    optimizer_state: dict[str, Any] = {"state": moments, "param_groups": groups}
    if moments:
        try:
            set_optimizer_state_dict(network, optimizers, optim_state_dict=optimizer_state, options=FULL)
        except KeyError as error:
            raise ValueError(
                f"{path / 'optimizer.safetensors'} has no {error.args[0]}, as another optimizer writes it; restore it and recipe.json"
            ) from None
    if ema is not None:
        for name, saved in read_tensors(path / "ema.safetensors").items():
            _copy(ema[name], saved)
    return state


def load_result(path: Path) -> dict[str, Tensor]:
    """Returns the weights of the trained model: the EMA if the run has one, else the last weights; with all buffers."""
    ema = path / "ema.safetensors"
    return read_tensors(path / "model.safetensors") | (read_tensors(ema) if ema.is_file() else {})


def load_extra(folder: Path, step: int, name: str) -> dict[str, Tensor]:
    """Returns the further tensors of a name; empty if the checkpoint has none."""
    path = path_of(folder, step) / f"{name}.safetensors"
    return read_tensors(path) if path.is_file() else {}


def _remedy(folder: Path, name: str, digests: tuple[str, ...], step: int | None) -> str:
    """What to do about a damaged file of a checkpoint, or of the run itself: copy an intact one, or use another checkpoint."""
    saved = steps(folder)
    target = (folder if step is None else path_of(folder, step)) / name
    for copy in (folder / name, *(path_of(folder, one) / name for one in reversed(saved))):
        if copy.is_file() and checksum(copy) in digests:
            return f"restore it: cp {copy} {target}"
    earlier = [one for one in saved if step is not None and one < step]
    return (
        f"use an earlier checkpoint with --step {earlier[-1]}"
        if earlier
        else "restore it from a backup, or start again"
    )


def aliases(network: nn.Module) -> dict[str, str]:
    """Returns the other names of shared weights, each with the first name of its weight."""
    named = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    return {name: original for name, x in named if (original := first.setdefault(id(x), name)) != name}


def drop_aliases(network: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights without aliases of weights that are present under their first name."""
    others = aliases(network)
    return {name: x for name, x in weights.items() if others.get(name) not in weights}


def fitting(network: nn.Module, weights: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Returns the weights of a checkpoint without aliases. Raises ValueError if they are not those of the network."""
    weights, own = drop_aliases(network, weights), drop_aliases(network, network.state_dict())
    wrong = [
        name for name in weights.keys() | own.keys() if weights.get(name, NOTHING).shape != own.get(name, NOTHING).shape
    ]
    if wrong:
        raise ValueError(f"{path} does not fit its model.json: {', '.join(sorted(wrong))}; restore it from a copy")
    return weights


def _full(x: Tensor) -> Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().cpu()


def _copy(x: Tensor, saved: Tensor) -> None:
    if hasattr(x, "full_tensor"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(x, DTensor)
        x.copy_(distribute_tensor(saved.to(x.device), x.device_mesh, x.placements))
    else:
        x.copy_(saved)
