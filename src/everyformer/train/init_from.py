"""Beginning from a pretrained model: its body in a network with heads of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from everyformer.network.network import Network, PairNetwork
from everyformer.train import checkpoint

HEADS = tuple(f"{side}{part}." for side in ("", "encoder.", "decoder.") for part in ("outputs", "auxiliary"))


def load_weights(network: Network | PairNetwork, folder: str | Path) -> list[str]:
    """Copy the weights of a saved model into a network, all but those of its heads, which stay as they are.

    `folder` is a run's (its last checkpoint, averaged if it keeps an average) or one that everyformer.save wrote. The names
    of the weights taken come back. What does not fit is named and nothing is taken.
    """
    saved = checkpoint.once(network, weights(Path(folder)))
    saved = {name: weight for name, weight in saved.items() if not name.startswith(HEADS)}
    mine = {name: weight for name, weight in network.state_dict().items() if not name.startswith(HEADS)}
    # A shared weight is saved under one of its names.
    there = {weight.data_ptr() for name, weight in mine.items() if name in saved}
    wrong = [f"{name} is not in it" for name, weight in mine.items() if weight.data_ptr() not in there]
    wrong += [f"{name} is left over" for name in saved if name not in mine]
    wrong += [
        f"{name} is {tuple(saved[name].shape)}, not {tuple(mine[name].shape)}"
        for name in mine
        if name in saved and saved[name].shape != mine[name].shape
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(
            f"the body of {folder} does not fit the model: {', '.join(wrong[:5])}{more}; give the new model the member, width, "
            "layers, context and tokenizer of the old one"
        )
    with torch.no_grad():
        for name, weight in saved.items():
            mine[name].copy_(weight)
    return sorted(saved)


def weights(folder: Path) -> dict[str, Tensor]:
    """The weights that a run or everyformer.save left in a folder."""
    found = checkpoint.steps(folder)
    if found:
        checkpoint.check(folder, found[-1], result=True)
        place = checkpoint.place(folder, found[-1])
    else:
        place = folder
    if not (place / "model.safetensors").is_file():
        raise ValueError(
            f"{folder} has no weights to begin from; give a run's folder, or one that everyformer.save wrote"
        )
    try:
        return checkpoint.result(place)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{place / 'model.safetensors'} cannot be read ({error}); restore it from a copy") from None
