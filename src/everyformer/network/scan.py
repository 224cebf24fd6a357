"""Recurrences: any step, position by position, and a linear one computed in parallel: c_t = x_t + f_t c_{t-1} for all t."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from everyformer.attention.has_data import is_exporting, is_transformed

Tensors = tuple[Tensor, ...]


def steps(step: Callable[[Tensors, Tensors], tuple[Tensors, Tensors]], state: Tensors, inputs: Tensors) -> Tensors:
    """Returns the outputs of all positions, B, T, ..., of `state, outputs = step(state, inputs of the position)`.

    torch.export records the loop as one operation, so that the length stays open.
    """
    if is_exporting():
        return _recorded_steps(step, state, inputs)
    outputs: list[Tensors] = []
    for of_position in zip(*(x.unbind(1) for x in inputs), strict=True):  # indexing would give each a gradient of all
        state, output = step(state, of_position)
        outputs.append(output)
    return tuple(torch.stack(x, dim=1) for x in zip(*outputs, strict=True))


def _recorded_steps(
    step: Callable[[Tensors, Tensors], tuple[Tensors, Tensors]], state: Tensors, inputs: Tensors
) -> Tensors:
    from torch._higher_order_ops.scan import scan as recorded_loop

    def body(state: Tensors, of_position: Tensors) -> tuple[Tensors, Tensors]:
        state, output = step(state, of_position)
        return state, tuple(x.clone() for x in output)  # an output must not be the state itself

    outputs: Tensors = recorded_loop(body, tuple(x.clone() for x in state), inputs, dim=1)[1]
    return outputs


def scan(f_BTD: Tensor, x_BTD: Tensor) -> Tensor:
    """Returns c_t = x_t + f_t c_{t-1} for all t, in O(log T) depth and O(T) work. There is no division, so f may be 0.

    Two neighbouring steps are combined into one, c_{t+1} = (x_{t+1} + f_{t+1} x_t) + f_{t+1} f_t c_{t-1}. This halves the length, and
    so on recursively; the other positions then follow from their neighbours. The gradient is a scan from the end:
    g_t = dL/dc_t + f_{t+1} g_{t+1}.
    """
    if torch.compiler.is_compiling() or is_transformed():
        return _halve(f_BTD, x_BTD)  # the transform derives the gradient
    c_BTD: Tensor = _Scan.apply(f_BTD, x_BTD)  # type: ignore[no-untyped-call]
    return c_BTD


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        c_BTD = _halve(f_BTD, x_BTD)
        ctx.save_for_backward(f_BTD, c_BTD)
        return c_BTD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        f_BTD, c_BTD = ctx.saved_tensors
        later_BTD = torch.cat((f_BTD[:, 1:], torch.zeros_like(f_BTD[:, :1])), dim=1)
        g_BTD = scan(later_BTD.flip(1), gradients[0].flip(1)).flip(1)
        before_BTD = torch.cat((torch.zeros_like(c_BTD[:, :1]), c_BTD[:, :-1]), dim=1)
        return g_BTD * before_BTD, g_BTD


def _halve(f_BTD: Tensor, x_BTD: Tensor) -> Tensor:
    length = x_BTD.shape[1]
    if length == 1:
        return x_BTD
    first_f, first_x, second_f, second_x = f_BTD[:, ::2], x_BTD[:, ::2], f_BTD[:, 1::2], x_BTD[:, 1::2]
    pairs = length // 2
    second = _halve(second_f * first_f[:, :pairs], torch.addcmul(second_x, second_f, first_x[:, :pairs]))
    between = torch.addcmul(first_x[:, 1:], first_f[:, 1:], second[:, : first_x.shape[1] - 1])
    c_BTD = second.new_empty(x_BTD.shape)
    c_BTD[:, :1], c_BTD[:, 2::2], c_BTD[:, 1::2] = first_x[:, :1], between, second
    return c_BTD
