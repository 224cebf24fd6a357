"""What stands beside an exported graph: config.json, the tokenizer, and a README that says how to call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from everyformer.data.tokenizer import SPECIAL
from everyformer.infer.generate_images import ImageSequence
from everyformer.infer.signature import Signature, meanings, output_axes, outputs_of
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import PairNetwork
from everyformer.task.classify_images import LabelledImageData
from everyformer.task.target import NumberTarget
from everyformer.train.export_hf import BYTE, class_names, tokenizer_files, tokenizer_of
from everyformer.train.trained import TrainedRun


def described(
    signature: Signature, value: Model | EncoderDecoder, given: dict[str, Tensor], outputs: tuple[Tensor, ...]
) -> dict[str, Any]:
    """Returns the inputs and outputs of a graph, from one call of it."""
    axes = output_axes(signature, given, outputs)
    words = dict(zip(outputs_of(value), meanings(value), strict=True))
    return {
        "inputs": {
            one.name: {"dtype": str(one.dtype).removeprefix("torch."), "shape": list(one.axes), "meaning": one.meaning}
            for one in signature.inputs
        },
        "outputs": {
            name: {
                "dtype": str(x.dtype).removeprefix("torch."),
                "shape": axes[name],
                "meaning": words.get(name, "an input of the next call"),
            }
            for name, x in zip(signature.outputs, outputs, strict=True)
        },
        "limits": signature.open_limits,
    }


def text_files(trained: TrainedRun) -> dict[str, Any]:
    """Returns the files of the tokenizer; none if the model reads no text."""
    tokenizer = tokenizer_of(trained)
    return {} if tokenizer is None else tokenizer_files(tokenizer, trained.network.value)


def write_files(folder: Path, trained: TrainedRun, config: dict[str, Any], usage: str) -> tuple[str, ...]:
    """Write config.json, tokenizer.json and README.md. Returns notes for the user."""
    tokenizer, files = tokenizer_of(trained), text_files(trained)
    notes: tuple[str, ...] = ()
    if tokenizer is not None:
        notes = () if files else ("the data are token ids, so there is no tokenizer",)
        special = {name: tokenizer.special_id(name) for name in SPECIAL}
        config["vocabulary"] = tokenizer.vocabulary
        config["special_tokens"] = {name: id_ for name, id_ in special.items() if id_ is not None}
        config["start"] = list(tokenizer.start)
        if isinstance(trained.network, PairNetwork):
            marks = getattr(trained.task.data, "marks", None)  # of a task with marks of its own
            ends = (tokenizer.special_id("[CLS]"), tokenizer.special_id("[SEP]"))
            config["target_start"], config["target_end"] = (marks.start, marks.end) if marks else ends
    config |= class_names(trained) | _scaling(trained)
    files["config.json"] = config
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, "utf-8")
    (folder / "README.md").write_text(_readme(config, usage, "tokenizer.json" in files), "utf-8")
    return notes


def _scaling(trained: TrainedRun) -> dict[str, Any]:
    """How numbers and pixels of the data become those of the model."""
    data = trained.task.data
    target = getattr(data, "target", None)
    found: dict[str, Any] = {}
    if isinstance(target, NumberTarget):
        found |= {"mean": target.mean, "std": target.std}
    layout = getattr(data, "layout", None)
    if isinstance(layout, ImageSequence):  # a token is a value plus `levels` times its channel
        found |= {"levels": layout.levels, "channels": layout.channels}
        found |= {} if layout.joint else {"start": [layout.levels * layout.channels]}
    if isinstance(data, LabelledImageData):
        mean, std = (x.flatten().div(BYTE).tolist() for x in (data.mean_C11, data.std_C11))
        found |= {"image_mean": mean, "image_std": std}
    return found


def _readme(config: dict[str, Any], usage: str, has_tokenizer: bool) -> str:
    lines = ["# An exported model", "", usage, ""]
    for title in ("inputs", "outputs"):
        lines += [f"| {title[:-1]} | type | shape | content |", "| --- | --- | --- | --- |"]
        for name, one in config[title].items():
            shape = ", ".join(map(str, one["shape"]))
            lines.append(f"| `{name}` | {one['dtype']} | {shape} | {one['meaning']} |")
        lines.append("")
    limits = [f"{axis} is at most {limit}" for axis, limit in config["limits"].items()]
    lines.append(" ".join(["Sizes with a name may have any value.", *(f"{one.capitalize()}." for one in limits)]))
    if has_tokenizer:
        lines += ["", '`tokenizers.Tokenizer.from_file("tokenizer.json")` encodes and decodes text.']
    if "levels" in config and "start" in config:
        tokens = "a value of a pixel plus `levels` times its channel; before the first comes `start`"
        lines += ["", f"A token is {tokens}, with the numbers of config.json."]
    elif config.get("start"):
        lines += ["", f"A text begins with the token ids {config['start']}, which the tokenizer does not add."]
    if "image_mean" in config:
        lines += [
            "",
            "Pixels are (value / 255 - image_mean) / image_std, with the numbers of config.json for each channel.",
        ]
    if "id2label" in config:
        lines += ["", "The names of the classes are `id2label` in config.json."]
    return "\n".join(lines) + "\n"
