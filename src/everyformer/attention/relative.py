"""The four terms of Transformer-XL: content and distance, each with the query and with a vector of the head's own.

Paper: Dai et al. 2019, section 3.3 (W).
Equation: A_ij = scale (q_i . k_j + q_i . W_R r_{i-j} + u . k_j + v . W_R r_{i-j}), r_n the sinusoid of the distance n: the
sines of all frequencies, then the cosines. Symbols: `width` is the d of r, `reach` the clamp_len of the published code.
Departures: W leaves out the scale, and that every head has its own u and v. The published PyTorch code shares u and v
between layers and drops parts of r in training; here each layer has its own, as in its TensorFlow code, and r is whole.

How it is fast: with W_R^T (q_i + v) = (s, c), a number each for the sine and the cosine of a frequency w,
    s sin w(i-j) + c cos w(i-j) = (s sin wi + c cos wi) cos wj + (c sin wi - s cos wi) sin wj,
an inner product of a vector of i and one of j. So queries and keys that are wider by `width` have all four terms in their
product, and any kernel serves without a bias. A clamped distance is no such product; it is a term of the score.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from everyformer.attention.rule import Rule, RuleModule, Term, picked, waves, waves_of
from everyformer.attention.scene import Scene
from everyformer.value import Size, Value

BASE = 10000.0  # of the frequencies


class FourTerm(Rule, Value, frozen=True):
    """Transformer-XL's relative positions. Distances beyond `reach` count as `reach`; None: as they are."""

    width: Size
    reach: Size | None = None

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.width % 2:
            raise ValueError(
                f"four_term.width is {self.width}: it has a sine and a cosine of each frequency; make it even"
            )

    def build(self, heads: int, key_width: int, value_width: int) -> RuleModule:
        return FourTermRule(self, heads, key_width)


class FourTermRule(RuleModule):
    def __init__(self, value: FourTerm, heads: int, key_width: int):
        super().__init__()
        self.width, self.reach = value.width, value.reach
        self.u_HE, self.v_HE = (nn.Parameter(torch.randn(heads, key_width) * 0.02) for _ in range(2))
        self.place = nn.Linear(value.width, heads * key_width, bias=False)  # W_R of every head

    def turn(self, q_BHQE: Tensor, k_BHKE: Tensor, scene: Scene) -> tuple[Tensor, Tensor]:
        if self.reach is not None:
            return q_BHQE, k_BHKE
        dtype, k = q_BHQE.dtype, k_BHKE.contiguous()
        q = q_BHQE.contiguous()  # once: else the product copies it, and joining in another order of memory is slow
        sines, cosines = ((q + self.v_HE.to(dtype)[:, None]) @ self._place(dtype)).chunk(2, dim=-1)
        sin_i, cos_i = waves_of(scene, "queries", self.width, BASE, dtype)
        sin_j, cos_j = waves_of(scene, "keys", self.width, BASE, dtype)
        first = torch.addcmul(sines * sin_i, cosines, cos_i)
        second = torch.addcmul(cosines * sin_i, sines, -cos_i)
        waves = torch.cat((cos_j, sin_j), dim=-1).expand(*k.shape[:3], -1).contiguous()
        return torch.cat((q + self.u_HE.to(dtype)[:, None], first, second), dim=-1), torch.cat((k, waves), dim=-1)

    def score(self, q_BHQE: Tensor, k_BHKE: Tensor, scale: float, scene: Scene) -> Term | None:
        reach, dtype = self.reach, q_BHQE.dtype
        if reach is None:
            return None
        distance_R = torch.arange(-reach, reach + 1, device=q_BHQE.device)
        r_RD = torch.cat(waves(distance_R[None], self.width, BASE, dtype), dim=-1)[0, 0]
        place_BHQR = scale * (q_BHQE + self.v_HE.to(dtype)[:, None]) @ (self._place(dtype) @ r_RD.T)
        content_BHK = scale * (k_BHKE @ self.u_HE.to(dtype)[:, :, None])[..., 0]

        def term(b: Any, h: Any, i: Any, j: Any) -> Tensor:
            row = (scene.query_at(b, i) - scene.key_at(b, j)).clamp(-reach, reach) + reach
            return content_BHK[b, h, j] + picked(place_BHQR, b, h, i, row)

        return term

    def _place(self, dtype: torch.dtype) -> Tensor:
        return self.place.weight.to(dtype).unflatten(0, self.u_HE.shape)
