"""Initializing a network from a pretrained model: all weights but those of the output heads."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from everyformer.network.network import Network, PairNetwork
from everyformer.train import checkpoint
from everyformer.train.folder import read_model


def load_weights(network: Network | PairNetwork, folder: str | Path) -> list[str]:
    """Copy the weights of a saved model, except those of its output heads, into a network. Returns their names.

    `folder` is a run's (its last checkpoint; the EMA if it has one) or was written by everyformer.save. Raises ValueError, and
    copies nothing, if the weights do not fit.
    """
    path = saved_folder(Path(folder))
    with torch.device("meta"):
        source = read_model(path).build()
    weights = checkpoint.drop_aliases(network, checkpoint.load_result(path))
    source_body, body = body_state(source), body_state(network)
    weights = {name: weight for name, weight in weights.items() if name in source_body}
    # A shared weight is saved under one of its names.
    covered = {weight.data_ptr() for name, weight in body.items() if name in weights}
    wrong = [f"{name} is not in it" for name, weight in body.items() if weight.data_ptr() not in covered]
    wrong += [f"{name} is not in the model" for name in weights if name not in body]
    wrong += [
        f"{name} is {tuple(weights[name].shape)}, not {tuple(body[name].shape)}"
        for name in body
        if name in weights and weights[name].shape != body[name].shape
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(
            f"the weights of {folder} do not fit the model: {', '.join(wrong[:5])}{more}; give the new model the member, width, "
            "layers, context and tokenizer of the old one"
        )
    with torch.no_grad():
        for name, weight in weights.items():
            body[name].copy_(weight)
    return sorted(weights)


def body_state(network: nn.Module) -> dict[str, Tensor]:
    """Returns the state dict without the weights that only the output heads, auxiliary predictions and a generator have."""
    networks = [module for module in network.modules() if isinstance(module, Network)]
    heads = [part for one in networks for part in (one.outputs, one.auxiliary) if part is not None]
    excluded = {id(x) for head in heads for x in head.state_dict(keep_vars=True).values()}
    state = {name: x for name, x in network.state_dict(keep_vars=True).items() if id(x) not in excluded}
    return {name: x for name, x in state.items() if not name.startswith("generator.")}


def saved_folder(folder: Path) -> Path:
    """Returns the folder with the weights: a run's last checkpoint, or the folder itself. Raises ValueError if there are none."""
    saved = checkpoint.steps(folder)
    if saved:
        checkpoint.verify(folder, saved[-1], result=True)
    path = checkpoint.path_of(folder, saved[-1]) if saved else folder
    if not (path / "model.safetensors").is_file():
        raise ValueError(f"{folder} has no weights to load; give a run's folder, or one that everyformer.save wrote")
    return path
