"""The contracts of gradients and kernels: kernels, flex, gradient, chunks, overfit. study/contracts.py says what they mean."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.attention.attend import KERNELS, UnsupportedKernel
from everyformer.network.feedforward import FeedForwardModule
from everyformer.network.network import Network, Output
from everyformer.study.contract_report import LIMITS, distance, logits_of
from everyformer.study.example import Example

AWAY = 0.03  # how far weights are moved away from where they are initialized, for finite differences
STEPS = 300  # of `overfit`; most models need a hundred


def kernels(network: Network, inputs: Example) -> float | None:
    wanted = inputs.run(network, kernel="reference")
    direction = torch.randn_like(wanted.hidden)
    gradients = _gradients(network, wanted, direction)
    worst = 0.0
    for kernel in KERNELS if any(network.value.body.patterns()) else ("auto",):  # a recurrent body has one fast path
        if kernel in ("reference", "flex"):
            continue
        try:
            output = inputs.run(network, kernel=kernel)
        except UnsupportedKernel:
            continue
        worst = max(worst, distance(output.hidden, wanted.hidden))
        for one, two in zip(_gradients(network, output, direction), gradients, strict=True):
            worst = max(worst, distance(one, two))
    return worst


def flex(network: Network, inputs: Example) -> float | None:
    with torch.no_grad():  # it has no backward pass on a CPU
        try:
            hidden = inputs.run(network, kernel="flex").hidden
        except UnsupportedKernel:
            return None
        return distance(hidden, inputs.run(network, kernel="reference").hidden)


def gradient(network: Network, inputs: Example) -> float | None:
    """Directional derivatives along random directions of the weights, by autograd and by finite differences.

    Biases and gates are often initialized to numbers at which a ReLU has its kink for a whole feature, so the weights are moved a
    little first. A difference across a kink that is near by chance is wrong too, so several steps are tried along each direction,
    to one side and to both: the smallest error counts. Of the directions, the largest error counts.
    """
    network = copy.deepcopy(network)
    weights = [p for p in network.parameters() if p.requires_grad]
    random = torch.Generator().manual_seed(0)

    def random_direction() -> list[Tensor]:
        return [torch.randn(p.shape, generator=random, dtype=p.dtype).to(p.device) for p in weights]

    def move(direction: list[Tensor], step: float) -> None:
        with torch.no_grad():
            for weight, d in zip(weights, direction, strict=True):
                weight.add_(d, alpha=step)

    def value() -> Tensor:
        output = inputs.run(network)
        return (output.hidden * readout).sum() + sum(logits.square().sum() for logits in logits_of(output))

    def moved(direction: list[Tensor], step: float) -> float:
        move(direction, step)
        with torch.no_grad():
            result = float(value())
        move(direction, -step)
        return result

    if not weights:
        return None  # all weights are frozen
    move(random_direction(), AWAY)
    readout = torch.randn_like(inputs.run(network).hidden)
    current = value()
    gradients, middle, worst = torch.autograd.grad(current, weights, allow_unused=True), current.item(), 0.0
    for _ in range(2):
        direction = random_direction()
        wanted = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True) if g is not None)
        error = math.inf
        for step in (1e-5, 1e-6, 1e-7, 1e-8):
            up, down = moved(direction, step) - middle, middle - moved(direction, -step)
            differences = ((up + down) / 2, up, down)
            error = min(error, *(abs(one / step - wanted) / max(1.0, abs(wanted)) for one in differences))
            if error <= LIMITS["gradient"] / 10:
                break
        worst = max(worst, error)
    return worst


def chunks(network: Network, inputs: Example) -> float | None:
    layers = [module for module in network.modules() if isinstance(module, FeedForwardModule)]
    if not layers:
        return None
    whole = inputs.run(network)
    direction = torch.randn_like(whole.hidden)
    wanted = _gradients(network, whole, direction)
    before = [layer.chunk for layer in layers]
    for layer in layers:
        layer.chunk = 2
    chunked = inputs.run(network)
    gradients = _gradients(network, chunked, direction)
    for layer, chunk in zip(layers, before, strict=True):
        layer.chunk = chunk
    return max(
        [
            distance(chunked.hidden, whole.hidden),
            *(distance(a, b) for a, b in zip(gradients, wanted, strict=True)),
        ]
    )


def overfit(network: Network, inputs: Example) -> float | None:
    """The loss on random targets after some steps on one batch, relative to that of uniform guessing.

    At first there are as many targets as the model has features. A model with a narrow part inside cannot fit so many: then half
    of them are tried, and so on down to two, which any model fits that can tell their positions apart. A model that learns slowly
    or only at another rate, such as a deep one without residual connections, gets more steps at several rates.
    """
    heads = [logits.detach().flatten(0, -2) for logits in logits_of(inputs.run(network))]
    if not heads or not any(p.requires_grad for p in network.parameters()):
        return None
    random = torch.Generator().manual_seed(1)  # another seed than the example's, whose tokens would be easy targets
    chosen, targets = [], []
    for logits_NV in heads:
        some_M = torch.randperm(len(logits_NV), generator=random)[: network.value.width].to(logits_NV.device)
        target_M = torch.randint(0, logits_NV.shape[1], some_M.shape, generator=random).to(logits_NV.device)
        target_M[1:2] = (target_M[:1] + 1) % logits_NV.shape[1]  # not all the same
        same_MM = torch.cdist(logits_NV[some_M], logits_NV[some_M]) < 1e-9
        if bool((same_MM & (target_M[:, None] != target_M)).any()):
            return None
        chosen.append(some_M)
        targets.append(target_M)
    most = max(map(len, chosen))
    tries = [(most >> half, STEPS, 3e-3) for half in range(most.bit_length() - 1)]
    left = math.inf
    for count, steps, lr in (*tries, *((count, 5 * STEPS, lr) for lr in (3e-3, 1e-2, 3e-2) for count in (most, 2))):
        left = min(
            left, _fit(network, inputs, [one[:count] for one in chosen], [one[:count] for one in targets], steps, lr)
        )
        if left < LIMITS["overfit"]:
            break
    return left


def _fit(
    network: Network, inputs: Example, chosen: list[Tensor], targets: list[Tensor], steps: int, lr: float
) -> float:
    """The least loss of a copy that is trained on the chosen outputs of each head, relative to that of uniform guessing."""
    learner = copy.deepcopy(network).float().train()
    for module in learner.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    data = inputs.to(dtype=torch.float32)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=lr, weight_decay=0.0)
    least = math.inf
    for _ in range(steps):
        found = [
            (one.flatten(0, -2)[some], two)
            for one, some, two in zip(logits_of(data.run(learner)), chosen, targets, strict=True)
        ]
        loss = torch.stack([F.cross_entropy(logits, target) for logits, target in found]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        least = min(least, loss.item() / sum(math.log(max(2, logits.shape[-1])) for logits, _ in found))
        if least < LIMITS["overfit"]:
            break
    return least


def _gradients(network: Network, output: Output, direction: Tensor) -> list[Tensor]:
    weights = [p for p in network.parameters() if p.requires_grad]
    if not weights:
        return []
    gradients = torch.autograd.grad((output.hidden * direction).sum(), weights, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(weights, gradients, strict=True)]
