"""Saving and loading a network: a folder with model.json (the value) and model.safetensors (the weights). Pickle is not used."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_model
from torch import Tensor

from everyformer.network import convolution, feedforward, lstm, ponder_rnn  # noqa: F401  JSON finds sublayers by tag
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.value import from_json, to_json


def save(network: Network | PairNetwork, folder: str | Path) -> Path:
    """Writes a `network` into a `folder`, which is created if needed. Returns the folder. Example: `save(network, "my_model")`."""
    network = getattr(network, "_orig_mod", network)  # the module inside torch.compile's wrapper
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.json").write_text(to_json(network.value) + "\n")
    save_model(network, str(folder / "model.safetensors"))
    return folder


def model_from_json(text: bytes) -> Model | EncoderDecoder:
    """Returns the Model or EncoderDecoder that `to_json` wrote."""
    kind: type[Model] | type[EncoderDecoder] = EncoderDecoder if b'"encoder_decoder"' in text else Model
    return from_json(text, kind)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file. Raises ValueError if it cannot be read."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}); restore it from a copy") from None


def load_network(folder: str | Path) -> Network | PairNetwork:
    """Returns the network that `save` wrote, in evaluation mode. Raises ValueError if the folder is not one of `save`."""
    folder = Path(folder)
    for name in ("model.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: give a folder that everyformer.save wrote")
    network = model_from_json((folder / "model.json").read_bytes()).build()
    try:
        # load_model copies into the existing weights, so these get the saved dtypes first.
        weights = dict(network.named_parameters(remove_duplicate=False)) | dict(network.named_buffers())
        for name, weight in load_file(folder / "model.safetensors").items():
            if name in weights:
                weights[name].data = weights[name].data.to(weight.dtype)
        load_model(network, str(folder / "model.safetensors"))
    except Exception as error:
        raise ValueError(f"{folder / 'model.safetensors'} does not fit {folder / 'model.json'}: {error}") from error
    return network.eval()
