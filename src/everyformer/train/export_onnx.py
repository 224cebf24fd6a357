"""Trained models as ONNX graphs: model.onnx, and for generation decoder.onnx, with the cache as inputs and outputs.

The graph of torch.export is translated operation by operation. onnxruntime then runs the file and has to return what the network
returns.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from everyformer.infer.decoder_graph import CachedCall, no_decoder_reason
from everyformer.infer.signature import Signature, call
from everyformer.infer.traced import BATCH, LENGTH, OTHER_SIZES, compare, record, trace, without_training_parts
from everyformer.network.network import Network, PairNetwork
from everyformer.train.export_files import described, text_files, write_files
from everyformer.train.export_torch import reason as reason
from everyformer.train.trained import TrainedRun

EARLIER = 5  # cached positions of the recorded call
TRANSLATOR = "torch.onnx._internal.exporter._registration"  # the logger that warns of packages that no model here needs


def export(trained: TrainedRun, folder: Path) -> tuple[str, ...]:
    """Write the files of a model into an empty folder. Returns notes for the user."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError(f"ONNX needs {error.name}; install it with pip install 'everyformer[export]'") from None
    network = trained.network.eval()
    value, signature = network.value, Signature.of(network.value)
    given = signature.example(BATCH, LENGTH)
    others = [signature.example(*size, seed=1) for size in OTHER_SIZES]
    write(trace(network, signature), signature, folder / "model.onnx", lambda one: call(network, one), others)
    with torch.no_grad():
        config = {"format": f"ONNX, onnxruntime {onnxruntime.__version__}"}
        config |= described(signature, value, given, call(network, given))
    if no_decoder_reason(value) is None:
        config |= write_decoder(network, folder)
    reads_text = bool(text_files(trained))
    return write_files(folder, trained, config, _usage(signature, config, reads_text))


def write_decoder(network: Network | PairNetwork, folder: Path) -> dict[str, Any]:
    """Write decoder.onnx, and encoder.onnx of an encoder-decoder. Returns their inputs and outputs."""
    config: dict[str, Any] = {}
    with torch.no_grad():
        calls = CachedCall(without_training_parts(network))
        signature, given = calls.signature(), calls.example(BATCH, LENGTH, EARLIER)
        others = [calls.example(*size, earlier=9 - size[0]) for size in OTHER_SIZES]
        program = record(calls.network, calls.decode, signature, given, others)
        write(program, signature, folder / "decoder.onnx", calls.decode, others)
        config["decoder"] = described(signature, network.value, given, calls.decode(given))
        config["decoder"]["start"] = {
            name: {"shape": list(x.shape), "fill": int(x.min()) if x.numel() else 0, "dtype": _name(x)}
            for name, x in calls.start().items()
        }
        if isinstance(network, PairNetwork):
            signature = calls.encoder_signature()
            given, *others = (signature.example(*size, seed=1) for size in ((BATCH, LENGTH), *OTHER_SIZES))
            program = record(calls.network, calls.encode, signature, given, others)
            write(program, signature, folder / "encoder.onnx", calls.encode, others)
            config["encoder"] = described(signature, network.value, given, calls.encode(given))
    return config


def write(
    program: ExportedProgram,
    signature: Signature,
    path: Path,
    compute: Callable[[dict[str, Tensor]], tuple[Tensor, ...]],
    others: list[dict[str, Tensor]],
) -> None:
    """Write a graph as a file. Raises ValueError if onnxruntime does not compute from it what the function computes."""
    import onnxruntime

    names = {
        one.name: {i: axis for i, axis in enumerate(one.axes) if isinstance(axis, str)} for one in signature.inputs
    }
    logger = logging.getLogger(TRANSLATOR)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch's own code
            onnx_program: Any = torch.onnx.export(
                program, (), dynamo=True, verbose=False, output_names=list(signature.outputs), dynamic_shapes=names,
                custom_translation_table={torch.ops.aten.remainder.Scalar: _remainder},
            )  # fmt: skip
            onnx_program.save(path)
    except torch.onnx.OnnxExporterError as error:
        cause = " ".join(str(error.__cause__ or error).split())[:300]
        raise ValueError(f"torch.onnx cannot translate this model: {cause}; use --to torch") from error
    finally:
        logger.setLevel(level)
    try:
        session = onnxruntime.InferenceSession(path)
        read = {one.name for one in session.get_inputs()}
        found = [session.run(None, {name: given[name].numpy() for name in given if name in read}) for given in others]
    except Exception as error:  # its exceptions have no class of their own in common
        cause = " ".join(str(error).split())[:300]
        raise ValueError(f"onnxruntime cannot run this model: {cause}; use --to torch") from error
    for given, arrays in zip(others, found, strict=True):
        with torch.no_grad():
            compare(compute(given), tuple(map(torch.from_numpy, arrays)))


