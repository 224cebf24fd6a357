"""llama.cpp's conventions, read from a GGUF file alone: a literal forward pass in float64 that imports nothing from the library.

Tensors are row-major, outputs first. What a file leaves out has llama.cpp's default: no scaling of rotary positions, and an output that
is the embedding table.
"""

from __future__ import annotations

import math

import gguf
import numpy as np
import torch
from torch.nn import functional as F

NEIGHBOURS = {
    "llama"
}  # architectures in which rotary turns dimensions 2 i and 2 i + 1; the others turn i and i + E / 2
GEMMA = {"gemma2", "gemma3"}


class File:
    """The header and the tensors of a GGUF file."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self.name = self.fields["general.architecture"]
        self.types = {one.name: one.tensor_type.name for one in reader.tensors}
        self.tensors = {one.name: self.read(one) for one in reader.tensors}

    @staticmethod
    def read(tensor):
        if tensor.tensor_type.name == "BF16":  # the upper half of a float32
            half = tensor.data.view(np.uint16).astype(np.uint32) << 16
            return torch.from_numpy(half.view(np.float32).reshape(tuple(map(int, tensor.shape[::-1])))).double()
        return torch.from_numpy(tensor.data.astype(np.float64))

    def __getitem__(self, key):
        return self.fields[f"{self.name}.{key}"]

    def get(self, key, default=None):
        return self.fields.get(f"{self.name}.{key}", default)

    def linear(self, name, x):
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, name, x):
        weight = self.tensors[f"{name}.weight"]
        if self.name == "gpt2":
            bias, eps = self.tensors[f"{name}.bias"], self["attention.layer_norm_epsilon"]
            return (x - x.mean(-1, keepdim=True)) / (
                x.var(-1, unbiased=False, keepdim=True) + eps
            ).sqrt() * weight + bias
        return x / (x.square().mean(-1, keepdim=True) + self["attention.layer_norm_rms_epsilon"]).sqrt() * weight


def frequencies(file, width, sliding):
    """The angles per position, and the factor of rotated queries and keys."""
    base = file.get("rope.freq_base_swa", file["rope.freq_base"]) if sliding else file["rope.freq_base"]
    pair = torch.arange(width // 2, dtype=torch.float64)
    angle = base ** (-2 * pair / width)
    if "rope_freqs.weight" in file.tensors:
        angle = angle / file.tensors["rope_freqs.weight"]
    kind = "none" if sliding and file.name == "gemma3" else file.get("rope.scaling.type", "none")
    if kind == "none":
        return angle, 1.0
    factor = file["rope.scaling.factor"]
    if kind == "linear":
        return angle / factor, 1.0
    assert kind == "yarn"
    context = file["rope.scaling.original_context_length"]
    low, high = (width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (32.0, 1.0))
    low, high = max(0, math.floor(low)), min(width - 1, math.ceil(high))
    own = 1 - ((pair - low) / max(0.001, high - low)).clamp(0, 1)  # 1: not scaled
    scale = (1 + 0.1 * math.log(factor)) * file.get("rope.scaling.attn_factor", 1.0)
    return angle / factor * (1 - own) + angle * own, scale


def rotate(file, x_HTE, sliding):
    angle, scale = frequencies(file, x_HTE.shape[-1], sliding)
    angle_TE = torch.arange(x_HTE.shape[1], dtype=torch.float64)[:, None] * angle
    sin, cos = angle_TE.sin() * scale, angle_TE.cos() * scale
    if file.name in NEIGHBOURS:
        a, b = x_HTE[..., 0::2], x_HTE[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    a, b = x_HTE.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def is_sliding(file, layer):
    if file.name not in GEMMA:
        return False
    period = file.get("attention.sliding_window_pattern", {"gemma2": 2, "gemma3": 6}[file.name])
    return layer % period < period - 1


def attention(file, layer, x_TD):
    heads = file["attention.head_count"]
    key_heads = file.get("attention.head_count_kv", heads)
    block, sliding = f"blk.{layer}.", is_sliding(file, layer)
    if file.name == "gpt2":
        q, k, v = file.linear(block + "attn_qkv", x_TD).chunk(3, -1)
    else:
        q, k, v = (file.linear(block + f"attn_{one}", x_TD) for one in "qkv")
    q, k, v = (x.unflatten(-1, (n, -1)).transpose(0, 1) for x, n in ((q, heads), (k, key_heads), (v, key_heads)))
    if block + "attn_q_norm.weight" in file.tensors:
        q, k = file.norm(block + "attn_q_norm", q), file.norm(block + "attn_k_norm", k)
    if file.name != "gpt2":
        q, k = rotate(file, q, sliding), rotate(file, k, sliding)
    width = q.shape[-1]
    if (file.name, file["block_count"]) in (("gemma2", 46), ("gemma3", 62)):
        width = file["embedding_length"] // heads
    k, v = (x.repeat_interleave(heads // key_heads, 0) for x in (k, v))
    score_HTT = q @ k.mT / math.sqrt(width)
    if file.name == "gemma2":
        cap = file["attn_logit_softcapping"]
        score_HTT = cap * (score_HTT / cap).tanh()
    distance = torch.arange(len(x_TD))[:, None] - torch.arange(len(x_TD))
    hidden = (distance < 0) | (distance >= file["attention.sliding_window"]) if sliding else distance < 0
    weight_HTT = score_HTT.masked_fill(hidden, -torch.inf).softmax(-1)
    return file.linear(block + "attn_output", (weight_HTT @ v).transpose(0, 1).flatten(1))


def net(file, layer, x):
    block = f"blk.{layer}."
    if file.name == "gpt2":
        return file.linear(block + "ffn_down", F.gelu(file.linear(block + "ffn_up", x), approximate="tanh"))
    gate = file.linear(block + "ffn_gate", x)
    gate = F.gelu(gate, approximate="tanh") if file.name in GEMMA else F.silu(gate)
    return file.linear(block + "ffn_down", gate * file.linear(block + "ffn_up", x))


def logits(file, tokens):
    """Returns the logits of a text of at most the file's context: T, V."""
    assert len(tokens) <= file["context_length"]
    table = file.tensors["token_embd.weight"]
    x = table[torch.tensor(tokens)]
    if file.name == "gpt2":
        x = x + file.tensors["position_embd.weight"][: len(tokens)]
    if file.name in GEMMA:
        x = x * math.sqrt(file["embedding_length"])
    for layer in range(file["block_count"]):
        block = f"blk.{layer}."
        y = attention(file, layer, file.norm(block + "attn_norm", x))
        x = x + (file.norm(block + "post_attention_norm", y) if file.name in GEMMA else y)
        y = net(file, layer, file.norm(block + "ffn_norm", x))
        x = x + (file.norm(block + "post_ffw_norm", y) if file.name in GEMMA else y)
    x = file.norm("output_norm", x) @ file.tensors.get("output.weight", table).T
    cap = file.get("final_logit_softcapping")
    return x if cap is None else cap * (x / cap).tanh()
