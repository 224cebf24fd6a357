"""`everyformer demo`: trains the tiny byte-language member on a few sonnets and lets it write. Small, but real."""

from __future__ import annotations

import math
import time
from importlib.resources import files

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from everyformer.cli.terminal import console, next_command
from everyformer.cli.thread import one_thread

STEPS, BATCH, RATE = 500, 16, 5e-3
PROMPT = b"Shall I compare "


@one_thread()
def demo() -> int:
    """Train a tiny Transformer on thirteen sonnets, byte by byte, in less than a minute, and let it write."""
    import torch
    from torch import Tensor
    from torch.nn import functional as F

    from everyformer.family.table import build, parameters
    from everyformer.infer.generate import generate
    from everyformer.network.model import Network

    torch.manual_seed(0)
    screen = console()
    network = build("byte-language", "tiny")
    assert isinstance(network, Network) and network.limit
    context = network.limit
    byte_N = torch.tensor(list((files("everyformer.cli") / "demo.txt").read_bytes()))
    sides = {"trained on": byte_N[: len(byte_N) * 7 // 8], "held out": byte_N[len(byte_N) * 7 // 8 :]}

    def loss(byte_BT: Tensor) -> Tensor:
        return F.cross_entropy(network(byte_BT[:, :-1]).logits.flatten(0, 1), byte_BT[:, 1:].flatten())

    @torch.no_grad()
    def bits() -> list[float]:
        """Bits per byte of each side, in windows one after the other."""
        return [loss(side.unfold(0, context + 1, context)).item() / math.log(2) for side in sides.values()]

    size = parameters(network.value)
    screen.print(f"byte-language:tiny with {size:,} parameters reads {len(byte_N):,} bytes of Shakespeare's sonnets")
    before, start, train_N = bits(), time.perf_counter(), sides["trained on"]
    optimizer = torch.optim.AdamW(network.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    columns = (
        BarColumn(),
        TextColumn("step {task.completed} of {task.total}, {task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=screen, disable=not screen.is_terminal) as bars:
        bar = bars.add_task("", total=STEPS)
        for step in range(1, STEPS + 1):
            start_B1 = torch.randint(0, len(train_N) - context, (BATCH, 1))
            cost = loss(train_N[start_B1 + torch.arange(context + 1)])
            optimizer.zero_grad()
            cost.backward()
            optimizer.step()
            schedule.step()
            bars.update(bar, completed=step, description=f"{cost.item() / math.log(2):.2f} bits per byte")
            if step % 100 == 0 and not screen.is_terminal:
                screen.print(f"step {step} of {STEPS}, {cost.item() / math.log(2):.2f} bits per byte")
    screen.print(f"\nbits per byte before and after {time.perf_counter() - start:.0f} seconds of training")
    for name, was, now in zip(sides, before, bits(), strict=True):
        screen.print(f"  {name:<12}{was:.2f} -> {now:.2f}")

    cached, plain = (
        generate(network, [PROMPT], 180, temperature=0.5, seed=0, cached=cached) for cached in (True, False)
    )
    screen.print(f"\nwritten after {PROMPT.decode()!r}, with the cache", style="dim")
    screen.print(bytes(cached[0]).decode("ascii", "replace"))
    same = cached == plain
    screen.print(f"\nthe same without the cache: {'yes' if same else 'NO'}", style="green" if same else "red")
    next_command(screen, "contracts byte-language")
    return 0 if same else 1