def _remainder(x: Any, divisor: Any) -> Any:
    """x mod divisor as ONNX: torch's own translation refuses a divisor that is an open size."""
    from onnxscript import opset18

    return opset18.Mod(x, opset18.CastLike(divisor, x))


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _usage(signature: Signature, config: dict[str, Any], reads_text: bool) -> str:
    sizes = {axis: min(8, signature.limits.get(axis, 8)) for axis in signature.open_axes} | {"batch": 2}
    lines = ["import numpy as np", "import onnxruntime", "", 'model = onnxruntime.InferenceSession("model.onnx")']
    for one in signature.inputs:
        shape = ", ".join(str(sizes[axis] if isinstance(axis, str) else axis) for axis in one.axes)
        fill, dtype = "ones" if one.dtype == torch.bool else "zeros", str(one.dtype).removeprefix("torch.")
        lines.append(f'{one.name} = np.{fill}(({shape}), "{dtype}")  # {one.meaning}')
    arguments = ", ".join(f'"{one.name}": {one.name}' for one in signature.inputs)
    lines.append(f"[{', '.join(signature.outputs)}] = model.run(None, {{{arguments}}})")
    text = ["ONNX graphs, which onnxruntime runs.", "", *_block(lines)]
    if "encoder" in config:
        text += [
            "",
            "To generate, run `encoder.onnx` once; its outputs are inputs of `decoder.onnx`:",
            "",
            *_block(PAIR),
        ]
    elif "decoder" in config and reads_text:
        introduction = "To generate, `decoder.onnx` takes what it returned before, so that it reads each token once:"
        text += ["", introduction, "", *_block(LOOP)]
    if "decoder" in config:
        text += [
            "",
            "`decoder` in config.json has the inputs and outputs of decoder.onnx, and `start`, the first `past` of a sequence.",
        ]
        if limit := config["decoder"]["limits"].get("past"):
            text += [f"`past` and `length` together are at most {limit}."]
    return "\n".join(text)


LOOP = """import json
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

config = json.loads(Path("config.json").read_text("utf-8"))
tokenizer = Tokenizer.from_file("tokenizer.json")
decoder = onnxruntime.InferenceSession("decoder.onnx")
past = {name: np.full(x["shape"], x["fill"], x["dtype"]) for name, x in config["decoder"]["start"].items()}
tokens = config["start"] + tokenizer.encode("Once").ids
text = tokens
for _ in range(20):
    logits, *present = decoder.run(None, {"tokens": np.array([tokens])} | past)
    past = dict(zip(past, present))
    tokens = [int(logits[0, -1].argmax())]
    text = text + tokens
print(tokenizer.decode(text))""".splitlines()
PAIR = """import json
from pathlib import Path

config = json.loads(Path("config.json").read_text("utf-8"))
encoder = onnxruntime.InferenceSession("encoder.onnx")
decoder = onnxruntime.InferenceSession("decoder.onnx")
source = {"source_tokens": source_tokens[:1], "source_visible": source_visible[:1]}
cross = dict(zip(config["encoder"]["outputs"], encoder.run(None, source)))
cross["source_visible"] = source["source_visible"]
past = {name: np.full(x["shape"], x["fill"], x["dtype"]) for name, x in config["decoder"]["start"].items()}
tokens = [config.get("target_start", 0)]
text = tokens
for _ in range(20):
    logits, *present = decoder.run(None, {"tokens": np.array([tokens])} | cross | past)
    past = dict(zip(past, present))
    tokens = [int(logits[0, -1].argmax())]
    text = text + tokens
print(text)""".splitlines()


def _block(lines: list[str]) -> list[str]:
    return ["```python", *lines, "```"]
