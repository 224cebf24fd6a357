"""Records a network as a graph of `torch.export`, in which the sizes of the batch and of the sequences stay open.

While it records, no Python cache is keyed by a length, nothing depends on data, attention is dense and a recurrence is one loop of
the graph: `is_exporting()` is asked where that matters. The recorded graph is compared with the network at other sizes.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from inspect import Parameter

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from everyformer.infer.signature import Signature, call
from everyformer.network.network import Network, PairNetwork

BATCH, LENGTH = 3, 7  # of the recorded call
OTHER_SIZES = ((1, 3), (2, 12))  # at which the graph is compared with the network
Outputs = Tensor | tuple[Tensor, ...]
TOLERANCE = 1e-4  # of the largest output


class Named(nn.Module):
    """A module whose `forward` has parameters with these names, for a function of a dictionary of tensors.

    torch.export reads the names from the signature; it cannot take them from `**given`.
    """

    def __init__(
        self, network: nn.Module, compute: Callable[[dict[str, Tensor]], tuple[Tensor, ...]], names: Sequence[str]
    ):
        super().__init__()
        self.network = network  # whose weights `compute` reads

        def forward(*args: Tensor, **given: Tensor) -> Outputs:
            outputs = compute(dict(zip(names, args, strict=False)) | given)
            return outputs if len(outputs) > 1 else outputs[0]

        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward


def trace(network: Network | PairNetwork, signature: Signature) -> ExportedProgram:
    """Returns the graph of one pass of the network. Raises ValueError if it does not compute what the network computes."""
    bare = without_training_parts(network)
    others = [signature.example(*size, seed=1) for size in OTHER_SIZES]
    return record(bare, lambda given: call(bare, given), signature, signature.example(BATCH, LENGTH), others)


def record(
    network: nn.Module,
    compute: Callable[[dict[str, Tensor]], tuple[Tensor, ...]],
    signature: Signature,
    given: dict[str, Tensor],
    others: Sequence[dict[str, Tensor]],
) -> ExportedProgram:
    """Returns the graph of a function of named tensors, in which the named axes are open, from one call of it.

    The graph is compared with the function at the `others`.
    """
    given = {one.name: given[one.name] for one in signature.inputs}  # in the order of the names
    sizes = {
        axis: size
        for one in signature.inputs
        for axis, size in zip(one.axes, given[one.name].shape, strict=True)
        if isinstance(axis, str) and size > 1
    }
    dims = {axis: Dim(axis, max=signature.limits.get(axis)) for axis in sizes}
    shapes = {one.name: {i: dims[axis] for i, axis in enumerate(one.axes) if axis in sizes} for one in signature.inputs}
    module = Named(network, compute, [one.name for one in signature.inputs]).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's own tracing
        try:
            program = export(module, (), given, dynamic_shapes=shapes, strict=False)
        except (RuntimeError, TypeError, AssertionError) as error:
            raise ValueError(
                f"torch.export cannot record this model: {_first_line(error)}; keep it as a run"
            ) from error
        graph = program.module()
        for other in others:
            compare(module(**other), graph(**other))
    return program


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def compare(expected: Outputs, found: Outputs) -> None:
    for x, y in zip(_tuple(expected), _tuple(found), strict=True):
        error, size = float((x - y).abs().max()), float(x.abs().max())
        if not error <= TOLERANCE * size:
            shape = ", ".join(map(str, x.shape))
            raise ValueError(
                f"the recorded graph differs from the network by {error:.2g} in an output of the shape {shape}: keep the model as a run"
            )


def without_training_parts(network: Network | PairNetwork) -> Network | PairNetwork:
    """The network with the same weights, without the parts that serve training alone."""
    copy = object.__new__(type(network))
    modules = dict(network._modules)
    for name in ("encoder", "decoder"):
        if isinstance(network, PairNetwork):
            modules[name] = without_training_parts(modules[name])  # type: ignore[arg-type]
    for name in ("generator", "auxiliary"):
        if modules.get(name) is not None:
            modules[name] = None
    copy.__dict__ = network.__dict__ | {"_modules": modules}
    return copy


def _tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
