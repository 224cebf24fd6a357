"""What `attend` hands to a kernel, and what it expects of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.context import Context, Positions
from everyformer.attention.has_data import can_read
from everyformer.attention.pattern import Causal, Full, Pattern
from everyformer.attention.score_mod import ScoreModModule, Term

HALF = (torch.bfloat16, torch.float16)
LONG = 1024  # queries from which on `auto` considers a sparse kernel


class Kernel(Protocol):
    """One way to compute attention: a module of attention/kernels with these functions."""

    def unsupported_reason(self, request: Request) -> str | None:
        """Returns why the kernel cannot compute the request, with a remedy, or None if it can."""

    def computed_fraction(self, request: Request) -> float:
        """Returns the fraction of the Q x K scores that the kernel computes; a dense kernel computes 1."""

    def auto_limit(self, request: Request) -> float:
        """Returns the computed fraction up to which `auto` uses the kernel; below 0: never. It must be fast to compute."""

    def run(self, request: Request) -> Tensor:
        """Returns the output B, H, Q, E' of every query."""


@dataclass(frozen=True)
class Request:
    """softmax(scale q k^T + sum of terms, over the keys that `pattern` allows) v, plus the outputs of score modifications.

    With a `soft_cap` the products are bounded before the terms are added, with `sink_H` the denominator has one more summand.
    """

    q_BHQE: Tensor
    k_BHKE: Tensor
    v_BHKE: Tensor
    pattern: Pattern
    terms: tuple[Term, ...]
    output_mods: tuple[ScoreModModule, ...]  # the score modifications that add to the output and need the weights
    context: Context
    scale: float
    dropout: float
    narrowed: Pattern | None = None  # the pattern without the pairs that the terms hide anyway
    soft_cap: float | None = None  # c in c tanh(s / c), s the products of queries and keys
    sink_H: Tensor | None = None  # a logit of each head in the denominator

    @staticmethod
    def of(pattern: Pattern, queries: int, keys: int, heads: int) -> Request:
        """Returns a request without values, to ask kernels about a pattern."""
        q, k = (torch.empty(1, heads, length, 1, device="meta") for length in (queries, keys))
        return Request(q, k, k, pattern, (), (), Context.of(queries, keys), 1.0, 0.0)

    @property
    def batch(self) -> int:
        return self.q_BHQE.shape[0]

    @property
    def heads(self) -> int:
        return self.q_BHQE.shape[1]

    @property
    def key_heads(self) -> int:
        """The number of heads of keys and values; `heads` is a multiple of it."""
        return self.k_BHKE.shape[1]

    def ungrouped(self) -> Request:
        """Returns the request with keys and values repeated for each query head, if several share them. That copies them."""
        if self.key_heads == self.heads:
            return self
        k, v = (x.repeat_interleave(self.heads // self.key_heads, dim=1) for x in (self.k_BHKE, self.v_BHKE))
        return replace(self, k_BHKE=k, v_BHKE=v)

    @property
    def requires_grad(self) -> bool:
        return any(x.requires_grad for x in (self.q_BHQE, self.k_BHKE, self.v_BHKE))

    @property
    def is_long(self) -> bool:
        """Whether `auto` considers kernels that plan for the pattern: not for short sequences, nor inside torch.compile."""
        return not torch.compiler.is_compiling() and self.context.positions.queries >= LONG

    @property
    def is_sparse(self) -> bool:
        """Whether the sequence is long and the pattern is neither `full` nor `causal`."""
        return self.is_long and type(self.narrowed or self.pattern) not in (Full, Causal)

    def products(self, q: Tensor, k: Tensor) -> Tensor:
        """Returns scale q k^T, bounded by the soft cap."""
        score = q @ k.transpose(-1, -2) * self.scale  # eq. B5, B8
        return score if self.soft_cap is None else self.soft_cap * (score / self.soft_cap).tanh()

    def softmax_reason(self) -> str | None:
        """Returns why a kernel with a softmax of its own cannot compute the request, or None."""
        if self.soft_cap is not None or self.sink_H is not None:
            return "a soft cap or sinks change the softmax, which is built into it; use blocked"
        return None

    def partial_pass_reason(self) -> str | None:
        """Returns why a kernel that takes indices for positions cannot compute the request, or None."""
        if self.context.positions.in_order and self.context.positions.queries == self.context.positions.keys:
            return None
        return "queries and keys are not all positions in order (a cache, padding or another sequence); use sdpa"

    def needs_weights_reason(self) -> str | None:
        """Returns why a kernel that never stores the attention weights cannot compute the request, or None."""
        if self.output_mods:
            return "a score modification needs the attention weights (Shaw's value terms), which it does not store; use reference"
        if self.context.call.probe is not None:
            return "a probe records the attention weights, which it does not store; use reference"
        return None

    def by_position(self, width: int) -> list[Tensor]:
        """Returns q, k and v as B, T, H, E, all of the given width and number of heads; zeros fill the rest and change nothing."""
        request = self.ungrouped()
        heads = (request.q_BHQE, request.k_BHKE, request.v_BHKE)
        padded = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in heads)  # a pad of 0 copies
        return [x.transpose(1, 2).contiguous() for x in padded]


def has_consecutive_keys(context: Context) -> bool:
    """Whether the visible keys of each sequence have consecutive indices: then the difference of two is their distance."""
    return context.positions.in_order or context.memo(("consecutive",), lambda: _are_consecutive(context.positions))


def _are_consecutive(positions: Positions) -> bool:
    key_BK = positions.key_BK
    if positions.query_BQ is not None or key_BK is None or not can_read(key_BK):
        return False
    return bool(((key_BK.diff(dim=1) == 1) | (key_BK[:, :-1] < 0)).all())
