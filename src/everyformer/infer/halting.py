"""How many steps the positions of a model with adaptive computation time take."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from everyformer.infer.evaluate import probed
from everyformer.network.network import Network
from everyformer.network.ponder_rnn import PonderRnn
from everyformer.network.repeat import Halt


def ponder(network: Network, token_N: NDArray[np.integer]) -> float | None:
    """The mean number of steps of a token (in a layer) at the beginning of a text, or None where it is fixed."""
    if not isinstance(network.value.body, Halt | PonderRnn):
        return None
    return float((torch.cat(probed(network, token_N).halts) > 0).sum(-1).float().mean())
