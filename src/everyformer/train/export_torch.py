"""Trained models as graphs of `torch.export`: model.pt2, which torch opens without everyformer, and what is needed beside it."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from everyformer.infer.signature import Signature, call
from everyformer.infer.traced import BATCH, LENGTH, trace
from everyformer.network.network import Network, PairNetwork
from everyformer.train.export_files import described, write_files
from everyformer.train.trained import TrainedRun


def reason(network: Network | PairNetwork) -> str | None:
    """Returns why a network cannot be exported, or None if it can."""
    try:
        Signature.of(network.value)
    except ValueError as error:
        return str(error)
    return None


def export(trained: TrainedRun, folder: Path) -> tuple[str, ...]:
    """Write the files of a model into an empty folder. Returns notes for the user."""
    network = trained.network.eval()
    signature = Signature.of(network.value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's own code
        torch.export.save(trace(network, signature), folder / "model.pt2")
    given = signature.example(BATCH, LENGTH)
    with torch.no_grad():
        outputs = call(network, given)
    config = {"format": f"torch.export of torch {torch.__version__}"} | described(
        signature, network.value, given, outputs
    )
    return write_files(folder, trained, config, _usage(signature))


def _usage(signature: Signature) -> str:
    sizes = {axis: min(8, signature.limits.get(axis, 8)) for axis in signature.open_axes} | {"batch": 2}
    lines = ["import torch", "", 'model = torch.export.load("model.pt2").module()']
    for one in signature.inputs:
        shape = ", ".join(str(sizes[axis] if isinstance(axis, str) else axis) for axis in one.axes)
        fill = "ones" if one.dtype == torch.bool else "zeros"
        lines.append(f"{one.name} = torch.{fill}({shape}, dtype={one.dtype})  # {one.meaning}")
    arguments = ", ".join(f"{one.name}={one.name}" for one in signature.inputs)
    lines += ["with torch.no_grad():", f"    {', '.join(signature.outputs)} = model({arguments})"]
    code = "\n".join(lines)
    return f"A graph of `torch.export`. PyTorch opens it; nothing else is needed.\n\n```python\n{code}\n```"
