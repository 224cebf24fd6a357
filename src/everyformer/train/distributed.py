"""Several processes: the same command under torchrun. DDP, or FSDP2 where `run.shard` is set.

Each process takes its share of the rows of every batch; losses are sums divided by the whole batch's count, so the curve
is the single process's at the same batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from everyformer.network.depth import DepthModule
from everyformer.network.repeat import RepeatModule
from everyformer.task.work import Batch

PATIENCE = timedelta(hours=12)  # the others wait while the first learns a tokenizer, encodes a corpus or evaluates


@dataclass(frozen=True)
class World:
    """Which process this is, of how many."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    patient: Any = None  # the same processes, as a group that waits long

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, batch: Batch) -> Batch:
        """This process's rows; some processes have one more where they do not divide."""
        bounds = [len(batch) * rank // self.size for rank in range(self.size + 1)]
        return batch.rows(bounds[self.rank], bounds[self.rank + 1])

    def sum(self, x: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def gather(self, thing: Any) -> list[Any]:
        """The things of all processes, in their order."""
        if self.size == 1:
            return [thing]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, thing)
        return found

    def wait(self) -> None:
        """For all, however long the first takes."""
        if self.size > 1:
            dist.barrier(self.patient)

    def any(self, flag: bool) -> bool:
        """Is it so on any process?"""
        return bool(self.sum(torch.tensor(float(flag), device=self.device)).item()) if self.size > 1 else flag

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """First one process, then one on each machine, then the others: they find in the cache what the first put there."""
        turn = 0 if self.first else 1 if os.environ.get("LOCAL_RANK") == "0" else 2
        for now in range(3):
            if now == turn:
                try:
                    yield
                except BaseException:
                    self._failed(True)
                    raise
            if self._failed(False):
                raise ValueError("another process could not do what this one was to do after it; its error says why")

    def _failed(self, here: bool) -> bool:
        flag = torch.tensor(float(here))
        if self.size > 1:
            dist.all_reduce(flag, group=self.patient)
        return bool(flag)


@contextmanager
def world(device: str) -> Iterator[World]:
    """The processes that torchrun started, or this one alone."""
    chosen = find_device(device)
    if "WORLD_SIZE" not in os.environ:
        yield World(device=chosen)
        return
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
    mine = not dist.is_initialized()  # else the caller's own
    if mine:
        store, rank, size = next(rendezvous("env://"))
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # torchrun's store outlives the processes: begun anew, they would meet the addresses of the dead. On several
            # machines the count is not the same everywhere, and its agents must do it (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1).
            count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(count, store)  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    try:
        patient = dist.new_group(backend="gloo", timeout=PATIENCE)
        yield World(dist.get_rank(), dist.get_world_size(), chosen, patient)
    finally:
        if mine:
            dist.destroy_process_group()


def restarted() -> bool:
    """Has torchrun begun this command anew, after a process died?"""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(" device type at start")[0]
        reason = "no such kind of device" if reason.startswith("Expected one of") else reason
        others = "auto, cpu or cuda" if torch.cuda.is_available() else "auto or cpu"
        raise ValueError(f"the device {name} cannot be used here ({reason}); try {others}") from None
    return device


def spread(network: nn.Module, here: World, shard: bool) -> nn.Module:
    """The module to call in training: the network itself, DDP around it, or the network with its weights sharded."""
    if here.size == 1:
        return network
    if not shard:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(network, device_ids=[here.device] if here.device.type == "cuda" else None)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(here.device.type, (here.size,))
    stacks = [module for module in network.modules() if isinstance(module, DepthModule)]
    shared = {weight for stack in stacks for weight in stack.shared.parameters()}  # by layers, so of the network itself
    for stack in stacks:
        # A repeated depth is gathered once for all steps, because processes may need different numbers of them.
        for module in [stack] if isinstance(stack, RepeatModule) else stack.layers:
            fully_shard(module, mesh=mesh, ignored_params=shared)
    fully_shard(network, mesh=mesh)
    return network


@contextmanager
def syncing(network: Any, last: bool) -> Iterator[None]:
    """Gradients go between processes only with the last piece of a batch."""
    if hasattr(network, "no_sync") and not last:
        with network.no_sync():
            yield
        return
    if hasattr(network, "set_requires_gradient_sync"):
        network.set_requires_gradient_sync(last)
    yield
