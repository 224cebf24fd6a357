"""One decoding step on a CPU in few operations of PyTorch: the counterpart of network/step_launch.py, without programs of its own.

    linear       y = act(scale W norm(x) + b) + residual, with packed weights where a network has them (network/packed.py)
    attend_one   norm and rotation of queries and keys, the new key and value in their slot, attention over the slots

Attention reads every slot, the empty ones too, and a bias of -inf hides those that a query does not attend to: keys and values are
then one stream of memory, which a CPU reads up to three times as fast as a stream with gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everyformer.attention.kernels.sdpa import without_empty_rows
from everyformer.attention.projection import LinearProjectionModule
from everyformer.attention.score_mod import RotaryModule
from everyformer.network.feedforward import activate
from everyformer.network.packed import PackedLinear
from everyformer.network.step_launch import Input, Map


class Bias(NamedTuple):
    """What is added to the scores, B, H, S: 0, or -inf for a slot that the head does not attend to."""

    bias_BHS: Tensor
    has_keys: Tensor | None  # B, H, 1: whether the head attends to any slot; None if all do


def mask_of(allowed_BHS: Tensor) -> Bias:
    """Returns the mask of an attention in the form that `attend_one` reads."""
    mask_BHS, has_keys = without_empty_rows(allowed_BHS)
    bias_BHS = torch.zeros(mask_BHS.shape).masked_fill_(~mask_BHS, -torch.inf)
    return Bias(bias_BHS, None if bool(has_keys.all()) else has_keys)


def place_of(slot_B: Tensor) -> tuple[Any, ...]:
    """Returns the slot of each sequence as an index of keys and values, B, H, S, E. Most often it is one slot for all."""
    slots = slot_B.tolist()
    every = slice(None)
    return (every, every, slots[0]) if len(set(slots)) == 1 else (torch.arange(len(slots)), every, slot_B)


def linear(inputs: Input, map_: Map, dot: torch.dtype, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    """Returns the outputs B, F of a map, added to the residual."""
    x = inputs.x if inputs.norm is None else inputs.norm.forward(inputs.x)
    if inputs.normed is not None:
        inputs.normed.copy_(x)
    assert map_.module is not None
    product, name = map_.module.forward, map_.activation
    if isinstance(product, PackedLinear):
        y = product(x, None if map_.gated else name)
    else:
        y = product(x) if map_.gated or name is None else activate(product(x), name)
    if map_.gated and name is not None:
        gate, y = y.chunk(2, dim=-1)
        y = activate(gate, name) * y
    return y if residual is None else residual + y


def attend_one(
    qkv: Tensor,
    heads: LinearProjectionModule,
    slots: Sequence[Tensor],
    mask: Bias,
    place: tuple[Any, ...],
    rotary: RotaryModule | None,
    sin_cos: tuple[Tensor, Tensor] | None,
    cap: float | None,
) -> Input:
    """Writes the new keys and values into their slots, and returns the outputs of all heads: the input of the map that merges them."""
    (keys, values), rows = slots, len(qkv)
    inner = heads.queries + heads.keys
    qk, v = qkv.narrow(1, 0, inner), qkv.narrow(1, inner, heads.values)
    qk = qk.view(rows, heads.heads + heads.key_heads, 1, heads.key_width)
    if heads.q_norm is not None and heads.k_norm is not None:
        q, k = qk.split((heads.heads, heads.key_heads), dim=1)
        qk = torch.cat((heads.q_norm(q), heads.k_norm(k)), dim=1)
    if rotary is not None and sin_cos is not None:
        qk = rotary.rotate(qk, *sin_cos)
    qk = qk.squeeze(2)
    q, k = qk.narrow(1, 0, heads.heads), qk.narrow(1, heads.heads, heads.key_heads)
    keys[place] = k.to(keys.dtype)
    values[place] = v.view(rows, heads.key_heads, heads.value_width).to(values.dtype)
    groups = rows * heads.key_heads
    k_NES, v_NSE = keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1)
    q_NQE, bias_NQS = q.reshape(groups, -1, heads.key_width), mask.bias_BHS.view(groups, -1, keys.shape[2])
    if cap is None:
        score_NQS = torch.baddbmm(bias_NQS, q_NQE, k_NES, alpha=heads.scale)
    else:
        score_NQS = cap * (torch.bmm(q_NQE, k_NES) * (heads.scale / cap)).tanh() + bias_NQS
    y = torch.bmm(score_NQS.softmax(-1), v_NSE).view(rows, heads.heads, heads.value_width)
    y = y if mask.has_keys is None else y * mask.has_keys
    return Input(y.view(rows, -1))
