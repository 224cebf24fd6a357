"""A decoding step without the modules: on a GPU about five Triton programs a layer, where PyTorch launches 25; on a CPU a few
operations of PyTorch, where the modules take some 260 function calls of Python a layer.

    if fused_reason(network) is None: plan = Plan(network, entries)
    logits = fused_step(plan, x_BTD, context, tables)

A map has the norm before it, the activation after it and the addition to the stream in one program, and an attention has everything
between its two maps in another one (network/step_programs.py; network/step_on_cpu.py computes the same on a CPU). Weights are read
where they are. The stream is kept without its last norm, so that in post-norm layers too the program of the next map computes it.
Everything else is PyTorch's: embedding and positions, the masks of the patterns, the sines of rotary positions, and output heads
other than a language head.

Outputs equal those of the modules up to rounding: within a program nothing is rounded to the precision of the weights.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from everyformer.attention.context import Context
from everyformer.attention.norm import LayerNormModule, OffsetRMSNormModule, RMSNormModule
from everyformer.attention.pattern import Pattern
from everyformer.attention.projection import LinearProjectionModule
from everyformer.attention.score_mod import RotaryModule
from everyformer.attention.softmax import SoftCapModule
from everyformer.network import step_launch, step_on_cpu
from everyformer.network.cache import Entry, KVCache
from everyformer.network.depth import StackModule
from everyformer.network.feedforward import FeedForwardModule
from everyformer.network.multi_head_attention import AttentionModule
from everyformer.network.output_head import LanguageModule
from everyformer.network.residual import PostNormModule, PreNormModule, ResidualModule
from everyformer.network.sandwich_norm import SandwichNormModule
from everyformer.network.step_launch import Input, Map
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
    device = next(network.parameters()).device.type
    if device == "cpu":
        return _cpu_reason(network) or unserved_reason(network)
    if device != "cuda" or torch.version.hip is not None:
        return f"its programs are for NVIDIA's GPUs and for CPUs, and the model is on {device}"
    if importlib.util.find_spec("triton") is None:
        return "Triton, which comes with PyTorch for CUDA on Linux, is not installed"
    return unserved_reason(network)


def _cpu_reason(network: Network) -> str | None:
    others = {str(weight.dtype) for weight in network.parameters() if weight.dtype != torch.float32}
    if others:
        return f"on a CPU only models in float32 are fused, and the weights are {' and '.join(sorted(others))}"
    return "on a CPU it is computed in float32, and autocast is on" if torch.is_autocast_enabled("cpu") else None


def programs_of(device: torch.device) -> ModuleType:
    """Returns the module whose functions compute a step: `linear`, `attend_one`, `mask_of` and `place_of`."""
    return step_launch if device.type == "cuda" else step_on_cpu


def unserved_reason(network: Network) -> str | None:
    """Returns which part of a network has no program, or None if all have one."""
    if type(network.body) is not StackModule:
        return f"a body of {type(network.value.body).__name__} has no fused step"
    if network.reads - SIDE_INPUTS:
        return f"its layers read {' and '.join(sorted(network.reads - SIDE_INPUTS))}"
    weights = {weight.dtype for weight in network.body.parameters()}
    if len(weights) != 1 or not weights <= set(DTYPES):
        return f"the weights are {' and '.join(sorted(map(str, weights)))}, not bfloat16, float16 or float32 alone"
    for module in network.modules():
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


@dataclass(frozen=True)
class Part:
    """A sublayer in its residual, as a step computes it."""

    norm: nn.Module  # of the residual
    after: nn.Module | None  # the norm after a sublayer between two norms
    is_post_norm: bool
    first: Map  # of a feed-forward net, or to queries, keys and values
    last: Map
    heads: LinearProjectionModule | None = None  # None: a feed-forward net
    rotary: RotaryModule | None = None
    cap: float | None = None
    mask: int = 0  # its index among those of a plan
    slots: tuple[Tensor, ...] = ()
    table: int = 0


class Plan:
    """What the steps of one network compute, found once for its slots. The entries are `SlotKV`s."""

    def __init__(self, network: Network, entries: Sequence[Entry]):
        left = list(entries)
        self.network = network
        self.masks: list[tuple[Pattern, int, int]] = []  # pattern, heads and table of each different mask
        layers = network.body.layer_modules()
        self.parts = [self._part(*one, left) for layer in layers for one in _sublayers(layer)]
        self.dtype = next(network.body.parameters()).dtype
        norm = getattr(network.body.stream, "norm", None)
        self.norm = norm if isinstance(norm, nn.Module) else None

    def _part(self, sublayer: SublayerModule, residual: Any, entries: list[Entry]) -> Part:
        norms = (residual.norm, getattr(residual, "after", None), isinstance(residual, PostNormModule))
        if isinstance(sublayer, FeedForwardModule):
            first = Map.of(sublayer.hidden[0], activation=sublayer.activation, gated=sublayer.gated)
            return Part(*norms, first, Map.of(sublayer.out))
        assert isinstance(sublayer, AttentionModule) and isinstance(sublayer.heads, LinearProjectionModule)
        heads, entry, score_mods = sublayer.heads, entries.pop(0), sublayer._score_mods()
        assert isinstance(entry, KVCache) and heads.qkv is not None and heads.out is not None
        table: int = entry.table  # type: ignore[attr-defined]
        mask = (sublayer.value.pattern, heads.heads, table)
        if mask not in self.masks:
            self.masks.append(mask)
        rotary = next((one for one in score_mods if isinstance(one, RotaryModule)), None)
        cap = next((one.soft_cap for one in score_mods if one.soft_cap is not None), None)
        maps = (Map.of(heads.qkv), Map.of(heads.out))
        return Part(*norms, *maps, heads, rotary, cap, self.masks.index(mask), entry.tensors, table)


@torch.no_grad()
def fused_step(plan: Plan, x_BTD: Tensor, context: Context, tables: Sequence[Table], logits: bool = True) -> Any:
    """Returns the logits of every output head after one token of each sequence, whose keys and values it writes into slots.

    The network is evaluated, without dropout. The tables have the position of the new token already. With `logits` False it may
    return a `LogitMap` where a head has one.
    """
    programs, device, dtype = programs_of(x_BTD.device), x_BTD.device.type, plan.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x_BTD = x_BTD.to(torch.promote_types(x_BTD.dtype, plan.dtype))
    allowed = (_allowed(context, tables[table], pattern, heads) for pattern, heads, table in plan.masks)
    masks = [programs.mask_of(one) for one in allowed]
    places = [programs.place_of(table.slot_B) for table in tables]
    stream = Input(x_BTD[:, 0].contiguous())
    for part in plan.parts:
        base, inputs = stream.x, Input(stream.x, part.norm)
        if part.is_post_norm:
            inputs = stream if stream.norm is None else Input(stream.x, stream.norm, torch.empty_like(stream.x))
            base = inputs.x if inputs.normed is None else inputs.normed
        first = programs.linear(inputs, part.first, dtype, dtype)
        if part.heads is None:
            inner = Input(first)
        else:
            sin_cos = None if part.rotary is None else part.rotary._sin_cos(context, "queries", torch.float32)
            mask, place = masks[part.mask], places[part.table]
            inner = programs.attend_one(first, part.heads, part.slots, mask, place, part.rotary, sin_cos, part.cap)
        if part.after is None:
            y = programs.linear(inner, part.last, dtype, stream.x.dtype, base)
        else:
            y = base + part.after(programs.linear(inner, part.last, dtype, stream.x.dtype)).to(base.dtype)
        stream = Input(y, part.norm if part.is_post_norm else None)
    stream = stream if plan.norm is None else Input(stream.x, plan.norm)
    if programs is step_on_cpu:
        return plan.network.predict(_normed(stream).x[:, None], logits=logits)
    return _predict(plan.network, stream, dtype)


def _allowed(context: Context, table: Table, pattern: Pattern, heads: int) -> Tensor:
    """Which slots each head attends to: B, H, S."""
    next_B1, k_B1S = context.positions.query_positions(), table.position_BS[:, None]
    b_B11 = torch.arange(len(next_B1), device=next_B1.device)[:, None, None]
    h_1H1 = torch.arange(heads, device=next_B1.device)[None, :, None]
    allowed = pattern.bind(context.side)(b_B11, h_1H1, next_B1[:, None], k_B1S) & (k_B1S >= 0)
    return allowed.expand(len(next_B1), heads, k_B1S.shape[2])


def _predict(network: Network, stream: Input, dtype: torch.dtype) -> Any:
    """The logits of a language head by a program, of any other heads by their modules."""
    head = network.outputs[0] if len(network.outputs) == 1 else None
    weight_VD = head.weight(network.embed) if isinstance(head, LanguageModule) else None
    if not isinstance(head, LanguageModule) or weight_VD is None or weight_VD.numel() >= 2**31:
        return network.predict(_normed(stream).x[:, None])
    if stream.is_many and len(weight_VD) >= LARGE:
        stream = _normed(stream)
    map_ = Map(weight_VD, head.bias, scale=head.scale, cap=head.soft_cap)
    return step_launch.linear(stream, map_, dtype, dtype)[:, None]


def _normed(stream: Input) -> Input:
    """The stream after its norm, computed by its module."""
    return stream if stream.norm is None else Input(stream.norm(stream.x).to(stream.x.dtype))
