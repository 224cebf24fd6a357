"""Optimizers: AdamW (fused) for all weights, or Muon for the matrices inside the layers and AdamW for the rest.

Weight decay applies to matrices only, not to norms, biases and other vectors.
Papers: Kingma & Ba 2014, Loshchilov & Hutter 2017; Muon: Jordan et al. 2024.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from everyformer.network.depth import DepthModule
from everyformer.train.muon import BatchedMuon
from everyformer.train.recipe import Optim


def optimizers(network: nn.Module, optim: Optim, capture_on: torch.device | None = None) -> list[torch.optim.Optimizer]:
    """Returns the optimizers of a network. Each group stores its peak learning rate as `full_lr`; `set_lr` scales it.

    If their steps are captured in a CUDA graph, `capture_on` is its device: their learning rates are tensors there.
    """
    weights = [p for p in network.parameters() if p.requires_grad]
    matrices = _layer_matrices(network) if optim.name == "muon" else set()
    muon = [p for p in weights if p in matrices]
    rest = [p for p in weights if p not in matrices]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    result: list[torch.optim.Optimizer] = []
    if groups:
        betas = (optim.beta1, optim.beta2)
        result.append(
            torch.optim.AdamW(groups, lr=optim.lr, betas=betas, fused=True, capturable=capture_on is not None)
        )
    if muon:
        result.append(BatchedMuon(muon, lr=optim.muon_lr, weight_decay=optim.weight_decay))
    for optimizer in result:
        for group in optimizer.param_groups:
            group["full_lr"] = group["lr"]
            if capture_on is not None:
                group["lr"] = torch.tensor(group["lr"], device=capture_on)
    return result


def _layer_matrices(network: nn.Module) -> set[nn.Parameter]:
    """The weights of the layers that are matrices: not embeddings, output heads, or weights that layers share."""
    stacks = [module for module in network.modules() if isinstance(module, DepthModule)]
    tables = {module.weight for module in network.modules() if isinstance(module, nn.Embedding)}
    return {p for stack in stacks for p in stack.layers.parameters() if p.dim() == 2} - tables


def set_lr(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Set the learning rates to this factor of their peaks."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            lr = group["full_lr"] * factor
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
