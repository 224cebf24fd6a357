"""Adaptive computation time and the Universal Transformer, literally: position by position, every step computed for all.

Graves 2016, eq. 4-14; Dehghani et al. 2019, section 2. W = Weng, The Transformer Family, whose slips are mended here: P^t has its
part in the residual, H^t is LN(A^t + Transition(A^t)), the ponder cost is of the sum of N and R.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Rows = list[Tensor]


def graves(h: Rows, eps: float) -> tuple[Rows, int, Tensor]:
    """p^n, N and R from the halting units of all steps: N = min(min{n: sum h >= 1 - eps}, M), R = 1 - sum_(n<N) h^n."""
    limit = len(h)
    enough = [n for n in range(1, limit + 1) if sum(h[:n]) >= 1 - eps]
    N = min(min(enough), limit) if enough else limit
    R = 1 - sum(h[: N - 1]) + 0 * h[0]
    return [h[n - 1] if n < N else R if n == N else 0 * R for n in range(1, limit + 1)], N, R


def t2t(h: Rows, eps: float) -> tuple[Rows, int, Tensor]:
    """What each state has of the output, N and R in tensor2tensor's `universal_transformer_act`, line by line."""
    halting_probability, remainders, n_updates = 0 * h[0], 0 * h[0], 0
    shares: Rows = []
    for p in h:
        still_running = float(halting_probability < 1)
        new_halted = float(halting_probability + p * still_running > 1 - eps) * still_running
        still_running = float(halting_probability + p * still_running <= 1 - eps) * still_running
        halting_probability = halting_probability + p * still_running
        remainders = remainders + new_halted * (1 - halting_probability)
        halting_probability = halting_probability + new_halted * remainders
        n_updates += int(still_running + new_halted)
        update_weights = p * still_running + new_halted * remainders
        shares = [share * (1 - update_weights) for share in shares] + [update_weights]
    return shares, n_updates, remainders


def pondering(
    x: Rows,
    S: Callable[[Tensor, Tensor], Tensor],
    unit: Callable[[Tensor], Tensor],
    out: Callable[[Tensor], Tensor],
    s: Tensor,
    eps: float,
    limit: int,
) -> tuple[Rows, Rows, list[Rows], list[Tensor]]:
    """y_t, s_t, p_t and N(t) + R(t) of a recurrent net s_t = S(s_(t-1), x_t) that ponders (eq. 1-14), from the state s on."""
    found: tuple[Rows, Rows, list[Rows], list[Tensor]] = ([], [], [], [])
    for x_t in x:
        states: Rows = []
        for n in range(1, limit + 1):
            flag = torch.tensor([float(n == 1)], dtype=x_t.dtype)
            states.append(S(states[-1] if states else s, torch.cat((x_t, flag))))
        p, N, R = graves([unit(one) for one in states], eps)
        s = torch.stack([p[n] * states[n] for n in range(limit)]).sum(0)
        y = torch.stack([p[n] * out(states[n]) for n in range(limit)]).sum(0)
        for row, part in zip(found, (y, s, p, N + R), strict=True):
            row.append(part)
    return found


def universal(
    x: Rows,
    layer: Callable[[Rows], Rows],
    place: Callable[[int, int], Tensor],
    unit: Callable[[Tensor], Tensor],
    mode: str,
    eps: float,
    steps: int,
) -> tuple[Rows, list[Rows], list[Tensor]]:
    """The output, what each step weighs in it and N + R, by position. `fixed`: the state after all steps."""
    states: list[Rows] = []
    h: list[Rows] = [[] for _ in x]
    now = x
    for n in range(steps):
        here = [now[i] + place(i, n) for i in range(len(x))]
        after = layer(here)
        if mode == "freeze":
            after = [now[i] if h[i] and sum(h[i]) >= 1 - eps else after[i] for i in range(len(x))]
        for i in range(len(x)):
            h[i].append(unit(here[i] if mode == "t2t" else after[i]))
        states.append(after)
        now = after
    if mode == "fixed":
        return now, [], []
    found = [t2t(h[i], eps) if mode == "t2t" else graves(h[i], eps) for i in range(len(x))]
    y = [torch.stack([p * states[n][i] for n, p in enumerate(found[i][0])]).sum(0) for i in range(len(x))]
    return y, [p for p, _, _ in found], [N + R for _, N, R in found]


def separable(x: Rows, taps: Rows, W: Tensor, b: Tensor, ahead: int) -> Rows:
    """A depthwise convolution, w_n for what stands n - ahead before, and a map: W sum_n w_n * x_(i - n + ahead) + b."""
    found = []
    for i in range(len(x)):
        mixed = 0 * x[i]
        for n, w in enumerate(taps):
            if 0 <= i - n + ahead < len(x):
                mixed = mixed + w * x[i - n + ahead]
        found.append(W @ mixed + b)
    return found
