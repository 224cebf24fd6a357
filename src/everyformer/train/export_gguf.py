"""Trained models as one file of llama.cpp: the metadata of its architecture, the tokenizer, and the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from everyformer.data.gguf_tokenizer import gguf_tokenizer
from everyformer.data.tokenizer import TokenIds, Tokenizer
from everyformer.family.names import Config
from everyformer.family.to_gguf import NoArchitecture, architecture, to_gguf
from everyformer.family.to_transformers import NotTheirs, to_transformers
from everyformer.network.network import Network, PairNetwork
from everyformer.train.export_hf import tokenizer_of
from everyformer.train.trained import TrainedRun

FILE_TYPES = {"fp32": 0, "fp16": 1, "bf16": 32}  # llama.cpp's numbers


def reason(network: Network | PairNetwork) -> str | None:
    """Returns why a network cannot be exported, or None if it can."""
    try:
        architecture(to_transformers(network)[0])
    except (NotTheirs, NoArchitecture) as error:
        return str(error)
    return None


def export(trained: TrainedRun, folder: Path, precision: Literal["fp32", "fp16", "bf16"] = "fp32") -> tuple[str, ...]:
    """Write model.gguf into an empty folder. Returns notes for the user."""
    try:
        import gguf
    except ImportError:
        raise ValueError("gguf files need the package gguf; install everyformer[export]") from None
    config, weights = to_transformers(trained.network, trained.published)
    name, header, tensors = to_gguf(config, weights)
    tokenizer = tokenizer_of(trained)
    assert tokenizer is not None
    header |= {"general.file_type": FILE_TYPES[precision]}
    header |= gguf_tokenizer(tokenizer, header[f"{name}.vocab_size"])
    writer = gguf.GGUFWriter(folder / "model.gguf", name)
    for key, value in header.items():
        _add(writer, key, value)
    for key, x in tensors.items():
        array, kind = _array(key, x, precision)
        writer.add_tensor(key, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tuple(_notes(config, tokenizer))


def _notes(config: Config, tokenizer: Tokenizer) -> Iterator[str]:
    if isinstance(tokenizer, TokenIds):
        yield "the data are token ids, so there is no tokenizer"
    window = config.get("sliding_window")
    if config["model_type"] == "mistral" and window is not None:
        yield f"llama.cpp has no window in this architecture, so the context of the file is the window, {window} tokens"


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a value with the type that llama.cpp expects."""
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)


def _array(name: str, x: Tensor, precision: str) -> tuple[Any, Any]:
    """A tensor and its type. llama.cpp adds vectors and positions in float32."""
    from gguf import GGMLQuantizationType as Kind

    x = x.detach().cpu().contiguous()
    if precision == "fp32" or x.ndim == 1 or name == "position_embd.weight":
        return x.numpy(), Kind.F32
    if precision == "fp16":
        return x.half().numpy(), Kind.F16
    return x.bfloat16().view(torch.int16).numpy().view(np.uint16), Kind.BF16
