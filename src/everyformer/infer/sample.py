"""Sampling: one token of a distribution. Each step works on what the ones before it leave, in this order:

    temperature  p_w = exp(l_w / T) / sum_v exp(l_v / T)                     Ackley, Hinton & Sejnowski 1985; 0 is argmax
    top_k        the k most likely tokens (of equals those with lower ids)   Fan, Lewis & Dauphin 2018
    top_p        the fewest of the most likely whose sum reaches p           Holtzman et al. 2019, nucleus sampling
    min_p        those at least `min_p` times as likely as the likeliest     Nguyen et al. 2024

What is left is drawn by its probabilities: token number i where the sum of those before it, as a share of the whole,
is the last that is at most u, and u is uniform. A row needs one u, so each row may have a generator of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Generator, Tensor


def sample(
    logits_BV: Tensor,
    temperature: float = 1.0,
    generator: Generator | Sequence[Generator] | None = None,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """One token id for each row. Generators (one for all rows, or one for each) live on the CPU: the u are the same
    on every device."""
    check(temperature, top_k, top_p, min_p)
    if logits_BV.dim() != 2:
        raise ValueError(f"logits of the shape {tuple(logits_BV.shape)}: give a row of them for each token to draw")
    check_logits(logits_BV)
    if temperature == 0:
        return logits_BV.argmax(-1)
    # Less the largest, so that no temperature makes an infinity of it; and what is infinite stays so at any.
    exact_BV = logits_BV.double()
    below_BV = exact_BV - exact_BV.amax(-1, keepdim=True)
    share_BV, order_BV = cut((below_BV / min(temperature, 1e300)).softmax(-1), top_k, top_p, min_p)
    # A token that was cut has 0 here and is never above the mark; the largest sum always is.
    sum_BV = share_BV.cumsum(-1).masked_fill(share_BV == 0, 0)
    top_B1 = sum_BV.amax(-1, keepdim=True)
    u_B1 = _uniform(len(share_BV), generator).to(share_BV.device)[:, None]
    mark_B1 = torch.minimum(u_B1 * top_B1, torch.nextafter(top_B1, torch.zeros_like(top_B1)))
    place_B1 = (sum_BV > mark_B1).to(torch.uint8).argmax(-1, keepdim=True)
    return (place_B1 if order_BV is None else order_BV.gather(-1, place_B1))[:, 0]


def cut(
    share_BV: Tensor, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """The shares with 0 for what is left out, likeliest first, and the tokens in that order (None: as they came)."""
    if top_k is None and top_p in (None, 1) and not min_p:
        return share_BV, None
    share_BV, order_BV = share_BV.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        share_BV[:, top_k:] = 0
    if top_p not in (None, 1):
        sum_BV = share_BV.cumsum(-1)
        share_BV = share_BV.masked_fill(sum_BV - share_BV >= top_p * sum_BV[:, -1:], 0)
    if min_p:
        share_BV = share_BV.masked_fill(share_BV < min_p * share_BV[:, :1], 0)
    return share_BV, order_BV


def generator(*facts: object) -> Generator:
    """Where random numbers come from that follow from these facts, such as a seed and a prompt."""
    return Generator().manual_seed(
        int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:8], "big", signed=True)
    )


def check(temperature: float, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None) -> None:
    """Refuse numbers that mean nothing; not a number is refused everywhere."""
    if not temperature >= 0:
        raise ValueError(f"temperature is {temperature}: give 0 (the most likely token) or more")
    if top_k is not None and not (isinstance(top_k, int) and top_k >= 1):
        raise ValueError(f"top_k is {top_k}: give a whole number of 1 or more, or leave it out for all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}: give more than 0 and at most 1, or leave it out for all tokens")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min_p is {min_p}: give 0 to 1, or leave it out for all tokens")


def check_logits(logits_BV: Tensor) -> Tensor:
    """The logits, if they are numbers."""
    if not bool(logits_BV.amax(-1).isfinite().all()):
        raise ValueError(
            "the logits are not numbers (NaN, or all of a row infinite); the model is broken, load another"
        )
    return logits_BV


def _uniform(rows: int, generator: Generator | Sequence[Generator] | None) -> Tensor:
    if generator is None or isinstance(generator, Generator):
        return torch.rand(rows, generator=generator, dtype=torch.float64)
    if len(generator) != rows:
        raise ValueError(f"{len(generator)} generators for {rows} rows; give one for all, or one for each")
    return torch.cat([torch.rand(1, generator=one, dtype=torch.float64) for one in generator])
