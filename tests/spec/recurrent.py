"""The LSTM: Thickstun (source T), eq. 13-21 (Hochreiter & Schmidhuber 1997; Gers et al. 1999; Levy et al. 2018).

Departures from the source: its eq. 17 is misprinted; it is the output gate o_t = sigma(W_oh h_{t-1} + W_ox x_t). The source has sigma
where the standard LSTM has tanh, in eq. 13 and 18: `activation` is either. The biases `b` are optional. A gate without weights is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Rows = list[Tensor]
Maps = dict[str, Tensor]  # "c", "i", "f", "o": d x n
Activation = Callable[[float], float]


def sigma(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def apply(f: Activation, z: Tensor) -> Tensor:
    return torch.tensor([f(float(number)) for number in z], dtype=torch.float64)


def gate(name: str, f: Activation, x: Tensor, h: Tensor | None, w_x: Maps, w_h: Maps, b: Maps) -> Tensor:
    """f(W_h h + W_x x + b); 1 if there is no such gate."""
    if name not in w_x:
        return torch.ones(len(w_x["c"]), dtype=torch.float64)
    z = w_x[name] @ x
    z = z if h is None else z + w_h[name] @ h
    return apply(f, z + b[name] if name in b else z)


def lstm(x: Rows, w_x: Maps, w_h: Maps, b: Maps, activation: Activation) -> tuple[Rows, Rows, Rows, Rows, Rows]:
    """Eq. 13-18: h, c, c~, i and f at every step. Without "f" this is the LSTM of 1997; without "o" it has no output gate."""
    h = c = torch.zeros(len(w_x["c"]), dtype=torch.float64)
    steps: tuple[Rows, Rows, Rows, Rows, Rows] = ([], [], [], [], [])
    for x_t in x:
        step = lstm_step(x_t, h, c, w_x, w_h, b, activation)
        h, c = step[:2]
        for values, value in zip(steps, step, strict=True):
            values.append(value)
    return steps


def lstm_step(
    x_t: Tensor, h: Tensor, c: Tensor, w_x: Maps, w_h: Maps, b: Maps, activation: Activation
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Eq. 13-18 for one step: h, c, c~, i and f from the previous h and c."""
    c_new = gate("c", activation, x_t, h if w_h else None, w_x, w_h, b)  # eq. T13
    i = gate("i", sigma, x_t, h if w_h else None, w_x, w_h, b)  # eq. T14
    f = gate("f", sigma, x_t, h if w_h else None, w_x, w_h, b)  # eq. T15
    o = gate("o", sigma, x_t, h if w_h else None, w_x, w_h, b)  # eq. T17
    c = i * c_new + f * c  # eq. T16
    return o * apply(activation, c), c, c_new, i, f  # eq. T18


def ablated(x: Rows, w_x: Maps, b: Maps, activation: Activation) -> tuple[Rows, Rows, Rows, Rows, Rows]:  # eq. T20, T21
    """Eq. 20-21: no recurrence in the candidate and the gates, and no output gate."""
    assert "o" not in w_x
    return lstm(x, w_x, {}, b, activation)


def weights(i: Rows, f: Rows) -> list[Rows]:  # eq. T18a
    """Before eq. 19: w_{t,s} = i_s prod_{k=s+1..t} f_k for s <= t, and 0 for s > t."""
    weights = []
    for t in range(len(i)):
        row = []
        for s in range(len(i)):
            w = i[s].clone() if s <= t else torch.zeros_like(i[s])
            for k in range(s + 1, t + 1):
                w = w * f[k]
            row.append(w)
        weights.append(row)
    return weights
