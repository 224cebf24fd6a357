"""Image generation, one step at a time, in the model's order of generation.

A step is one channel of a pixel or, for a mixture of logistics, a pixel with all its channels. At position p the network
reads step p - 1 (at 0 a start token, or zeros) and predicts step p. Steps are sampled in turn from the model's distribution
given the earlier ones. The cache only saves computation: cached and uncached generation give equal images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everyformer.infer.forward import Forward
from everyformer.infer.sample import check_sampling, sample, seeded_generator
from everyformer.network.cache import Cache
from everyformer.network.grid import Grid
from everyformer.network.network import EncoderOutput, Network, evaluating
from everyformer.network.output_head import Logistics, OutputHead


@dataclass(frozen=True)
class ImageSequence:
    """How an image becomes a sequence. The grid has one column per step of a row, and defines the order of generation."""

    channels: int
    levels: int  # values of a channel
    grid: Grid
    joint: bool  # True: a step is a whole pixel

    @property
    def length(self) -> int:
        return self.grid.rows * self.grid.columns

    def flatten(self, image_BCYX: Tensor) -> Tensor:
        """Returns the steps of images in the order of generation: B, P, N, with N channels if joint, else 1."""
        step_BPN = image_BCYX.movedim(1, -1).reshape(len(image_BCYX), self.length, -1)
        return step_BPN[:, self._raster_index(image_BCYX.device)]

    def unflatten(self, step_BPN: Tensor) -> Tensor:
        """Returns the images of complete sequences of steps."""
        raster_BPN = torch.empty_like(step_BPN)
        raster_BPN[:, self._raster_index(step_BPN.device)] = step_BPN
        return raster_BPN.reshape(len(step_BPN), self.grid.rows, -1, self.channels).movedim(-1, 1)

    def encode(self, step_BTN: Tensor, first: int) -> Tensor:
        """Returns the network's inputs for consecutive steps, of which the first stands at position `first`."""
        if self.joint:
            return 2 * step_BTN.float() / (self.levels - 1) - 1
        position_T = torch.arange(first, first + step_BTN.shape[1], device=step_BTN.device)
        channel_T = self.grid.cells(position_T)[1] % self.channels
        return step_BTN[..., 0].long() + self.levels * channel_T

    def encode_from_start(self, step_BTN: Tensor) -> Tensor:
        """Returns the network's inputs for the first steps of an image, with the start input before them."""
        rest = self.encode(step_BTN, 0)
        start = rest.new_full((len(rest), 1, *rest.shape[2:]), 0 if self.joint else self.channels * self.levels)
        return torch.cat((start, rest), dim=1)

    def _raster_index(self, device: torch.device) -> Tensor:
        row_P, column_P = self.grid.cells(torch.arange(self.length, device=device))
        return row_P * self.grid.columns + column_P


@torch.no_grad()
def generate_images(
    network: Network,
    layout: ImageSequence,
    prefix_BPN: Tensor,
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
    """Returns all steps of images that begin with the steps `prefix_BPN` (B, 0, N for none).

    An image depends on the seed, its row in the batch and its prefix, not on the other images of the batch. The sampling
    options are those of `everyformer.infer.sample`; the other options go to the network.
    """
    check_sampling(temperature, top_k, top_p, min_p)
    seed = int(torch.randint(1 << 62, ())) if seed is None else seed
    generators = [seeded_generator(seed, row) for row in range(len(prefix_BPN))]
    output_head = network.value.outputs[head]

    def choose(logits_BV: Tensor) -> Tensor:
        return sample(logits_BV, temperature, generators, top_k=top_k, top_p=top_p, min_p=min_p)

    forward = Forward(network, head, layout.length - prefix_BPN.shape[1])
    cache, steps = Cache(), [prefix_BPN]
    with evaluating(network):
        inputs = layout.encode_from_start(prefix_BPN)
        for position in range(prefix_BPN.shape[1], layout.length):
            logits, after = forward(inputs, cache if cached else None, encoder_output=encoder_output, **options)
            cache = after or cache
            steps.append(_sample_step(layout, output_head, logits.float(), choose)[:, None])
            inputs = layout.encode(steps[-1], position) if cached else layout.encode_from_start(torch.cat(steps, dim=1))
    return torch.cat(steps, dim=1)


def _sample_step(
    layout: ImageSequence, output_head: OutputHead, output: Tensor, choose: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns one step: a value for each of its channels, sampled in turn."""
    if not isinstance(output_head, Logistics):
        return choose(output[:, : layout.levels])[:, None]
    step_BN = torch.empty(len(output), 0, dtype=torch.long, device=output.device)
    for _ in range(layout.channels):
        step_BN = torch.cat((step_BN, choose(output_head.next_logits(output, step_BN))[:, None]), dim=1)
    return step_BN
