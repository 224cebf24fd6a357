"""Optimizers: AdamW (fused) for everything, or Muon for the matrices inside the layers and AdamW for the rest.

Weight decay goes to matrices only; norms, biases and single vectors have none.
Papers: Kingma & Ba 2014, Loshchilov & Hutter 2017; Muon: Jordan et al. 2024.
"""

from __future__ import annotations

import torch
from torch import nn

from everyformer.train.recipe import Optim


def optimizers(network: nn.Module, optim: Optim) -> list[torch.optim.Optimizer]:
    """The optimizers of a network. Every group knows its full rate as `full_lr`; `set_rate` scales it."""
    weights = {id(p): (name, p) for name, p in network.named_parameters() if p.requires_grad}
    inner = [p for name, p in weights.values() if p.dim() == 2 and ".layers." in name and optim.name == "muon"]
    chosen = {id(p) for p in inner}
    rest = [p for key, (_, p) in weights.items() if key not in chosen]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    found: list[torch.optim.Optimizer] = []
    if groups:
        found.append(torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), fused=True))
    if inner:
        found.append(torch.optim.Muon(inner, lr=optim.muon_lr, weight_decay=optim.weight_decay))
    for optimizer in found:
        for group in optimizer.param_groups:
            group["full_lr"] = group["lr"]
    return found


def set_rate(found: list[torch.optim.Optimizer], share: float) -> None:
    for optimizer in found:
        for group in optimizer.param_groups:
            group["lr"] = group["full_lr"] * share
