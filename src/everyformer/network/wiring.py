"""Wiring: what becomes of a sublayer's answer. It owns the norm and the residual path; the sublayer is a function.

    open(x) -> state, step(state, f) -> state, close(state) -> x

Equations:
    post-norm   x <- LN(x + f(x))                              T eq. 4-6, B
    pre-norm    x <- x + f(LN x), and a last LN after the stack    K; the last norm is what K leaves out
A step passes on whatever else the sublayer returns (its past).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from everyformer.network.norm import LayerNorm, Norm
from everyformer.value import Share, Value

Carried = TypeVar("Carried")
Sublayer = Callable[[Tensor], tuple[Tensor, Carried]]


class Wiring:
    """A value that builds one `Step` for every sublayer and one pair of `Ends` for the stack."""

    __slots__ = ()
    norm: Norm

    def step(self, width: int) -> Step:
        raise NotImplementedError

    def ends(self, width: int) -> Ends:
        raise NotImplementedError


class Step(nn.Module):
    """How one sublayer changes the state, and what of the state it sees."""

    def stream(self, state: Any) -> Tensor:
        """What the sublayer reads of the state, before the norm: this is what a segment memory keeps."""
        assert isinstance(state, Tensor)
        return state

    def view(self, x_BTD: Tensor, visible_BT: Tensor | None) -> Tensor:
        """What reaches the sublayer of a stream, or of one kept from before."""
        return x_BTD

    def forward(self, state: Any, f: Sublayer[Carried], visible_BT: Tensor | None) -> tuple[Any, Carried]:
        raise NotImplementedError


class Ends(nn.Module):
    """How the state begins, and how it becomes the stack's output."""

    def open(self, x_BTD: Tensor) -> Any:
        return x_BTD

    def close(self, state: Any, visible_BT: Tensor | None) -> Tensor:
        assert isinstance(state, Tensor)
        return state


class PostNorm(Wiring, Value, frozen=True):
    norm: Norm = LayerNorm()
    dropout: Share = 0.0

    def step(self, width: int) -> Step:
        return PostNormStep(self.norm.build(width), self.dropout)

    def ends(self, width: int) -> Ends:
        return Ends()


class PreNorm(Wiring, Value, frozen=True):
    norm: Norm = LayerNorm()
    dropout: Share = 0.0
    last: bool = True  # a norm after the stack

    def step(self, width: int) -> Step:
        return PreNormStep(self.norm.build(width), self.dropout)

    def ends(self, width: int) -> Ends:
        return NormedEnds(self.norm.build(width)) if self.last else Ends()


class PostNormStep(Step):
    def __init__(self, norm: nn.Module, dropout: float):
        super().__init__()
        self.norm, self.dropout = norm, nn.Dropout(dropout)

    def forward(self, state: Tensor, f: Sublayer[Carried], visible_BT: Tensor | None) -> tuple[Tensor, Carried]:
        y_BTD, carried = f(state)
        return self.norm(state + self.dropout(y_BTD), visible_BT), carried


class PreNormStep(Step):
    def __init__(self, norm: nn.Module, dropout: float):
        super().__init__()
        self.norm, self.dropout = norm, nn.Dropout(dropout)

    def forward(self, state: Tensor, f: Sublayer[Carried], visible_BT: Tensor | None) -> tuple[Tensor, Carried]:
        y_BTD, carried = f(self.view(state, visible_BT))
        return state + self.dropout(y_BTD), carried

    def view(self, x_BTD: Tensor, visible_BT: Tensor | None) -> Tensor:
        normed_BTD: Tensor = self.norm(x_BTD, visible_BT)
        return normed_BTD


class NormedEnds(Ends):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def close(self, state: Any, visible_BT: Tensor | None) -> Tensor:
        x_BTD = self.norm(state, visible_BT)
        assert isinstance(x_BTD, Tensor)
        return x_BTD
