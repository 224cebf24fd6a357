"""Generalised advantage estimation and the clipped loss, literally, on plain numbers.

Schulman et al. 2016, High-Dimensional Continuous Control Using Generalized Advantage Estimation, equations 11-16; Schulman et
al. 2017, Proximal Policy Optimization Algorithms, equations 7 and 9.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def advantages(
    reward: Sequence[float],
    value: Sequence[float],
    after: Sequence[float],
    end: Sequence[bool],
    discount: float,
    trace: float,
) -> list[float]:
    """A_t = sum_l (gamma lambda)^l delta_{t+l} to the end of the episode; delta_t = r_t + gamma V(s_{t+1}) - V(s_t).

    `after` is V(s_{t+1}): 0 after a terminal step, the value of the last observation after one that was cut off.
    """
    found = []
    for t in range(len(reward)):
        total = 0.0
        for l in range(len(reward) - t):  # noqa: E741
            delta = reward[t + l] + discount * after[t + l] - value[t + l]
            total += (discount * trace) ** l * delta
            if end[t + l]:
                break
        found.append(total)
    return found


def loss(
    logits: Sequence[Sequence[float]],
    action: Sequence[int],
    old: float,
    gain: float,
    value: float,
    worth: float,
    clip: float,
    critic: float,
    entropy: float,
) -> float:
    """-L^{CLIP+VF+S} of one step whose action has some independent parts, each with logits of its own.

    r = pi(a) / pi_old(a);  L = min(r A, clip(r, 1 - eps, 1 + eps) A) - c_1 (V - V^targ)^2 + c_2 S[pi]
    """
    chosen, spread = 0.0, 0.0
    for part, number in zip(logits, action, strict=True):
        total = sum(math.exp(one) for one in part)
        share = [math.exp(one) / total for one in part]
        chosen += math.log(share[number])
        spread -= sum(one * math.log(one) for one in share)
    ratio = math.exp(chosen - old)
    clipped = min(max(ratio, 1 - clip), 1 + clip)
    return -min(ratio * gain, clipped * gain) + critic * (value - worth) ** 2 - entropy * spread
