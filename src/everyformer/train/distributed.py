"""Training in several processes: the same command under torchrun. DDP, or FSDP2 with `run.shard`.

Each process takes a share of the rows of every batch; losses are sums divided by the count of the whole batch, so the training
curve equals that of a single process with the same batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.utils._pytree import tree_map

from everyformer.network.depth import DepthModule
from everyformer.network.repeat import RepeatModule
from everyformer.task.batch import Batch
from everyformer.train.loss_network import LossNetwork

LONG_TIMEOUT = timedelta(hours=12)  # while the main process learns a tokenizer, encodes a corpus or evaluates


@dataclass(frozen=True)
class World:
    """The processes of a run, and which of them this one is."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    long_group: Any = None  # a process group of all ranks with a long timeout

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def local_rows(self, batch: Batch) -> Batch:
        """Returns this process's rows; if they do not divide evenly, some processes have one more."""
        bounds = [len(batch) * rank // self.world_size for rank in range(self.world_size + 1)]
        return batch.rows(bounds[self.rank], bounds[self.rank + 1])

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(x)
        return x

    def all_gather(self, item: Any) -> list[Any]:
        """Returns the objects of all processes, by rank."""
        if self.world_size == 1:
            return [item]
        items: list[Any] = [None] * self.world_size
        dist.all_gather_object(items, item)
        return items

    def barrier(self) -> None:
        """Wait for all processes, however long the main process takes."""
        if self.world_size > 1:
            dist.barrier(self.long_group)

    def any(self, flag: bool) -> bool:
        """Returns True if the flag is set on any process. It waits for the processes, but not for their devices."""
        result = torch.tensor(float(flag))
        if self.world_size > 1:
            dist.all_reduce(result, group=self.long_group)
        return bool(result)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the body first in the main process, then in one process per machine, then in the others.

        So the later ones find in the cache on disk what the first ones stored there.
        """
        turn = 0 if self.is_main else 1 if os.environ.get("LOCAL_RANK") == "0" else 2
        for current in range(3):
            if current == turn:
                try:
                    yield
                except BaseException:
                    self.any(True)
                    raise
            if self.any(False):
                raise ValueError("another process failed before this one could continue; see its error")


@contextmanager
def init_world(device: str) -> Iterator[World]:
    """Join the processes that torchrun started, or be the only one."""
    chosen = find_device(device)
    if "WORLD_SIZE" not in os.environ:
        yield World(device=chosen)
        return
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
    owns_group = not dist.is_initialized()  # else it is the caller's
    if owns_group:
        store, rank, size = next(rendezvous("env://"))
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # torchrun's store outlives its workers: after a restart they would find the addresses of dead processes. On several
            # machines the restart count differs, and the agents must do this (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1).
            count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(count, store)  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    try:
        long_group = dist.new_group(backend="gloo", timeout=LONG_TIMEOUT)
        yield World(dist.get_rank(), dist.get_world_size(), chosen, long_group)
    finally:
        if owns_group:
            dist.destroy_process_group()


def restarted() -> bool:
    """Returns True if torchrun has restarted this command after a process died."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def find_device(name: str) -> torch.device:
    """Returns the device of a name; "auto" is CUDA if there is any. Raises ValueError if it cannot be used."""
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


def parallelize(module: LossNetwork, world: World, shard: bool) -> nn.Module:
    """Returns the module to call in training: the given one, DDP around it, or with the weights of its network sharded (FSDP2)."""
    if world.world_size == 1:
        return module
    if not shard:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(module, device_ids=[world.device] if world.device.type == "cuda" else None)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.world_size,))
    network = module.network  # whose own weights stay unsharded from its forward pass on, so the loss can use them
    stacks = [one for one in network.modules() if isinstance(one, DepthModule)]
    shared = {weight for stack in stacks for weight in stack.shared.parameters()}  # by layers: sharded with the network
    for stack in stacks:
        # A repeated depth is one unit, because processes may need different numbers of repetitions.
        for unit in [stack] if isinstance(stack, RepeatModule) else stack.layers:
            unit.register_forward_hook(_return_no_views)
            fully_shard(unit, mesh=mesh, ignored_params=shared)
    network.register_forward_hook(_return_no_views)
    fully_shard(network, mesh=mesh)
    return module


def _return_no_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """A forward hook, which runs before FSDP2's own. An in-place operation on a view would drop FSDP2's hook for the backward
    pass, and many outputs are views: nn.Linear with a bias returns one of a flattened product, an LSTM a transposed one."""
    return _map_tensors(lambda x: torch.ops.aten._unsafe_view(x, x.shape) if x.requires_grad else x, output)


def _map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to all tensors in nested containers and dataclasses."""

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return change(x)
        if not is_dataclass(x) or isinstance(x, type):
            return x
        return replace(x, **{one.name: _map_tensors(change, getattr(x, one.name)) for one in fields(x)})

    return tree_map(leaf, tree)


@contextmanager
def gradient_sync(module: Any, last: bool) -> Iterator[None]:
    """Synchronize gradients between processes only with the last piece of a batch."""
    if hasattr(module, "no_sync") and not last:
        with module.no_sync():
            yield
        return
    network: Any = getattr(module, "network", None)  # DDP has none
    if hasattr(network, "set_requires_gradient_sync"):
        network.set_requires_gradient_sync(last)
    yield
