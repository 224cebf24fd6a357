"""Sampling one token from a distribution. The filters apply in this order, each to what the one before leaves:

    temperature  p_w = exp(l_w / T) / sum_v exp(l_v / T)                       Ackley, Hinton & Sejnowski 1985; 0 is argmax
    top_k        keeps the k most likely tokens (ties: those with lower ids)   Fan, Lewis & Dauphin 2018
    top_p        keeps the fewest most likely tokens whose sum reaches p       Holtzman et al. 2019, nucleus sampling
    min_p        keeps tokens at least `min_p` times as likely as the first    Nguyen et al. 2024

The rest is sampled by inverse transform: one uniform u per row selects the token at which the cumulative probability
exceeds u. So each row may have a random generator of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Generator, Tensor

BROKEN = (
    "the logits are NaN or infinite, so no token can be chosen: the model's weights are broken; load another checkpoint"
)


def sample(
    logits_BV: Tensor,
    temperature: float = 1.0,
    generator: Generator | Sequence[Generator] | None = None,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """Returns one token id per row of `logits_BV`, drawn from their softmax at `temperature`; 0 takes the most likely one.

    generator   one for all rows, or one per row. They live on the CPU, so every device uses the same random numbers
    top_k       draw from the k most likely tokens alone
    top_p       from the fewest tokens whose probabilities sum to p
    min_p       from those with at least p times the probability of the most likely one
    Example: `sample(output.logits[:, -1], temperature=0.8, top_k=40)`.
    """
    check_sampling(temperature, top_k, top_p, min_p)
    if logits_BV.dim() != 2:
        raise ValueError(
            f"the logits have the shape {tuple(logits_BV.shape)}: give one row of logits per token to sample"
        )
    check_logits(logits_BV)
    u_B1 = _uniform(len(logits_BV), generator).to(logits_BV.device)[:, None] if temperature else None
    return choose(logits_BV, u_B1, temperature, top_k, top_p, min_p)


def choose(
    logits_BV: Tensor,
    u_B1: Tensor | None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """Returns the tokens that the uniform numbers u select. It reads nothing on the host."""
    if temperature == 0 or u_B1 is None:
        return logits_BV.argmax(-1)
    # Subtracting the maximum keeps the quotient finite at any temperature; -inf stays -inf.
    exact_BV = logits_BV.double()
    shifted_BV = exact_BV - exact_BV.amax(-1, keepdim=True)
    probability_BV, order_BV = filter_tokens((shifted_BV / min(temperature, 1e300)).softmax(-1), top_k, top_p, min_p)
    # A removed token has the cumulative sum 0, so it never exceeds the threshold; the largest sum always does.
    sum_BV = probability_BV.cumsum(-1).masked_fill(probability_BV == 0, 0)
    total_B1 = sum_BV.amax(-1, keepdim=True)
    threshold_B1 = torch.minimum(u_B1 * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
    index_B1 = (sum_BV > threshold_B1).to(torch.uint8).argmax(-1, keepdim=True)
    return (index_B1 if order_BV is None else order_BV.gather(-1, index_B1))[:, 0]


def filter_tokens(
    probability_BV: Tensor, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns the probabilities, sorted, with 0 for removed tokens, and the token ids in that order.

    The ids are None where nothing is removed; then the order is the original one.
    """
    if top_k is None and top_p in (None, 1) and not min_p:
        return probability_BV, None
    probability_BV, order_BV = probability_BV.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        probability_BV[:, top_k:] = 0
    if top_p not in (None, 1):
        sum_BV = probability_BV.cumsum(-1)
        probability_BV = probability_BV.masked_fill(sum_BV - probability_BV >= top_p * sum_BV[:, -1:], 0)
    if min_p:
        probability_BV = probability_BV.masked_fill(probability_BV < min_p * probability_BV[:, :1], 0)
    return probability_BV, order_BV


def seeded_generator(*key: object) -> Generator:
    """Returns a random generator whose seed is a hash of the key, such as a seed and a prompt."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))


def check_sampling(
    temperature: float, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> None:
    """Raises ValueError if a sampling option is out of range or NaN."""
    if not temperature >= 0:
        raise ValueError(f"temperature is {temperature}: give 0 (the most likely token) or more")
    if top_k is not None and not (isinstance(top_k, int) and top_k >= 1):
        raise ValueError(f"top_k is {top_k}: give a whole number of 1 or more, or leave it out for all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}: give more than 0 and at most 1, or leave it out for all tokens")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min_p is {min_p}: give 0 to 1, or leave it out for all tokens")


def check_logits(logits_BV: Tensor) -> Tensor:
    """Returns the logits. Raises ValueError if a row has a NaN, +inf, or nothing but -inf."""
    if not bool(logits_BV.amax(-1).isfinite().all()):
        raise ValueError(BROKEN)
    return logits_BV


def draw_uniform(generators: Sequence[Generator], count: int) -> Tensor:
    """Returns the next `count` uniform numbers of each generator: count, rows. One at a time they would be the same."""
    return torch.stack([torch.rand(count, generator=one, dtype=torch.float64) for one in generators], dim=1)


def _uniform(rows: int, generator: Generator | Sequence[Generator] | None) -> Tensor:
    if generator is None or isinstance(generator, Generator):
        return torch.rand(rows, generator=generator, dtype=torch.float64)
    if len(generator) != rows:
        raise ValueError(f"{len(generator)} generators for {rows} rows; give one for all rows, or one for each row")
    return torch.cat([torch.rand(1, generator=one, dtype=torch.float64) for one in generator])
