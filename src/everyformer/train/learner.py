"""One training step: the gradients of a batch, and the update of the weights. The rest of a run is in `loop.py`.

A step never waits for its device: whether it is skipped, and by how much its gradients are clipped, are tensors there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from everyformer.attention.attend import check_kernel
from everyformer.attention.kernel_use import KernelUse, describe, record_kernels
from everyformer.attention.score_mod import ScoreModModule
from everyformer.network.cache import Cache
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network
from everyformer.network.repeat import GATHER_KERNELS
from everyformer.task.batch import Batch
from everyformer.task.task import TaskData
from everyformer.train.compilation import compilation, compiled
from everyformer.train.cuda_graphs import CudaGraphs, unsupported_reason
from everyformer.train.distributed import World, gradient_sync, parallelize
from everyformer.train.gradient_watch import StepCheck
from everyformer.train.init_from import load_weights
from everyformer.train.loss_network import LossNetwork
from everyformer.train.optimizer import optimizers, set_lr
from everyformer.train.recipe import Recipe, Run
from everyformer.train.schedule import batch_size

CLIP_EPSILON = 1e-6  # that of PyTorch's clip_grad_norm_


class Learner:
    """A network in training in one process, with its optimizers, its EMA, and the cache that a step leaves for the next."""

    def __init__(self, recipe: Recipe, data: TaskData, model: Model | EncoderDecoder, world: World):
        self.recipe, self.task, self.world = recipe, data.fit(model), world
        run = recipe.run
        check_run(run, data, model, world)
        torch.manual_seed(run.seed)
        network = model.build()
        on_device = next(network.parameters()).device.type == world.device.type  # fake tensors cannot be moved
        self.network = network if on_device else network.to(world.device)
        if recipe.init_from is not None:
            load_weights(self.network, recipe.init_from)
        if run.checkpoint_segments:
            set_checkpoint_segments(self.network, run.checkpoint_segments)
        if run.gather:
            set_gather(self.network, True)
        self.task.objective.whole_logits = run.loss == "whole"
        self.module: Any = parallelize(LossNetwork(self.network, self.task.objective), world, run.shard)
        self.compilation = compilation(run, model, data.context, world.device, world.world_size)
        if self.compilation.mode != "no":
            self.module = compiled(self.module, world.device, one_length=not data.context_schedule)
        has_graphs = self.compilation.mode == "graphs" and world.device.type == "cuda"
        self.optimizers = optimizers(self.network, recipe.optim, world.device if has_graphs else None)
        self.weights = list(self.network.parameters())
        self.clamped = [module for module in self.network.modules() if isinstance(module, ScoreModModule)]
        has_ema = recipe.optim.ema > 0
        self.ema = {name: p.detach().clone() for name, p in self.network.named_parameters()} if has_ema else None
        self.check = StepCheck(world.device, recipe.optim.skip_spikes)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=run.precision == "fp16")
        self.kernels: list[KernelUse] | None = None  # of the attentions of the first pass
        self.carried_cache: list[Cache | None] = []  # by piece of the batch
        self.reset_cache()
        self.cuda_graphs = CudaGraphs(self.take_step, world.device) if has_graphs else None

    def reset_cache(self) -> None:
        """Start the next step without a cache."""
        self.carried_cache = [None] * self.recipe.run.accumulate

    @property
    def carries_cache(self) -> bool:
        """Whether a step starts with the cache of the step before, which a skipped step resets."""
        return any(cache is not None for cache in self.carried_cache)

    def step(self, rows: Batch, count: int, lr_factor: float) -> Tensor:
        """Take one step on this process's rows of a batch with `count` targets, at a factor of the learning rate.

        Returns the numbers of its `StepCheck`, which the device may still be computing; the next step overwrites them.
        """
        set_lr(self.optimizers, lr_factor)
        return self.take_step(rows, count) if self.cuda_graphs is None else self.cuda_graphs(rows, count)

    def take_step(self, rows: Batch, count: Tensor | int) -> Tensor:
        """The step at the current learning rates, without reading anything from the device."""
        loss, norm = self.backward(rows, count)
        skip = self.check.check(self.world.all_reduce(loss), norm)
        self._clip(norm)
        self._update(skip)
        self.scaler.update()
        for weight in self.weights:
            weight.grad = None
        return self.check.numbers

    def backward(self, rows: Batch, count: Tensor | int) -> tuple[Tensor, Tensor]:
        """Compute the gradients of this process's rows, in pieces. Returns the loss of these rows and the norm of the gradients."""
        run, bounds = self.recipe.run, self._piece_bounds(rows)
        self.module.train()
        total = torch.zeros((), device=self.world.device)
        for piece in range(run.accumulate):
            part = rows.rows(bounds[piece], bounds[piece + 1]).to(self.world.device)
            with gradient_sync(self.module, last=piece == run.accumulate - 1):
                with self.autocast(), record_kernels() if self.kernels is None else nullcontext(self.kernels) as uses:
                    total_loss, self.carried_cache[piece] = self.module(
                        part.tensors, part.shared, run.kernel, self.carried_cache[piece]
                    )
                    loss = total_loss / count
                self.kernels = uses
                # DDP and FSDP average over the processes; the loss is a sum already divided by the whole count.
                self.scaler.scale(loss * self.world.world_size).backward()
            total += loss.detach()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        return total, _full(nn.utils.get_total_norm(self._gradients()))

    def kernel_lines(self) -> list[str]:
        """Returns which kernel each layer has used in the first pass, in words; of a compiled run those outside its graphs."""
        side = self.network.value if isinstance(self.network, Network) else None
        layers = getattr(side.body, "num_layers", None) if side is not None else None
        uses = self.kernels or []
        return describe(uses, "layer" if len(uses) == layers else "attention")

    def _piece_bounds(self, rows: Batch) -> list[int]:
        """The bounds of the pieces of this process's rows."""
        pieces = self.recipe.run.accumulate
        return [len(rows) * piece // pieces for piece in range(pieces + 1)]

    def _gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self.weights if weight.grad is not None]

    @torch.no_grad()
    def _clip(self, norm: Tensor) -> None:
        """Scale gradients whose norm is larger than optim.clip to that norm."""
        if largest := self.recipe.optim.clip:
            factor = largest / (norm + CLIP_EPSILON)
            torch._foreach_mul_(self._gradients(), torch.where(norm > largest, factor, torch.ones_like(factor)))

    @torch.no_grad()
    def _update(self, skip: Tensor) -> None:
        """Update the weights and their EMA, unless `skip` is 1."""
        for optimizer in self.optimizers:
            optimizer.found_inf = skip  # type: ignore[attr-defined]
            optimizer.step()
        for module in self.clamped:
            module.clamp_()
        if self.ema is not None:
            averages = list(self.ema.values())
            change = torch._foreach_sub([weight.detach() for weight in self.weights], averages)
            torch._foreach_mul_(change, (1 - self.recipe.optim.ema) * (1 - skip))
            torch._foreach_add_(averages, change)

    def cache_tensors(self) -> dict[str, Tensor]:
        """Returns the carried cache of all rows of the batch, in their order; empty if there is none."""
        local = [cache.state_dict() for cache in self.carried_cache if cache is not None]
        gathered = self.world.all_gather([{name: x.cpu() for name, x in piece.items()} for piece in local])
        pieces = [piece for pieces in gathered for piece in pieces]
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]} if pieces else {}

    def load_cache(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue with the cache of `cache_tensors`, which any number of processes may have saved."""
        rows = self.world.local_rows(Batch(tensors))
        pieces = [rows.rows(*bounds).to(self.world.device) for bounds in pairwise(self._piece_bounds(rows))]
        self.carried_cache = [Cache.from_state_dict(piece.tensors) for piece in pieces]

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Use the EMA of the weights, if there is one, inside this context."""
        if self.ema is None:
            yield
            return
        with torch.no_grad():
            weights = {name: p.detach().clone() for name, p in self.network.named_parameters()}
            self.use_ema()
            try:
                yield
            finally:
                for name, p in self.network.named_parameters():
                    p.copy_(weights[name])

    def use_ema(self) -> None:
        """Replace the weights by their EMA, if there is one."""
        if self.ema is not None:
            with torch.no_grad():
                for name, p in self.network.named_parameters():
                    p.copy_(self.ema[name])

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.recipe.run.precision, self.world.device)


