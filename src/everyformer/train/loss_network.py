"""What a training step calls, and `torch.compile` compiles: a network with its loss, so that the loss is compiled too."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from everyformer.network.cache import Cache
from everyformer.network.network import Network, PairNetwork
from everyformer.task.batch import Batch
from everyformer.task.task import Objective


class LossNetwork(nn.Module):
    """A network together with the loss of its task."""

    def __init__(self, network: Network | PairNetwork, objective: Objective):
        super().__init__()
        self.network, self.objective = network, objective

    def forward(
        self, tensors: Mapping[str, Tensor], shared: Mapping[str, Tensor] | None, kernel: str, cache: Cache | None
    ) -> tuple[Tensor, Cache | None]:
        """Returns the sum of the losses of a batch, and the cache for the next step."""
        return self.objective.loss_with_cache(self.network, Batch(tensors, shared), kernel, cache)
