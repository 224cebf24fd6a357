"""Learning: the gradients of a batch, and what they do to the weights. What a run does besides is in `loop.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from everyformer.attention.attend import check_kernel
from everyformer.attention.score_mod import ScoreModModule
from everyformer.network.auxiliary import AuxiliaryNetwork
from everyformer.network.cache import Cache
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network
from everyformer.network.repeat import GATHER_KERNELS
from everyformer.task.work import Batch, Work
from everyformer.train.capture import Captured, unsupported_reason
from everyformer.train.distributed import World, spread, syncing
from everyformer.train.init_from import load_weights
from everyformer.train.optimizer import optimizers, set_rate
from everyformer.train.recipe import Recipe
from everyformer.train.schedule import batch_size


class Learner:
    """A network that learns in one process: its optimizers, its average, and what the last step left for the next."""

    def __init__(self, recipe: Recipe, work: Work, value: Model | EncoderDecoder, here: World):
        self.recipe, self.work, self.here = recipe, work, here
        work.fit(value)
        run = recipe.run
        check_kernel(run.kernel)
        if run.precision == "fp16" and here.device.type == "cpu":
            raise ValueError("run.precision=fp16 on a CPU is some 80 times slower than fp32; use bf16 or fp32")
        if run.compile == "graphs" and (reason := unsupported_reason(run, value, here.size)):
            raise ValueError(f"run.compile=graphs cannot record a step {reason}; use run.compile=yes")
        sizes = [batch_size(run, step) for step in (0, *(start for start, _ in run.batch_schedule))]
        largest, smallest = max(sizes), min(sizes)
        if largest > work.examples():
            raise ValueError(f"a batch of {largest} is larger than the set of {work.examples()}; lower run.batch")
        if smallest < here.size * run.accumulate:
            raise ValueError(
                f"a batch of {smallest} cannot be cut into {here.size} processes x {run.accumulate} pieces; raise it, or lower "
                "run.accumulate"
            )
        torch.manual_seed(run.seed)
        network = value.build()
        there = next(network.parameters()).device.type == here.device.type  # moving imagined weights is not possible
        self.network = network if there else network.to(here.device)
        if recipe.init_from is not None:
            load_weights(self.network, recipe.init_from)
        if run.checkpoint_segments:
            set_checkpoint_segments(self.network, run.checkpoint_segments)
        if run.gather:
            set_gather(self.network, True)
            if run.compile != "no" or run.kernel not in GATHER_KERNELS:
                raise ValueError(
                    f"run.gather looks at who has halted, which a compiled step cannot, and some queries alone are served by the "
                    f"kernels {', '.join(GATHER_KERNELS)}; leave run.gather out, or run.compile and run.kernel"
                )
        auxiliary = isinstance(self.network, Network) and self.network.auxiliary is not None
        module = AuxiliaryNetwork(self.network) if auxiliary else self.network
        self.called = spread(module, here, run.shard)
        if run.compile != "no":
            self.called = torch.compile(self.called)  # type: ignore[assignment]
        self.optimizers = optimizers(self.network, recipe.optim)
        decay = recipe.optim.ema
        self.average = {n: p.detach().clone() for n, p in self.network.named_parameters()} if decay else None
        self.scaler = torch.amp.GradScaler(here.device.type, enabled=run.precision == "fp16")
        self.carried: list[Cache | None] = []
        self.begin_anew()
        self.captured: Captured | None = None
        if run.compile == "graphs" and here.device.type == "cuda":
            self.captured = Captured(self.backward, list(self.network.parameters()), here.device)

    def begin_anew(self) -> None:
        """Nothing of the last step goes on into the next; else what it left does, by piece of the batch."""
        self.carried = [None] * self.recipe.run.accumulate

    def gradients(self, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
        """Leave the gradients of a batch on the weights; the loss of this process's part and their norm come back."""
        mine = self.here.share(batch)
        if self.captured is None:
            return self.backward(mine, count)
        return self.captured(mine, count)

    def backward(self, mine: Batch, count: Tensor | int) -> tuple[Tensor, Tensor]:
        """The same of this process's part, by as many launches as it takes."""
        run, bounds = self.recipe.run, self._pieces(mine)
        self.called.train()
        total = torch.zeros((), device=self.here.device)
        for piece in range(run.accumulate):
            part = mine.rows(bounds[piece], bounds[piece + 1]).to(self.here.device)
            with syncing(self.called, last=piece == run.accumulate - 1):
                with self.precision():
                    total_loss, self.carried[piece] = self.work.read(
                        self.called,  # type: ignore[arg-type]
                        part,
                        run.kernel,
                        self.carried[piece],
                    )
                    loss = total_loss / count
                # DDP and FSDP take the mean over the processes; the loss is a sum already divided by the whole count.
                self.scaler.scale(loss * self.here.size).backward()
            total += loss.detach()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        return total, _norm(nn.utils.get_total_norm([p.grad for p in self._moved()]))  # type: ignore[misc]

    def _pieces(self, mine: Batch) -> list[int]:
        """Where the pieces of this process's part of a batch begin and end."""
        pieces = self.recipe.run.accumulate
        return [len(mine) * piece // pieces for piece in range(pieces + 1)]

    def step(self, share: float, norm: Tensor | None) -> None:
        """Move the weights by their gradients at a share of the rate; with a norm, the gradients are clipped first."""
        if norm is not None:
            nn.utils.clip_grads_with_norm_(self._moved(), self.recipe.optim.clip, norm)
        set_rate(self.optimizers, share)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        for module in self.network.modules():
            if isinstance(module, ScoreModModule):
                module.clamp_()
        self._follow()

    def zero_grad(self) -> None:
        """Drop the gradients. A CUDA graph keeps its own: it writes them anew in each step."""
        if self.captured is not None:
            return
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _moved(self) -> list[nn.Parameter]:
        return [p for p in self.network.parameters() if p.grad is not None]

    def _follow(self) -> None:
        """Move the average of the weights a little towards them."""
        if self.average is not None:
            decay = self.recipe.optim.ema
            with torch.no_grad():
                for name, weight in self.network.named_parameters():
                    self.average[name].lerp_(weight.detach(), 1 - decay)

    def left(self) -> dict[str, Tensor]:
        """What the last step left for the next, of all rows of the batch in their order; empty where it leaves nothing."""
        mine = [cache.state_dict() for cache in self.carried if cache is not None]
        parts = [part for parts in self.here.gather([_on_cpu(one) for one in mine]) for part in parts]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}

    def go_on(self, left: Mapping[str, Tensor]) -> None:
        """Begin with what `left` told, of as many processes as there were then."""
        mine = self.here.share(Batch(left))
        parts = [mine.rows(*bounds).to(self.here.device) for bounds in pairwise(self._pieces(mine))]
        self.carried = [Cache.from_state_dict(part.tensors) for part in parts]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The network with its averaged weights."""
        if self.average is None:
            yield
            return
        with torch.no_grad():
            kept = {name: p.detach().clone() for name, p in self.network.named_parameters()}
            self.use_average()
            try:
                yield
            finally:
                for name, p in self.network.named_parameters():
                    p.copy_(kept[name])

    def use_average(self) -> None:
        if self.average is not None:
            with torch.no_grad():
                for name, p in self.network.named_parameters():
                    p.copy_(self.average[name])

    def precision(self) -> AbstractContextManager[Any]:
        return precise(self.recipe.run.precision, self.here.device)


def set_checkpoint_segments(network: nn.Module, checkpoint_segments: int) -> None:
    """Recompute the activations of the stacks in so many sections in the backward pass, to save their memory."""
    for module in network.modules():
        if hasattr(module, "checkpoint_segments"):
            module.checkpoint_segments = checkpoint_segments  # type: ignore[assignment]


def set_gather(network: nn.Module, gather: bool) -> None:
    """Compute of positions that have halted no more than their keys."""
    able = [module for module in network.modules() if getattr(module, "can_gather", False)]
    if gather and not able:
        raise ValueError(
            "run.gather=true: no depth of this model copies halted positions through one layer without a convolution, rules "
            "or norms over positions; leave it out, or use universal-transformer with model.halting=freeze"
        )
    for module in able:
        module.gather = gather  # type: ignore[assignment]


def _norm(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def precise(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which a network computes in a precision."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return nullcontext() if kind is None else torch.autocast(device.type, kind)


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.cpu() for name, x in tensors.items()}