def check_run(run: Run, data: TaskData, model: Model | EncoderDecoder, world: World) -> None:
    """Raises ValueError if the settings of a run do not fit the data, the model, the device or each other."""
    check_kernel(run.kernel)
    if run.precision == "fp16" and world.device.type == "cpu":
        raise ValueError("run.precision=fp16 on a CPU is about 80 times slower than fp32; use bf16 or fp32")
    if run.compile == "graphs" and (reason := unsupported_reason(run, model, world.world_size)):
        raise ValueError(f"run.compile=graphs cannot capture the steps of this run: {reason}; use run.compile=yes")
    if run.gather and (run.compile not in ("no", "auto") or run.kernel not in GATHER_KERNELS):
        raise ValueError(
            f"run.gather selects the positions that have not halted, which a compiled step cannot do, and only the kernels "
            f"{', '.join(GATHER_KERNELS)} compute some queries alone; leave run.gather out, or run.compile and run.kernel"
        )
    sizes = [batch_size(run, step) for step in (0, *(start for start, _ in run.batch_schedule))]
    if max(sizes) > data.examples():
        raise ValueError(
            f"a batch of {max(sizes)} is larger than the data set of {data.examples()} examples; lower run.batch"
        )
    if min(sizes) < world.world_size * run.accumulate:
        raise ValueError(
            f"a batch of {min(sizes)} cannot be split into {world.world_size} processes x {run.accumulate} pieces; raise it, or "
            "lower run.accumulate"
        )


def set_checkpoint_segments(network: nn.Module, checkpoint_segments: int) -> None:
    """Recompute the activations of the stacks in this many segments in the backward pass, to save memory."""
    for module in network.modules():
        if hasattr(module, "checkpoint_segments"):
            module.checkpoint_segments = checkpoint_segments  # type: ignore[assignment]


def set_gather(network: nn.Module, gather: bool) -> None:
    """Compute only the keys of positions that have halted."""
    able = [module for module in network.modules() if getattr(module, "can_gather", False)]
    if gather and not able:
        raise ValueError(
            "run.gather=true: no depth of this model copies halted positions through one layer without a convolution, score "
            "modifications or norms over positions; leave it out, or use universal-transformer with model.halting=freeze"
        )
    for module in able:
        module.gather = gather  # type: ignore[assignment]


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Returns the autocast context of a precision; for fp32 one that does nothing."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision_on(precision, device))
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def precision_on(precision: str, device: torch.device) -> str:
    """Returns the precision of a run on a device: what `run.precision` says, or what is best there if that is auto."""
    return precision if precision != "auto" else "fp32" if device.type == "cpu" else "bf16"


def _full(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x
