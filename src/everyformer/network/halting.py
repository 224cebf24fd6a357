"""Repeated depths: the same layers again and again, so many times, or until each position has had enough.

Papers: Dehghani et al. 2019, Universal Transformers; Graves 2016, Adaptive Computation Time for Recurrent Neural Networks.

Equations, with f the layers, P^n the position vectors of step n, s^0 = x:
    Repeat   s^n = f(s^(n-1) + P^n), n = 1..M; y = s^M.   In post-norm f is A = LN((H + P) + MHA(H + P)), LN(A + Net(A))
    Halt     h^n = sigma(W_h s^n + b_h),  N = min(min{n: sum_(m<=n) h^m >= 1 - eps}, M),  R = 1 - sum_(n<N) h^n
             p^n = h^n for n < N, R for n = N;   y = sum_n p^n s^n;   cost tau mean_i (N_i + R_i)
for each position by itself. The weights p sum to 1. N has no gradient: the cost learns through R. What becomes of a position
that has halted while others go on is the mode:
    graves   its state goes on, and the others see that; only its output has ended
    freeze   its state is copied to the steps that follow (the words of Dehghani et al.), where the others see it
    t2t      what tensor2tensor's code does (act_type "basic"): h^n is of s^(n-1) + P^n, y <- p^n s^n + (1 - p^n) y, whose
             weights do not sum to 1, states go on, and there is no remainder at the limit. Its "accumulated" sums.
Symbols: `steps` M, `rest` eps, `cost` tau, `bias` b_h at the start. Weng writes P^t without its part in the residual, and the
cost without the brackets and tau.
Departures: steps are counted from 0 in P, as positions are, and as in the published code.

Steps that nobody needs are not computed: the loop ends when every position has halted. That changes nothing, because what
comes later weighs 0; so a compiled, a recorded or an imagined pass, which cannot look, computes all of them. A position that
comes later may need more steps, in which it sees the halted ones: so with a past there is one entry for every step up to
the limit. Frozen states need no more than their keys for that, if the layer is a plain one; in the other modes the states
must go on. So while some positions run, those alone may be computed (`gather`, which a run sets: what is multiplied together then
depends on the data, so equal to rounding, no longer to the last bit).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from everyformer.attention.context import Context
from everyformer.attention.has_data import can_read
from everyformer.attention.hashing import hashing
from everyformer.network.cache import Entry, KVCache
from everyformer.network.depth import Layer, Layered, LayerModule, Layers, Source
from everyformer.network.position import Position
from everyformer.network.residual import Residual
from everyformer.value import NotNegative, Size, Value

GATHERING = ("auto", "reference", "sdpa")  # the kernels that serve some queries alone
GATHER = 0.6  # the share of positions that run, up to which it pays to put them together

Mode = Literal["graves", "freeze", "t2t"]
Epsilon = Annotated[float, msgspec.Meta(gt=0, lt=1)]


class Repeat(Layered, Value, frozen=True):
    """The given layers `steps` times, with the same weights; `position` is added before each time."""

    steps: Size
    each: tuple[Layer, ...]
    residual: Residual
    position: Position | None = None

    def build(self, width: int) -> nn.Module:
        return RepeatLayers(width, self)


class Halt(Layered, Value, frozen=True):
    """The given layers again and again, at most `steps` times, until each position halts (ACT)."""

    steps: Size
    each: tuple[Layer, ...]
    residual: Residual
    position: Position | None = None
    mode: Mode = "graves"
    epsilon: Epsilon = 0.01
    cost: NotNegative = 0.01
    bias: float = 1.0  # above 0: few steps at first; -3 for many

    def build(self, width: int) -> nn.Module:
        return RepeatLayers(width, self)


class HaltingUnit(nn.Module):
    """h = sigma(W_h s + b_h), in float32 at least, because many of them are summed."""

    def __init__(self, width: int, bias: float):
        super().__init__()
        self.map = nn.Linear(width, 1, bias=False)
        self.bias = nn.Parameter(torch.tensor([bias]))  # of one number, because FSDP shards no scalars

    def forward(self, x_BTD: Tensor) -> Tensor:
        a_BT: Tensor = (self.map(x_BTD) + self.bias).squeeze(-1)
        return a_BT.to(torch.promote_types(a_BT.dtype, torch.float32)).sigmoid()


@dataclass
class ActState:
    """What halting has come to after some steps; who runs has not halted, padding never runs."""

    mode: Mode
    epsilon: float
    runs_BT: Tensor
    spent_BT: Tensor | float = 0.0  # the sum of h so far
    ponder_BT: Tensor | float = 0.0  # N + R so far
    y_BTD: Tensor | float = 0.0

    def add(self, h_BT: Tensor, s_BTD: Tensor, last: bool) -> Tensor:
        """One more step; returns its weights."""
        total_BT, t2t = self.spent_BT + h_BT, self.mode == "t2t"
        enough_BT = total_BT > 1 - self.epsilon if t2t else total_BT >= 1 - self.epsilon
        halts_BT = self.runs_BT & enough_BT if t2t or not last else self.runs_BT
        rest_BT = 1 - self.spent_BT + torch.zeros_like(h_BT)
        weight_BT = torch.where(halts_BT, rest_BT, h_BT).where(self.runs_BT, 0.0)
        self.ponder_BT = self.ponder_BT + self.runs_BT + rest_BT.where(halts_BT, 0.0)
        self.runs_BT = self.runs_BT & ~halts_BT
        self.spent_BT = self.spent_BT + h_BT.where(self.runs_BT, 0.0)
        kept_BTD = self.y_BTD * (1 - weight_BT[..., None]) if t2t else self.y_BTD
        self.y_BTD = kept_BTD + weight_BT[..., None] * s_BTD
        return weight_BT


class RepeatLayers(Layers):
    def __init__(self, width: int, value: Repeat | Halt):
        super().__init__(
            [LayerModule(width, layer, value.residual) for layer in value.each], value.residual.ends(width)
        )
        self.value = value
        self.position = value.position.build(width) if value.position else None
        self.unit = HaltingUnit(width, value.bias) if isinstance(value, Halt) else None
        first = value.each[0]
        plain = first.attention is not None and self.entries == [len(first.attentions())]  # no convolution, one layer
        self.light = isinstance(value, Halt) and value.mode == "freeze" and plain
        self.gather = False  # set by a run: compute no more of halted positions than their keys, if the layer allows it
        alone = value.residual.norm is None or not value.residual.norm.mixes_positions
        attentions = first.attentions()
        self.gathers = self.light and alone and not any(one.score_mods or hashing(one.pattern) for one in attentions)

    def forward(
        self, x_BTD: Tensor, context: Context, cache: tuple[Entry, ...] | None, source: Source | None
    ) -> tuple[Tensor, tuple[Entry, ...] | None, dict[str, Tensor]]:
        """`past` None keeps nothing; otherwise the entries of all steps come back, step by step."""
        value, size = self.value, sum(self.entries)
        self.check(cache, value.steps)
        state = self.ends.open(x_BTD)
        visible_BT = context.positions.visible_BQ()
        account = ActState(value.mode, value.epsilon, real(x_BTD, visible_BT)) if isinstance(value, Halt) else None
        found: list[Entry] = []
        weights: list[Tensor] = []
        given: list[Any] = []
        for step in range(value.steps):
            if cache:
                given = list(cache[step * size : (step + 1) * size])
            done = account is not None and none(account.runs_BT)
            if done and cache is None:
                break
            here = state
            if self.position is not None:
                here = self.position(state, context.positions.query_positions().clamp(min=0), step)
            if done and self.light:
                found += self._keys(here, context, given, found[:size])
                continue
            if step and self.gather and self.gathers and account is not None:
                after, kept = self._some(here, context, given, source, account.runs_BT)
            else:
                after, kept = self._step(here, context, given, source)
            found += kept if cache is not None else []
            given = [one if isinstance(one, KVCache) and one.fixed else None for one in kept]  # the source's, made once
            if account is not None and isinstance(value, Halt):
                ran_BT1 = account.runs_BT[..., None]
                h_BT = self.unit(here if value.mode == "t2t" else after)  # type: ignore[misc]
                weights.append(account.add(h_BT, after, step + 1 == value.steps))
                after = torch.where(ran_BT1, after, state) if value.mode == "freeze" else after
            state = after
        costs: dict[str, Tensor] = {}
        if account is not None and isinstance(value, Halt):
            state = account.y_BTD.to(x_BTD.dtype)  # type: ignore[union-attr]
            if value.cost:
                costs["ponder"] = value.cost * mean(account.ponder_BT, visible_BT)  # type: ignore[arg-type]
            if context.call.probe is not None:
                context.call.probe.halts.append(shares(weights, value.steps, value.mode))
        return self.ends.close(state, visible_BT), None if cache is None else tuple(found), costs

    def _step(self, state: Any, context: Context, cache: list[Any], source: Source | None) -> tuple[Any, list[Entry]]:
        given = (state, context, cache, source, (0, len(self.layers)))
        # Each step is recomputed by itself, whatever the number of sections.
        done: tuple[Any, list[Entry]] = (
            checkpoint(self.section, *given, use_reentrant=False) if self.recomputing else self.section(*given)
        )
        return done

    def _some(
        self, here_BTD: Tensor, context: Context, cache: list[Any], source: Source | None, runs_BT: Tensor
    ) -> tuple[Tensor, list[Entry]]:
        """A step of the positions that run, put together; of the others the keys alone."""
        blind = context.call.probe is not None or context.call.segment_memory or context.call.kernel not in GATHERING
        count = len(runs_BT[0]) if blind or not can_read(runs_BT) else int(runs_BT.sum(1).max())
        if count > GATHER * len(runs_BT[0]):
            return self._step(here_BTD, context, cache, source)
        index_BQ = (~runs_BT).to(torch.uint8).argsort(dim=1, stable=True)[:, :count]
        position_BQ = context.positions.query_positions().expand_as(runs_BT).gather(1, index_BQ)
        position_BQ = torch.where(runs_BT.gather(1, index_BQ), position_BQ, -1)
        some: dict[str, Any] = {"queries": count, "query_BQ": position_BQ}
        keys_BK = context.positions.key_positions()
        near = replace(context, positions=replace(context.positions, **some, key_BK=keys_BK))
        if source is not None:
            cross = replace(source.context, positions=replace(source.context.positions, **some))
            source = replace(source, context=cross)
        entry, *_ = self._keys(here_BTD, context, cache, [])
        assert isinstance(entry, KVCache)
        index_BQD = index_BQ[..., None].expand(-1, -1, here_BTD.shape[-1])
        given = [replace(entry, fixed=True), *cache[1:]]
        new_BQD, kept = self._step(here_BTD.gather(1, index_BQD), near, given, source)
        return here_BTD.scatter(1, index_BQD, new_BQD.to(here_BTD.dtype)), [entry, *kept[1:]]

    def _keys(self, state: Any, context: Context, cache: list[Any], first: list[Entry]) -> list[Entry]:
        """What a step leaves for later ones when nobody runs in it."""
        layer: Any = self.layers[0]
        kept: list[Entry] = layer.keys(state, context, cache[:1])
        return kept + first[1:]  # the source's are the same in every step


def real(x_BTD: Tensor, visible_BT: Tensor | None) -> Tensor:
    """Which positions are no padding."""
    every_BT = torch.ones(x_BTD.shape[:2], dtype=torch.bool, device=x_BTD.device)
    return every_BT if visible_BT is None else every_BT & visible_BT


def mean(ponder_BT: Tensor, visible_BT: Tensor | None) -> Tensor:
    """Over what is no padding, which ponders 0."""
    return ponder_BT.sum() / (ponder_BT.numel() if visible_BT is None else visible_BT.expand_as(ponder_BT).sum())


def none(runs_BT: Tensor) -> bool:
    """Has every position halted? Where data cannot be looked at: no."""
    return can_read(runs_BT) and not bool(runs_BT.any())


def shares(weights: list[Tensor], steps: int, mode: Mode = "graves") -> Tensor:
    """What each step has of the output: B, T, steps."""
    left_BT = torch.ones_like(weights[0])
    found: list[Tensor] = []
    for weight_BT in reversed(weights):
        found.append(weight_BT * left_BT)
        left_BT = left_BT * (1 - weight_BT) if mode == "t2t" else left_BT
    others = [torch.zeros_like(left_BT)] * (steps - len(found))
    return torch.stack([*reversed(found), *others], dim=-1)
