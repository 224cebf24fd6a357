"""Decoding in slots: every step has the same shapes, so on a GPU the whole step, from the embedding to the drawn token, is one CUDA graph.

    for token_B in Decoder(forward, cache, first_B, generators, sampling).tokens(200): ...

Where it serves the model, network/fused_step.py computes the step, and on a GPU the programs of infer/draw.py draw tokens without
filters. A graph is recorded for each number of slots, which doubles when they are full. Random numbers are drawn on the host, for
each row from its own generator, and copied ahead. Tokens reach the host one step behind, so the GPU never waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from everyformer.infer.draw import Sampling, draw, draws
from everyformer.infer.forward import Forward
from everyformer.infer.recorded import Recorded
from everyformer.infer.sample import BROKEN, choose, draw_uniform
from everyformer.network.cache import Cache, EncoderKV, Entry, KVCache, LayerInputs, RecurrentState
from everyformer.network.fused_step import fused_reason
from everyformer.network.network import EncoderOutput, Network
from everyformer.network.slots import Slots, room

AHEAD = 512  # steps for which random numbers are drawn at once
FEWEST = 256  # slots to begin with
WORTHWHILE = 64  # tokens from which on the programs of a fused step are worth their compilation


def static_reason(entries: Sequence[Entry]) -> str | None:
    """Returns why the entries of a cache cannot be kept in slots, or None if they can."""
    if any(isinstance(entry, LayerInputs) for entry in entries):
        return "a causal convolution reads the inputs before the token, which slots do not keep in order"
    for entry in entries:
        if not isinstance(entry, KVCache | RecurrentState | EncoderKV):
            return f"slots do not know how {type(entry).__name__} grows"
    return None


def choose_fused(network: Network, fused: bool | None, kernel: str = "auto") -> bool:
    """Returns whether steps in slots are fused. None: where they can be. Raises ValueError if `fused` is True and they cannot be."""
    if fused is False:
        return False
    named = None if kernel == "auto" else f"the kernel {kernel} computes the attention, not the fused step"
    reason = named or fused_reason(network)
    if fused and reason:
        raise ValueError(f"fused=True, but {reason}; leave fused= out")
    return reason is None


class Decoder:
    """Continues the sequences of a cache, one token for each in every step."""

    def __init__(
        self,
        forward: Forward,
        cache: Cache,
        first_B: Tensor,
        generators: Sequence[Generator],
        sampling: Sampling,
        *,
        encoder_output: EncoderOutput | None = None,
        kernel: str = "auto",
        fused: bool | None = None,
    ):
        self.forward, self.generators, self.sampling = forward, generators, sampling
        steps = choose_fused(forward.network, fused, kernel)
        self.draws = steps and first_B.is_cuda and draws(sampling)
        self.most = most_slots(forward.network)
        device, rows = first_B.device, len(first_B)
        capacity = self._capacity(cache.length + 1, device)
        options: dict[str, Any] = {"encoder_output": encoder_output, "kernel": kernel, "fused": steps}
        self.slots = Slots.of(forward.network, cache, capacity, **options)
        # The tokens, and for each row 1, or 0 once its logits are broken: they reach the host in one copy.
        self.result_2B = torch.stack((first_B.long(), torch.ones_like(first_B.long())))
        self.token_B1, self.finite_B, self.filled = self.result_2B[0, :, None], self.result_2B[1], cache.length
        self.uniform_NB = torch.zeros(AHEAD, rows, dtype=torch.float64, device=device)
        self.step_1 = torch.zeros(1, dtype=torch.long, device=device)
        self.temperature_B = torch.full((rows,), sampling[0], dtype=torch.float64, device=device)
        self.recorded: Recorded[None] | None = None

    def tokens(self, count: int) -> Iterator[Tensor]:
        """Yields `count` times the next tokens, on the host."""
        if self.token_B1.is_cuda:
            yield from self._one_behind(count)
            return
        for step in range(count):
            with self.forward.used():
                self._prepare(step, count)
                self._step()
            yield self._checked(self.result_2B.clone())

    def keep(self, rows: list[int]) -> None:
        """Leaves out the other rows. Only where no step is recorded, between two tokens."""
        index_B = torch.tensor(rows)
        self.slots = self.slots.of_rows(index_B)
        self.generators = [self.generators[row] for row in rows]
        self.result_2B, self.uniform_NB = self.result_2B[:, index_B], self.uniform_NB[:, index_B]
        self.token_B1, self.finite_B = self.result_2B[0, :, None], self.result_2B[1]

    def _one_behind(self, count: int) -> Iterator[Tensor]:
        """The same on a GPU, where the next step is started before the tokens of the last one are read."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        results = torch.empty(2, *self.result_2B.shape, dtype=torch.long, pin_memory=True)
        events = torch.cuda.Event(), torch.cuda.Event()
        for step in range(count + 1):
            if step < count:
                with torch.cuda.stream(stream):
                    self._prepare(step, count)
                    self.recorded = self.recorded or Recorded(self._step, self._state())
                    self.recorded.replay()
                    results[step % 2].copy_(self.result_2B, non_blocking=True)
                    events[step % 2].record(stream)
            if step > 0:
                events[(step - 1) % 2].synchronize()
                yield self._checked(results[(step - 1) % 2].clone())

    def _prepare(self, step: int, count: int) -> None:
        """Makes room for one more token, and draws random numbers for the next steps, as many as will be used."""
        if step % AHEAD == 0:
            ahead = min(AHEAD, count - step)
            self.uniform_NB[:ahead].copy_(draw_uniform(self.generators, ahead))
            self.step_1.zero_()
        if self.filled == self.slots.capacity and self.slots.capacity != self.most:
            self.slots = self.slots.grown(self._capacity(self.filled + 1, self.token_B1.device))
            self.recorded = None
        self.filled = min(self.filled + 1, self.slots.capacity)

    def _capacity(self, length: int, device: torch.device) -> int:
        wanted = room(length, FEWEST, device)
        return wanted if self.most is None else min(wanted, self.most)

    def _step(self) -> None:
        logits_BV = self.forward.next_logits(self.slots, self.token_B1)[:, -1]
        if self.draws:
            draw(logits_BV, self.uniform_NB, self.step_1, self.temperature_B, self.token_B1, self.finite_B)
        else:
            self.finite_B *= logits_BV.amax(-1).isfinite()
            u_B1 = self.uniform_NB.index_select(0, self.step_1)[0, :, None]
            self.token_B1.copy_(choose(logits_BV, u_B1, *self.sampling)[:, None])
        self.step_1 += 1

    def _state(self) -> list[Tensor]:
        """What a step changes, without keys and values, which the next step writes again."""
        return [self.result_2B, self.step_1, *self.slots.state()]

    def _checked(self, result_2B: Tensor) -> Tensor:
        if not result_2B[1].all():
            raise ValueError(BROKEN)
        return result_2B[0]


def most_slots(network: Network) -> int | None:
    """Returns the number of slots that a model can ever need: the positions it attends to, or has. None: no limit."""
    memory, distance = network.value.memory, network.max_distance()
    reach = ([] if memory is None else [memory.length]) + ([] if distance is None else [distance])
    sizes = ([max(1, min(reach)) + 1] if reach else []) + ([network.limit] if network.limit is not None else [])
    return min(sizes) if sizes else None
