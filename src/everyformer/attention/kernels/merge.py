"""Merges attention over disjoint sets of keys into attention over their union.

With o_p the output over the keys of part p and t_p the log-sum-exp of its scores, the output over all parts is
sum_p exp(t_p) o_p / sum_p exp(t_p), and its log-sum-exp is log sum_p exp(t_p). This is exact. A part without keys has t_p = -inf.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outputs: Sequence[Tensor], totals: Sequence[Tensor]) -> Tensor:
    """Returns the output over all parts, from outputs ..., E and log-sum-exps ..., 1. Differentiable in both."""
    share = _relative(totals)
    whole = share.sum(0).clamp(min=torch.finfo(share.dtype).tiny)
    return (torch.stack(tuple(outputs)) * share / whole).sum(0)


def merge_sums(sums: Sequence[Tensor], tops: Sequence[Tensor]) -> Tensor:
    """Returns the same from sums ..., E + 1 of exp(score - top) times v and times 1, with the largest scores ..., 1 as tops.

    No part is normalized by itself, so the backward pass keeps one tensor less for each.
    """
    total = torch.stack([one * share for one, share in zip(sums, _relative(tops), strict=True)]).sum(0)
    return total[..., :-1] / total[..., -1:]


def _relative(totals: Sequence[Tensor]) -> Tensor:
    """Returns exp(t_p) relative to the largest, as P, ..., 1; 0 where no part has keys."""
    total = torch.stack(tuple(totals))
    top = total.amax(0).detach()
    return (total - top.masked_fill(top == -torch.inf, 0)).exp()


def merge_(output: Tensor, total: Tensor, part_output: Tensor, part_total: Tensor) -> None:
    """Merges one more part into an output and its log-sum-exp in place, which needs memory for one part at a time."""
    both = torch.logaddexp(total, part_total)
    share = (part_total - both.masked_fill(both == -torch.inf, 0)).exp()  # 0 where no key is allowed
    output.lerp_(part_output, share.to(output.dtype))
    total.copy_(both)


def log_sum_exp(score: Tensor) -> Tensor:
    """Returns log sum exp over the last axis, which stays; -inf with a gradient of 0 (not NaN) where all scores are -inf."""
    top = score.amax(-1, keepdim=True).detach()
    empty = top == -torch.inf
    total = (score - top.masked_fill(empty, 0)).exp().sum(-1, keepdim=True)
    return torch.where(empty, -torch.inf, total.masked_fill(empty, 1).log() + top)
