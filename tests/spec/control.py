"""The equations of generalized advantage estimation and of PPO's clipped loss, on Python floats.

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

    `after` is V(s_{t+1}): 0 after a terminal step; after a truncated one, the value of the last observation.
    """
    advantage = []
    for t in range(len(reward)):
        total = 0.0
        for l in range(len(reward) - t):  # noqa: E741
            delta = reward[t + l] + discount * after[t + l] - value[t + l]
            total += (discount * trace) ** l * delta
            if end[t + l]:
                break
        advantage.append(total)
    return advantage


def ppo_loss(
    logits: Sequence[Sequence[float]],
    action: Sequence[int],
    old_log_probability: float,
    advantage: float,
    value: float,
    target: float,
    clip: float,
    critic: float,
    entropy: float,
) -> float:
    """-L^{CLIP+VF+S} of one step. The components of an action are independent, each with its own logits.

    r = pi(a) / pi_old(a);  L = min(r A, clip(r, 1 - eps, 1 + eps) A) - c_1 (V - V^targ)^2 + c_2 S[pi]
    """
    log_probability, policy_entropy = 0.0, 0.0
    for component, choice in zip(logits, action, strict=True):
        total = sum(math.exp(one) for one in component)
        p = [math.exp(one) / total for one in component]
        log_probability += math.log(p[choice])
        policy_entropy -= sum(one * math.log(one) for one in p)
    ratio = math.exp(log_probability - old_log_probability)
    clipped = min(max(ratio, 1 - clip), 1 + clip)
    surrogate = min(ratio * advantage, clipped * advantage)
    return -surrogate + critic * (value - target) ** 2 - entropy * policy_entropy
