"""Decoding in slots: every step has the same shapes, so on a GPU the whole step, from the embedding to the drawn token, is one CUDA graph.

    for token_B in Decoder(network, head, cache, first_B, generators, choose).tokens(200): ...

A graph is recorded for each number of slots, which doubles when they are full. Random numbers are drawn on the host, for each row from
its own generator, and copied ahead. Tokens reach the host one step behind, so the GPU never waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Generator, Tensor

from everyformer.infer.sample import BROKEN, draw_uniform
from everyformer.network.cache import Cache, EncoderKV, Entry, KVCache, LayerInputs, RecurrentState
from everyformer.network.network import EncoderOutput, Network
from everyformer.network.slots import Slots

AHEAD = 512  # steps for which random numbers are drawn at once
FEWEST = 256  # slots to begin with
Choose = Callable[[Tensor, Tensor], Tensor]  # from logits B, V and uniform numbers B, 1 to tokens B


def static_reason(entries: Sequence[Entry]) -> str | None:
    """Returns why the entries of a cache cannot be kept in slots, or None if they can."""
    if any(isinstance(entry, LayerInputs) for entry in entries):
        return "a causal convolution reads the inputs before the token, which slots do not keep in order"
    for entry in entries:
        if not isinstance(entry, KVCache | RecurrentState | EncoderKV):
            return f"slots do not know how {type(entry).__name__} grows"
    return None


class Decoder:
    """Continues the sequences of a cache, one token for each in every step."""

    def __init__(
        self,
        network: Network,
        head: int,
        cache: Cache,
        first_B: Tensor,
        generators: Sequence[Generator],
        choose: Choose,
        *,
        encoder_output: EncoderOutput | None = None,
        kernel: str = "auto",
    ):
        self.network, self.head, self.generators, self.choose = network, head, generators, choose
        self.most = most_slots(network)
        wanted = max(FEWEST, 1 << cache.length.bit_length())
        capacity = wanted if self.most is None else min(wanted, self.most)
        self.slots = Slots.of(network, cache, capacity, encoder_output=encoder_output, kernel=kernel)
        self.token_B1, self.filled = first_B[:, None].clone(), cache.length
        device = first_B.device
        self.uniform_NB = torch.zeros(AHEAD, len(first_B), dtype=torch.float64, device=device)
        self.step_1 = torch.zeros(1, dtype=torch.long, device=device)
        self.finite = torch.ones((), dtype=torch.bool, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def tokens(self, count: int) -> Iterator[Tensor]:
        """Yields `count` times the next tokens, on the host."""
        if self.token_B1.is_cuda:
            yield from self._one_behind(count)
            return
        for step in range(count):
            self._prepare(step, count)
            self._step()
            yield self._checked(self.token_B1[:, 0].clone(), self.finite)

    def _one_behind(self, count: int) -> Iterator[Tensor]:
        """The same on a GPU, where the next step is started before the tokens of the last one are read."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        waiting: tuple[Tensor, Tensor, torch.cuda.Event] | None = None
        for step in range(count):
            with torch.cuda.stream(stream):
                self._prepare(step, count)
                self._replay(stream)
                token_B = self.token_B1[:, 0].to("cpu", non_blocking=True)
                finite, event = self.finite.to("cpu", non_blocking=True), torch.cuda.Event()
                event.record(stream)
            if waiting is not None:
                waiting[2].synchronize()
                yield self._checked(*waiting[:2])
            waiting = token_B, finite, event
        if waiting is not None:
            waiting[2].synchronize()
            yield self._checked(*waiting[:2])

    def _prepare(self, step: int, count: int) -> None:
        """Makes room for one more token, and draws random numbers for the next steps, as many as will be used."""
        if step % AHEAD == 0:
            ahead = min(AHEAD, count - step)
            self.uniform_NB[:ahead].copy_(draw_uniform(self.generators, ahead))
            self.step_1.zero_()
        if self.filled == self.slots.capacity and self.slots.capacity != self.most:
            wanted = 2 * self.slots.capacity
            self.slots = self.slots.grown(wanted if self.most is None else min(wanted, self.most))
            self.graph = None
        self.filled = min(self.filled + 1, self.slots.capacity)

    def _step(self) -> None:
        logits = self.slots.step(self.token_B1)
        logits_BV = (logits[self.head] if isinstance(logits, tuple) else logits)[:, -1]
        self.finite &= logits_BV.amax(-1).isfinite().all()
        u_B1 = self.uniform_NB.index_select(0, self.step_1)[0, :, None]
        self.token_B1.copy_(self.choose(logits_BV, u_B1)[:, None])
        self.step_1 += 1

    def _replay(self, stream: torch.cuda.Stream) -> None:
        if self.graph is None:
            state = [x.clone() for x in self._state()]
            for _ in range(2):  # kernels are compiled and workspaces allocated before the recording
                self._step()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                self._step()
            for x, before in zip(self._state(), state, strict=True):
                x.copy_(before)
        self.graph.replay()

    def _state(self) -> list[Tensor]:
        """What a step changes, without keys and values, which the next step writes again."""
        return [self.token_B1, self.step_1, self.finite, *self.slots.state()]

    def _checked(self, token_B: Tensor, finite: Tensor) -> Tensor:
        if not bool(finite):
            raise ValueError(BROKEN)
        return token_B


def most_slots(network: Network) -> int | None:
    """Returns the number of slots that a model can ever need: the positions it attends to, or has. None: no limit."""
    memory, distance = network.value.memory, network.max_distance()
    reach = ([] if memory is None else [memory.length]) + ([] if distance is None else [distance])
    sizes = ([max(1, min(reach)) + 1] if reach else []) + ([network.limit] if network.limit is not None else [])
    return min(sizes) if sizes else None
