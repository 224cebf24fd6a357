"""Painting: a picture step by step, in the order of generation.

A step is one channel of a pixel or, for a mixture of logistics, a pixel with all its channels. At position p the network reads the
step before, p - 1 (at 0 something that stands for none), and tells step p. The definition: steps are drawn in turn from the
model's distribution on what is there. The cache is a way of computing that, so cached and uncached pictures agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everyformer.infer.sample import check, generator, sample
from everyformer.network.cache import Cache
from everyformer.network.grid import Grid
from everyformer.network.network import EncoderOutput, Network, evaluating
from everyformer.network.output_head import Logistics, OutputHead


@dataclass(frozen=True)
class Scan:
    """How a picture is a sequence. The grid has a column for each step of a row, and says in which order they come."""

    channels: int
    levels: int  # values a channel can have
    grid: Grid
    joint: bool  # a step is a whole pixel

    @property
    def length(self) -> int:
        return self.grid.rows * self.grid.columns

    def unfold(self, image_BCYX: Tensor) -> Tensor:
        """The steps of pictures in the order of generation: B, P, N, with N channels where they are joint, else one."""
        step_BPN = image_BCYX.movedim(1, -1).reshape(len(image_BCYX), self.length, -1)
        return step_BPN[:, self._places(image_BCYX.device)]

    def fold(self, step_BPN: Tensor) -> Tensor:
        """The pictures of all their steps."""
        raster_BPN = torch.empty_like(step_BPN)
        raster_BPN[:, self._places(step_BPN.device)] = step_BPN
        return raster_BPN.reshape(len(step_BPN), self.grid.rows, -1, self.channels).movedim(-1, 1)

    def read(self, step_BTN: Tensor, first: int) -> Tensor:
        """What the network reads of some steps in a row, from the one at position `first` on."""
        if self.joint:
            return 2 * step_BTN.float() / (self.levels - 1) - 1
        position_T = torch.arange(first, first + step_BTN.shape[1], device=step_BTN.device)
        channel_T = self.grid.cells(position_T)[1] % self.channels
        return step_BTN[..., 0].long() + self.levels * channel_T

    def begin(self, step_BTN: Tensor) -> Tensor:
        """What it reads before the first of these steps, and the steps themselves."""
        rest = self.read(step_BTN, 0)
        none = rest.new_full((len(rest), 1, *rest.shape[2:]), 0 if self.joint else self.channels * self.levels)
        return torch.cat((none, rest), dim=1)

    def _places(self, device: torch.device) -> Tensor:
        row_P, column_P = self.grid.cells(torch.arange(self.length, device=device))
        return row_P * self.grid.columns + column_P


@torch.no_grad()
def paint(
    network: Network,
    scan: Scan,
    given_BPN: Tensor,
    *,
    head: int = 0,
    encoder_output: EncoderOutput | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    cached: bool = True,
    **options: Any,
) -> Tensor:
    """All steps of pictures that begin with the given ones (B, 0, N: with none). See `stream` for the ways to draw.

    A picture follows from the seed, its place in the batch and what is given of it, not from its neighbours.
    """
    check(temperature, top_k, top_p, min_p)
    seed = int(torch.randint(1 << 62, ())) if seed is None else seed
    random, kind = [generator(seed, row) for row in range(len(given_BPN))], network.value.outputs[head]

    def choose(logits_BV: Tensor) -> Tensor:
        return sample(logits_BV, temperature, random, top_k=top_k, top_p=top_p, min_p=min_p)

    cache, found = Cache(), [given_BPN]
    with evaluating(network):
        fresh = scan.begin(given_BPN)
        for step in range(given_BPN.shape[1], scan.length):
            output = network(fresh, cache=cache if cached else None, encoder_output=encoder_output, **options)
            cache = output.cache or cache
            found.append(_draw(scan, kind, output.logits_of(head)[:, -1].float(), choose)[:, None])
            fresh = scan.read(found[-1], step) if cached else scan.begin(torch.cat(found, dim=1))
    return torch.cat(found, dim=1)


def _draw(scan: Scan, head: OutputHead, answer: Tensor, choose: Any) -> Tensor:
    """One step: a value for each of its channels, in turn."""
    if not isinstance(head, Logistics):
        return choose(answer[:, : scan.levels])[:, None]
    step_BN = torch.empty(len(answer), 0, dtype=torch.long, device=answer.device)
    for _ in range(scan.channels):
        step_BN = torch.cat((step_BN, choose(head.next_logits(answer, step_BN))[:, None]), dim=1)
    return step_BN
