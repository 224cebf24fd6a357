"""The files of a folder of transformers: config.json, and weights in one or several files of safetensors or of torch.

Weights that torch has pickled are read with its weights-only loader, which runs no code.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everyformer.network.store import read_tensors
from everyformer.value import decode_json

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first that is there is read


def read_object(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file, an object. Raises ValueError if it is none."""
    try:
        content = decode_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); restore it") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object with fields; restore it")
    return content


def optional_object(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file, empty if there is no such file."""
    return read_object(path) if path.is_file() else {}


def optional_list(path: Path) -> list[Any]:
    """Returns the content of a JSON file that holds a list, empty if there is no such file."""
    if not path.is_file():
        return []
    try:
        content = decode_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); restore it") from None
    if not isinstance(content, list):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a list; restore it")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; give one that save_pretrained of transformers wrote")
    if not (folder / "config.json").is_file():
        if any((folder / name).is_file() for name in ("recipe.json", "model.json")):
            raise ValueError(
                f"{folder} is a model of everyformer already; use it as it is, such as in everyformer generate {folder}"
            )
        raise ValueError(f"{folder} has no config.json; give a folder that save_pretrained wrote")
    return read_object(folder / "config.json")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Returns the weights of model.safetensors or pytorch_model.bin, or of the files that an index of theirs names."""
    for name in WEIGHTS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return read_file(folder / name)
        if index.is_file():
            return _read_shards(folder, index)
    raise ValueError(f"{folder} has neither {WEIGHTS[0]} nor {WEIGHTS[1]}; copy the weights of the model there")


def _read_shards(folder: Path, index: Path) -> dict[str, Tensor]:
    table = read_object(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()) or not table:
        raise ValueError(f"{index} has no weight_map of names to files; restore it")
    weights = dict[str, Tensor]()
    for file in sorted(set(table.values())):
        if Path(file).name != file or not (folder / file).is_file():
            raise ValueError(f"{index} names the file {file!r}, which is not in {folder}; copy it there")
        weights |= read_file(folder / file)
    if missing := sorted(table.keys() - weights.keys()):
        raise ValueError(f"{index} names the weight {missing[0]}, but its file does not have it; restore both")
    return weights


def read_file(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of one file. Raises ValueError if it is damaged, or a pickle that holds more than tensors."""
    weights: Any = read_tensors(path) if path.suffix == ".safetensors" else _unpickle(path)
    if not isinstance(weights, Mapping) or not all(isinstance(x, Tensor) for x in weights.values()):
        raise ValueError(f"{path} holds something else than tensors by name; give the state dict of a model")
    for name, x in weights.items():
        if not x.is_floating_point() and x.dtype in (torch.uint8, torch.int8) and x.numel() > 1:
            raise ValueError(
                f"{name} in {path} is {x.dtype}: quantized weights cannot be read; give those in floating point"
            )
    return {str(name): x for name, x in weights.items()}


def _unpickle(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles that torch did not write
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "Unsupported" in str(error) or "weights_only" in str(error) or "WeightsUnpickler" in str(error):
            reason = "it is a pickle that holds code or other objects, which is not run"
        else:
            reason = "it is not a file of torch.save"
        raise ValueError(f"{path} is refused: {reason}; give the weights as model.safetensors") from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, ImportError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({str(error).splitlines()[0][:200]}); get it again") from None
