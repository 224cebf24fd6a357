"""How many steps the positions of a model with adaptive computation time take."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from everyformer.attention.scene import Probe
from everyformer.network.halting import Halt
from everyformer.network.model import Network
from everyformer.network.ponder import Ponder

MOST = 512  # tokens of a text that are read for it


@torch.no_grad()
def ponder(network: Network, token_N: NDArray[np.integer]) -> float | None:
    """The mean number of steps of a token (in a layer) at the beginning of a text, or None where it is fixed."""
    if not isinstance(network.value.body, Halt | Ponder):
        return None
    probe, device = Probe(), next(network.parameters()).device
    network(torch.from_numpy(np.asarray(token_N[:MOST]).astype(np.int64)).to(device)[None], probe=probe)
    return float((torch.cat(probe.halts) > 0).sum(-1).float().mean())
