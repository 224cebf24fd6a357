"""Launches the programs of network/step_programs.py: block sizes by shape, so that small batches fill the multiprocessors of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from everyformer.attention.norm import LayerNormModule, OffsetRMSNormModule
from everyformer.attention.projection import LinearProjectionModule
from everyformer.attention.score_mod import RotaryModule
from everyformer.network.feedforward import Activation

ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "gelu_sigmoid": 4, "silu": 5, "relu_squared": 6}
CAP = 7
FEW = 4  # rows up to which whole rows of weights are multiplied with one vector after the other
HELD = 16384  # weights of one program of few rows
MOST_INPUTS = 32768  # of a program that holds whole rows
MOST_OUTPUTS = 16
FILLED = 100  # programs that occupy a GPU
TILES = ((64, 64), (64, 32), (32, 32), (16, 32), (16, 16))  # rows and outputs of a program of many rows
MOST_SPLITS = 16


class Input(NamedTuple):
    """Rows B, D of a map: `x` after its norm, if there is one. With `normed`, the normed rows are written there too.

    With `total`, `x` has the outputs of several splits, S, B, D in float32, and `total` the logarithms of their sums, S, B, H.
    """

    x: Tensor
    norm: nn.Module | None = None
    normed: Tensor | None = None
    total: Tensor | None = None

    @property
    def is_many(self) -> bool:
        return self.x.shape[-2] > FEW


@dataclass(frozen=True)
class Map:
    """act(scale W x + b), or gated. `cap` bounds the outputs as a soft cap."""

    weight: Tensor
    bias: Tensor | None = None
    activation: Activation | None = None
    gated: bool = False
    scale: float = 1.0
    cap: float | None = None
    module: nn.Module | None = None

    @staticmethod
    def of(module: nn.Module, **options: Any) -> Map:
        assert isinstance(module, nn.Linear)
        return Map(module.weight, module.bias, module=module, **options)


def mask_of(allowed_BHS: Tensor) -> Tensor:
    """Returns the mask of an attention in the form that `attend_one` reads."""
    return allowed_BHS.view(torch.uint8)


def place_of(slot_B: Tensor) -> Tensor:
    """Returns the slot of each sequence in the form that `attend_one` reads."""
    return slot_B


def linear(inputs: Input, map_: Map, dot: torch.dtype, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    """Returns the outputs B, F of a map in `dtype`, added to the residual. Products are computed in `dot`."""
    from everyformer.network import step_programs

    x, (outputs, width) = inputs.x, map_.weight.shape
    outputs, rows = outputs // (2 if map_.gated else 1), x.shape[-2]
    y = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    norm, gamma, beta, eps = norm_of(inputs.norm)
    tensors = (x, inputs.total, map_.weight, map_.bias, gamma, beta, residual, inputs.normed, y)
    fixed = norm | {
        "K": width, "BIAS": map_.bias is not None, "ACT": ACTIVATIONS[map_.activation] if map_.cap is None else CAP, "GATED": map_.gated,
        "RESIDUAL": residual is not None, "KEEP": inputs.normed is not None, "DOT": language_type(dot),
        "SPLITS": 1 if inputs.total is None else len(x), "HEAD": 1 if inputs.total is None else width // inputs.total.shape[-1],
    }  # fmt: skip
    numbers = (rows, outputs, eps, map_.scale, map_.cap or 1.0)
    padded = power_of_2(width)
    if rows <= FEW and padded <= MOST_INPUTS:
        block, warps = few_sizes(outputs, padded, map_.gated)
        grid: tuple[int, ...] = (-(-outputs // block),)
        step_programs.few_rows[grid](
            *tensors, *numbers, **fixed, ROWS=rows, KP=padded, N=block, num_warps=warps, num_stages=1
        )
        return y
    tile, block = many_sizes(rows, outputs)
    half = map_.gated or tile == block == 64
    step = max(16, min(padded, (32 if dot == torch.float32 else 128) // (2 if half else 1)))
    chunk = max(16, min(padded, HELD // tile))
    grid = (-(-outputs // block), -(-rows // tile))
    stages = (
        5 if tile * block <= 512 else 4 if tile * block <= 1024 else 3
    )  # small tiles wait for memory most of the time
    step_programs.many_rows[grid](
        *tensors, *numbers, **fixed, M=tile, N=block, STEP=step, CHUNK=chunk, num_warps=4, num_stages=stages
    )
    return y


def few_sizes(outputs: int, padded: int, gated: bool) -> tuple[int, int]:
    """The outputs and the warps of a program that holds whole rows of weights."""
    held = padded * (2 if gated else 1)
    block = max(1, min(MOST_OUTPUTS, HELD // held))
    while block > 1 and -(-outputs // block) < FILLED:
        block //= 2
    return block, max(1, min(8, power_of_2(block * held // 1024)))


def many_sizes(rows: int, outputs: int) -> tuple[int, int]:
    """The rows and the outputs of a program that multiplies tiles: the largest of which there are enough."""
    for tile, block in TILES:
        if tile < 2 * rows and -(-rows // tile) * -(-outputs // block) >= FILLED:
            return tile, block
    return TILES[-1]


def attend_one(
    qkv: Tensor,
    heads: LinearProjectionModule,
    slots: Sequence[Tensor],
    mask: Tensor,
    slot_B: Tensor,
    rotary: RotaryModule | None,
    sin_cos: tuple[Tensor, Tensor] | None,
    cap: float | None,
) -> Input:
    """Writes the new keys and values into their slots, and returns the outputs of all heads: the input of the map that merges them."""
    from everyformer.network import step_programs

    (keys, values), rows, size = slots, len(qkv), slots[0].shape[2]
    widths = tuple(max(16, power_of_2(width)) for width in (heads.key_width, heads.value_width))
    splits, part = split_sizes(rows * heads.heads, size)
    block = min(power_of_2(part), max(16, 8192 // max(widths)))
    merged = heads.heads * heads.value_width
    dtype = qkv.dtype if splits == 1 else torch.float32
    y = torch.empty(*(() if splits == 1 else (splits,)), rows, merged, dtype=dtype, device=qkv.device)
    total = None if splits == 1 else torch.empty(splits, rows, heads.heads, dtype=torch.float32, device=qkv.device)
    norm, q_gamma, q_beta, q_eps = norm_of(heads.q_norm)
    _, k_gamma, k_beta, k_eps = norm_of(heads.k_norm)
    sin, cos = (None, None) if sin_cos is None else (x.reshape(rows, -1).contiguous() for x in sin_cos)
    layout = 0 if rotary is None else 1 if rotary.value.layout == "interleaved" else 2
    step_programs.attend_one[rows * heads.heads, splits](
        qkv, q_gamma, q_beta, k_gamma, k_beta, sin, cos, keys, values, mask, slot_B, y, total,
        *keys.stride()[:3], *values.stride()[:3], *mask.stride()[:2], rows, size, q_eps, k_eps, heads.scale, cap or 1.0,
        HEADS=heads.heads, GROUP=heads.heads // heads.key_heads, E=heads.key_width, EP=widths[0], F=heads.value_width, FP=widths[1],
        PART=part, BLOCK=block, SPLITS=splits, **norm, ROTARY=layout, WIDTH=rotary.width if rotary else 2,
        CAPPED=cap is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    return Input(y, total=total)


def split_sizes(programs: int, slots: int) -> tuple[int, int]:
    """Into how many parts the slots are split so that programs for all heads occupy a GPU, and the size of a part."""
    wanted = min(-(-2 * FILLED // programs), slots // 128, MOST_SPLITS)
    splits = 1 << max(0, wanted.bit_length() - 1)
    return splits, -(-slots // splits)


def norm_of(norm: nn.Module | None) -> tuple[dict[str, Any], Tensor | None, Tensor | None, float]:
    """The constants of a program for a norm, its gamma and beta, and its epsilon."""
    gamma, beta = getattr(norm, "weight", None), getattr(norm, "bias", None)
    kind = 0 if norm is None else 1 if isinstance(norm, LayerNormModule) else 2
    fixed = {"NORM": kind, "OFFSET": isinstance(norm, OffsetRMSNormModule), "BETA": beta is not None}
    return fixed, gamma, beta, float(getattr(norm, "eps", 0.0))


def language_type(dtype: torch.dtype) -> Any:
    """Triton's name of a dtype."""
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def power_of_2(number: int) -> int:
    """The smallest power of 2 that is not less."""
    return 1 << max(0, number - 1).bit_length()
