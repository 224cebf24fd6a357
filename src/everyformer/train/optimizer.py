"""Optimizers: AdamW (fused) for all weights, or Muon for the matrices inside the layers and AdamW for the rest.

Weight decay applies to matrices only, not to norms, biases and other vectors.
Papers: Kingma & Ba 2014, Loshchilov & Hutter 2017; Muon: Jordan et al. 2024.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from everyformer.attention.projection import LinearProjectionModule
from everyformer.network.depth import DepthModule
from everyformer.network.feedforward import FeedForwardModule
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
        options = {"lr": optim.muon_lr, "weight_decay": optim.weight_decay, "momentum": optim.muon_momentum}
        result.append(BatchedMuon(muon, dict(_stacked(network)), **options))
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


def _stacked(network: nn.Module) -> Iterator[tuple[Tensor, list[int]]]:
    """The weights that are several maps, with the numbers of their rows: to queries, keys and values, and to a gate and a net."""
    for module in network.modules():
        if isinstance(module, LinearProjectionModule) and module.qkv is not None:
            yield module.qkv.weight, [rows for rows in (module.queries, module.keys, module.values) if rows]
        if isinstance(module, FeedForwardModule) and module.gated:
            for layer in module.hidden:
                assert isinstance(layer, nn.Linear)
                yield layer.weight, [layer.out_features // 2] * 2


def set_lr(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Set the learning rates to this factor of their peaks."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            lr = group["full_lr"] * factor
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
