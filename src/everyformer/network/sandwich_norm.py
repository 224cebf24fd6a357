"""Norms before and after each sublayer.

    x <- x + LN'(f(LN x)), and a final LN after the stack        Ding et al. 2021 (sandwich), Gemma Team 2024

Departures: none known; Ding et al. have no final norm, which `final_norm=False` leaves out.
"""

from __future__ import annotations

from torch import Tensor, nn

from everyformer.network.norm import LayerNorm, Norm
from everyformer.network.residual import (
    Branch,
    Kept,
    NormedResidualModule,
    NormedStreamModule,
    Residual,
    ResidualModule,
    StreamModule,
)
from everyformer.value import Share, Value


class SandwichNorm(Residual, Value, frozen=True):
    """A norm before the sublayer and one after it: x + norm2(f(norm1(x))), and with `final_norm` one at the end of the stack.

    Both are the `norm`; `dropout` is on f. Example: `SandwichNorm(RMSNorm(unit_offset=True))`.
    """

    norm: Norm = LayerNorm()
    dropout: Share = 0.0
    final_norm: bool = True

    def build(self, width: int) -> ResidualModule:
        return SandwichNormModule(self.norm.build(width), self.norm.build(width), self.dropout)

    def build_stream(self, width: int) -> StreamModule:
        return NormedStreamModule(self.norm.build(width)) if self.final_norm else StreamModule()


class SandwichNormModule(NormedResidualModule):
    def __init__(self, norm: nn.Module, after: nn.Module, dropout: float):
        super().__init__(norm, dropout)
        self.after = after

    def forward(self, stream: Tensor, f: Branch[Kept], visible_BT: Tensor | None) -> tuple[Tensor, Kept]:
        y_BTD, kept = f(self.normalize(stream, visible_BT))
        return stream + self.dropout(self.after(y_BTD, visible_BT)), kept
