"""A decoding step in few Triton programs: about five a layer, where PyTorch launches 25.

    if fused_reason(network) is None: logits = fused_step(network, x_BTD, context, entries, tables)

A map has the norm before it, the activation after it and the addition to the stream in one program, and an attention has everything
between its two maps in another one (network/step_programs.py). Weights are read where they are. The stream is kept without its
last norm, so that in post-norm layers too the program of the next map computes it. Everything else is PyTorch's: embedding and
positions, the masks of the patterns, the sines of rotary positions, and output heads other than a language head.

Outputs equal those of the modules up to rounding: within a program nothing is rounded to the precision of the weights.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from everyformer.attention.context import Context
from everyformer.attention.norm import LayerNormModule, OffsetRMSNormModule, RMSNormModule
from everyformer.attention.pattern import Pattern
from everyformer.attention.projection import LinearProjectionModule
from everyformer.attention.score_mod import RotaryModule
from everyformer.attention.softmax import SoftCapModule
from everyformer.network.cache import Entry, KVCache
from everyformer.network.depth import StackModule
from everyformer.network.feedforward import FeedForwardModule
from everyformer.network.multi_head_attention import AttentionModule
from everyformer.network.output_head import LanguageModule
from everyformer.network.residual import PostNormModule, PreNormModule, ResidualModule
from everyformer.network.sandwich_norm import SandwichNormModule
from everyformer.network.step_launch import ACTIVATIONS, Input, Map, attend_one, linear
from everyformer.network.sublayer import SublayerModule

if TYPE_CHECKING:
    from everyformer.network.network import Network
    from everyformer.network.slots import Table

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NORMS = (LayerNormModule, RMSNormModule, OffsetRMSNormModule)
RESIDUALS = (PreNormModule, PostNormModule, SandwichNormModule)
SIDE_INPUTS = {"prefix", "visible"}  # that a step in slots has, of those that patterns read
WIDEST = 256  # features of a head
LARGE = 16384  # outputs from which on many rows are normed before their map, not in each of its programs


def fused_reason(network: Network) -> str | None:
    """Returns why the steps of a network cannot be fused, or None if they can."""
    weight = next(network.parameters())
    if weight.device.type != "cuda" or torch.version.hip is not None:
        return f"its programs are for NVIDIA's GPUs, and the model is on {weight.device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton, which comes with PyTorch for CUDA on Linux, is not installed"
    return unserved_reason(network)


def unserved_reason(network: Network) -> str | None:
    """Returns which part of a network has no program, or None if all have one."""
    if type(network.body) is not StackModule:
        return f"a body of {type(network.value.body).__name__} has no fused step"
    if network.reads - SIDE_INPUTS:
        return f"its layers read {' and '.join(sorted(network.reads - SIDE_INPUTS))}"
    weights = {weight.dtype for weight in network.body.parameters()}
    if len(weights) != 1 or not weights <= set(DTYPES):
        return f"the weights are {' and '.join(sorted(map(str, weights)))}, not bfloat16, float16 or float32 alone"
    for module in network.body.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{type(module).__name__} has a hook"
    reasons = (reason for layer in network.body.layer_modules() for reason in _layer_reasons(layer))
    return next(reasons, None)


def _layer_reasons(layer: Any) -> Iterator[str]:
    if layer.position is not None:
        yield "its layers add positions of their own"
    if layer.mix_2 is not None:
        yield "its layers have shortcuts"
    for sublayer, residual in _sublayers(layer):
        if type(residual) not in RESIDUALS:
            yield f"the residual {type(residual).__name__.removesuffix('Module')} has no program"
        norms = [getattr(residual, name, None) for name in ("norm", "after")]
        yield from (f"the norm {type(norm).__name__} has no program" for norm in norms if not _is_known(norm))
        if type(sublayer) is AttentionModule:
            yield from _attention_reasons(sublayer)
        elif type(sublayer) is FeedForwardModule:
            if len(sublayer.hidden) != 1:
                yield "a feed-forward net with two hidden layers has no program"
            yield from _map_reasons(sublayer.hidden[0], sublayer.out)
        else:
            yield f"{type(sublayer).__name__.removesuffix('Module')} has no program"


def _attention_reasons(module: AttentionModule) -> Iterator[str]:
    heads = module.heads
    if type(heads) is not LinearProjectionModule or not (heads.keys and heads.values) or heads.out is None:
        yield f"the projection {type(module.value.heads).__name__} has no program"
        return
    yield from _map_reasons(heads.qkv, heads.out)
    if max(heads.key_width, heads.value_width) > WIDEST:
        yield f"heads are wider than {WIDEST}"
    if not (_is_known(heads.q_norm) and type(heads.q_norm) is type(heads.k_norm)):
        yield f"the norm {type(heads.q_norm).__name__} of queries has no program"
    if module.hash is not None:
        yield f"the pattern {module.value.pattern} hashes its keys"
    kinds = [type(one) for one in module._score_mods()]
    for value, kind in zip(module.value.score_mods, kinds, strict=True):
        if kind not in (RotaryModule, SoftCapModule) or kinds.count(kind) > 1:
            yield f"the score modification {type(value).__name__} has no program"


def _map_reasons(*maps: nn.Module | None) -> Iterator[str]:
    for one in maps:
        if type(one) is not nn.Linear or type(one.weight) is not nn.Parameter or not one.weight.is_contiguous():
            yield "a map is not a plain nn.Linear"
        elif one.weight.numel() >= 2**31:
            yield "a map has 2^31 weights or more"


def _is_known(norm: nn.Module | None) -> bool:
    return norm is None or type(norm) in NORMS


def _sublayers(layer: Any) -> list[tuple[SublayerModule, ResidualModule]]:
    return list(zip(layer.sublayers, layer.residuals, strict=True))


@dataclass
class _Step:
    """What the sublayers of one step share."""

    context: Context
    entries: list[Entry]  # those that no attention has taken yet
    tables: Sequence[Table]
    dtype: torch.dtype  # of the products
    masks: dict[tuple[Pattern, int, int], Tensor]

    def mask(self, module: AttentionModule, number: int) -> Tensor:
        """Which slots each head attends to, B, H, S: computed once for each pattern and table."""
        pattern, heads = module.value.pattern, module.heads.heads
        key = (pattern, number, heads)
        if key not in self.masks:
            next_B1, k_B1S = self.context.positions.query_positions(), self.tables[number].position_BS[:, None]
            b_B11 = torch.arange(len(next_B1), device=next_B1.device)[:, None, None]
            h_1H1 = torch.arange(heads, device=next_B1.device)[None, :, None]
            allowed = pattern.bind(self.context.side)(b_B11, h_1H1, next_B1[:, None], k_B1S) & (k_B1S >= 0)
            self.masks[key] = allowed.expand(len(next_B1), heads, k_B1S.shape[2]).view(torch.uint8)
        return self.masks[key]


@torch.no_grad()
def fused_step(
    network: Network, x_BTD: Tensor, context: Context, entries: Sequence[Entry], tables: Sequence[Table]
) -> Any:
    """Returns the logits of every output head after one token of each sequence, whose keys and values it writes into slots.

    The network is evaluated, without dropout. The entries are `SlotKV`s, and the tables have the position of the new token already.
    """
    device = x_BTD.device.type
    dtype = network_dtype = next(network.body.parameters()).dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x_BTD = x_BTD.to(torch.promote_types(x_BTD.dtype, network_dtype))
    step = _Step(context, list(entries), tables, dtype, {})
    stream = Input(x_BTD[:, 0].contiguous())
    for layer in network.body.layer_modules():
        for sublayer, residual in _sublayers(layer):
            stream = _join(step, sublayer, residual, stream)
    if isinstance(norm := getattr(network.body.stream, "norm", None), nn.Module):
        stream = replace(stream, norm=norm)
    return _predict(network, stream, dtype)


def _join(step: _Step, sublayer: SublayerModule, residual: ResidualModule, stream: Input) -> Input:
    """The stream after one sublayer. That of post-norm layers has a norm that the next map computes."""
    if isinstance(residual, PostNormModule):
        normed = stream if stream.norm is None else replace(stream, normed=torch.empty_like(stream.x))
        base = normed.x if normed.normed is None else normed.normed
        return Input(_sublayer(step, sublayer, normed, base), norm=residual.norm)
    inputs = replace(stream, norm=residual.norm)  # type: ignore[arg-type]
    if isinstance(residual, SandwichNormModule):
        return Input(stream.x + residual.after(_sublayer(step, sublayer, inputs, None)).to(stream.x.dtype))
    return Input(_sublayer(step, sublayer, inputs, stream.x))


def _sublayer(step: _Step, sublayer: SublayerModule, inputs: Input, base: Tensor | None) -> Tensor:
    """The output of a sublayer, added to `base` if there is one."""
    if isinstance(sublayer, FeedForwardModule):
        first = Map.of(sublayer.hidden[0], activation=ACTIVATIONS[sublayer.activation], gated=sublayer.gated)
        hidden = linear(inputs, first, step.dtype, step.dtype)
        return linear(Input(hidden), Map.of(sublayer.out), step.dtype, inputs.x.dtype, base)
    assert isinstance(sublayer, AttentionModule) and isinstance(sublayer.heads, LinearProjectionModule)
    heads, entry = sublayer.heads, step.entries.pop(0)
    assert isinstance(entry, KVCache) and heads.qkv is not None and heads.out is not None
    qkv = linear(inputs, Map.of(heads.qkv), step.dtype, step.dtype)
    table = entry.table  # type: ignore[attr-defined]
    rotary = next((one for one in sublayer._score_mods() if isinstance(one, RotaryModule)), None)
    sin_cos = None if rotary is None else rotary._sin_cos(step.context, "queries", torch.float32)
    caps = [one.soft_cap for one in sublayer._score_mods() if one.soft_cap is not None]
    mask, slot_B = step.mask(sublayer, table), step.tables[table].slot_B
    merged = attend_one(qkv, heads, entry.tensors, mask, slot_B, rotary, sin_cos, caps[0] if caps else None)
    return linear(merged, Map.of(heads.out), step.dtype, inputs.x.dtype, base)


def _predict(network: Network, stream: Input, dtype: torch.dtype) -> Any:
    """The logits of a language head by a program, of any other heads by their modules."""
    head = network.outputs[0] if len(network.outputs) == 1 else None
    weight_VD = head.weight(network.embed) if isinstance(head, LanguageModule) else None
    if not isinstance(head, LanguageModule) or weight_VD is None or weight_VD.numel() >= 2**31:
        return network.predict(_normed(stream).x[:, None])
    if stream.is_many and len(weight_VD) >= LARGE:
        stream = _normed(stream)
    map_ = Map(weight_VD, head.bias, scale=head.scale, cap=head.soft_cap)
    return linear(stream, map_, dtype, dtype)[:, None]


def _normed(stream: Input) -> Input:
    """The stream after its norm, computed by its module."""
    return stream if stream.norm is None else Input(stream.norm(stream.x).to(stream.x.dtype))
