"""The equations of adaptive computation time and of the Universal Transformer, one position at a time, all steps computed.

Graves 2016, eq. 4-14; Dehghani et al. 2019, section 2. Errors of Weng 2020 (source W) are corrected: P^t is added to the residual
too, H^t is LN(A^t + Transition(A^t)), and the ponder cost is N + R.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Rows = list[Tensor]


def graves(h: Rows, eps: float) -> tuple[Rows, int, Tensor]:  # eq. W8
    """Graves 2016, section 2: p^n, N and R from all halting units. N = min(min{n: sum h >= 1 - eps}, M), R = 1 - sum_(n<N) h^n."""
    limit = len(h)
    enough = [n for n in range(1, limit + 1) if sum(h[:n]) >= 1 - eps]
    N = min(min(enough), limit) if enough else limit
    R = 1 - sum(h[: N - 1]) + 0 * h[0]
    return [h[n - 1] if n < N else R if n == N else 0 * R for n in range(1, limit + 1)], N, R


def t2t(h: Rows, eps: float) -> tuple[Rows, int, Tensor]:
    """tensor2tensor's `universal_transformer_act`, line by line: the weight of each state in the output, N and R."""
    halting_probability, remainders, n_updates = 0 * h[0], 0 * h[0], 0
    weights: Rows = []
    for p in h:
        still_running = float(halting_probability < 1)
        new_halted = float(halting_probability + p * still_running > 1 - eps) * still_running
        still_running = float(halting_probability + p * still_running <= 1 - eps) * still_running
        halting_probability = halting_probability + p * still_running
        remainders = remainders + new_halted * (1 - halting_probability)
        halting_probability = halting_probability + new_halted * remainders
        n_updates += int(still_running + new_halted)
        update_weights = p * still_running + new_halted * remainders
        weights = [weight * (1 - update_weights) for weight in weights] + [update_weights]
    return weights, n_updates, remainders


def act_rnn(  # eq. W5, W6, W9, W10
    x: Rows,
    S: Callable[[Tensor, Tensor], Tensor],
    unit: Callable[[Tensor], Tensor],
    out: Callable[[Tensor], Tensor],
    s: Tensor,
    eps: float,
    limit: int,
) -> tuple[Rows, Rows, list[Rows], list[Tensor]]:
    """Graves 2016, eq. 1-14: y_t, s_t, p_t and N(t) + R(t) of the RNN s_t = S(s_(t-1), x_t) with initial state s."""
    results: tuple[Rows, Rows, list[Rows], list[Tensor]] = ([], [], [], [])
    for x_t in x:
        states: Rows = []
        for n in range(1, limit + 1):
            flag = torch.tensor([float(n == 1)], dtype=x_t.dtype)
            states.append(S(states[-1] if states else s, torch.cat((x_t, flag))))
        p, N, R = graves([unit(one) for one in states], eps)
        s = torch.stack([p[n] * states[n] for n in range(limit)]).sum(0)
        y = torch.stack([p[n] * out(states[n]) for n in range(limit)]).sum(0)
        for values, value in zip(results, (y, s, p, N + R), strict=True):
            values.append(value)
    return results


def universal_transformer(  # eq. W32
    x: Rows,
    layer: Callable[[Rows], Rows],
    signal: Callable[[int, int], Tensor],
    unit: Callable[[Tensor], Tensor],
    mode: str,
    eps: float,
    steps: int,
) -> tuple[Rows, list[Rows], list[Tensor]]:
    """The output, the weight of each step in it, and N + R, for each position. `signal(i, n)` is P of position i and step n.

    `fixed` returns the state after all steps, `freeze` copies the state of a halted position, `t2t` reads p from the step's input.
    """
    states: list[Rows] = []
    h: list[Rows] = [[] for _ in x]
    state = x
    for n in range(steps):
        inputs = [state[i] + signal(i, n) for i in range(len(x))]
        after = layer(inputs)
        if mode == "freeze":
            after = [state[i] if h[i] and sum(h[i]) >= 1 - eps else after[i] for i in range(len(x))]
        for i in range(len(x)):
            h[i].append(unit(inputs[i] if mode == "t2t" else after[i]))
        states.append(after)
        state = after
    if mode == "fixed":
        return state, [], []
    halted = [t2t(h[i], eps) if mode == "t2t" else graves(h[i], eps) for i in range(len(x))]
    y = [torch.stack([p * states[n][i] for n, p in enumerate(halted[i][0])]).sum(0) for i in range(len(x))]
    return y, [p for p, _, _ in halted], [N + R for _, N, R in halted]


def depthwise_separable_convolution(x: Rows, taps: Rows, W: Tensor, b: Tensor, future: int) -> Rows:
    """A depthwise convolution that covers `future` later positions, then a linear map: W sum_n w_n * x_(i - n + future) + b."""
    outputs = []
    for i in range(len(x)):
        mixed = 0 * x[i]
        for n, w in enumerate(taps):
            if 0 <= i - n + future < len(x):
                mixed = mixed + w * x[i - n + future]
        outputs.append(W @ mixed + b)
    return outputs
