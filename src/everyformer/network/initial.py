"""Initialization of weights.

AsTorch   the defaults of torch, except that an embedding table which an output head shares has the std 1/sqrt(width): with torch's
          std of 1 the first logits are so large that the model repeats its input
Normal    normal with one std, biases 0 (BERT, GPT-2). The std is meant for widths from 768 on, those of the published models: in a
          narrower model it is larger by sqrt(768 / width), so that its first layers compute as those do;
          `reference` sets another width, None leaves the std as it is. `by_depth` divides the maps that end a residual branch by
          sqrt(number of branches) (Child et al. 2019: 1/sqrt(2N) for N layers of two; Radford et al. 2019). `by_width` divides by
          sqrt(inputs of the map), for tables by sqrt(width) (Child et al. 2019: 0.125/sqrt(d)). With `zero_ends` the maps that end a
          residual branch, and a language head that has a map of its own, are 0: each branch starts as the identity and the first
          logits are equal (Zhang et al. 2019, Fixup; Yang et al. 2022)
FanIn     normal with variance 1 / inputs of each map; tables have the std 1, as the first layers of T5 expect (Raffel et al. 2019).
          Where scores are not scaled, the maps of queries are smaller by sqrt(head width).
Xavier    uniform by fan-in and fan-out (Glorot & Bengio 2010), as tensor2tensor initializes the Transformer

A weight that its module initializes itself and marks with `keep_initialized`, such as the bias of an LSTM's forget gate, is not
changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from everyformer.attention.projection import LinearProjectionModule
from everyformer.network.sublayer import SublayerModule
from everyformer.value import Positive, Size, Value


class Initial:
    """A value that initializes the weights of a built network. Example: `class Zeros(Initial, Value, frozen=True)`."""

    __slots__ = ()

    def fill(self, network: nn.Module) -> None:
        """Initializes the weights of the network, in place."""
        raise NotImplementedError


def keep_initialized(weight: Tensor) -> None:
    """Marks a weight that keeps its own initialization."""
    weight.keep_initialized = True  # type: ignore[attr-defined]


def _free(weight: Tensor | None) -> bool:
    return weight is not None and not hasattr(weight, "keep_initialized")


class AsTorch(Initial, Value, frozen=True):
    """PyTorch's own initialization; a tied table is scaled to logits of variance 1.

    Example: `Model(width=64, embed=Tokens(256), body=body, outputs=(Language(),), initial=AsTorch())`.
    """

    def fill(self, network: nn.Module) -> None:
        value: Any = network.value
        if any(head.uses_table for head in value.outputs):
            nn.init.normal_(network.embed.table.weight, std=(value.embed_width or value.width) ** -0.5)  # type: ignore[union-attr, arg-type]


class Normal(Initial, Value, frozen=True):
    """Weights from a normal distribution. Example: `Normal(std=0.02, by_depth=True)`.

    std         of the weights of a model as wide as `reference`; a narrower model has a larger one. Without a reference: of all
    by_depth    whether the last map of each sublayer is scaled by 1 / sqrt(the number of sublayers), as in GPT-2
    by_width    whether each map has `std` / sqrt(the number of its inputs) instead
    zero_ends   whether the last maps of sublayers and the output map start at 0
    """

    std: Positive = 0.02
    by_depth: bool = False
    by_width: bool = False
    reference: Size | None = 768
    zero_ends: bool = False

    def std_of(self, width: int) -> float:
        """Returns the std of the weights of a model of a width, before they are scaled by depth or by their own width."""
        if self.by_width or self.reference is None:
            return self.std
        return self.std * max(1.0, self.reference / width) ** 0.5

    def fill(self, network: nn.Module) -> None:
        std = self.std_of(network.value.width)  # type: ignore[union-attr, arg-type]
        sublayers = [module for module in network.modules() if isinstance(module, SublayerModule)]
        ends = {last for sublayer in sublayers if (last := sublayer.output_map()) is not None}
        heads = zip(network.outputs, network.value.outputs, strict=True)  # type: ignore[union-attr, arg-type]
        zeros = ends | {module.map for module, head in heads if hasattr(module, "logit_map") and not head.uses_table}
        for module in network.modules():
            if isinstance(module, nn.Linear | nn.Embedding) and _free(module.weight):
                scale = len(ends) ** -0.5 if self.by_depth and module in ends else 1.0
                scale *= module.weight.shape[1] ** -0.5 if self.by_width else 1.0
                nn.init.normal_(module.weight, std=std * scale)
                if self.zero_ends and module in zeros:
                    nn.init.zeros_(module.weight)
            if isinstance(module, nn.Linear) and _free(module.bias):
                nn.init.zeros_(module.bias)


class FanIn(Initial, Value, frozen=True):
    """Normal weights of variance 1 / inputs, and tables of std 1, as T5's.

    Example: `Model(width=64, embed=Tokens(256), body=body, outputs=(Language(),), initial=FanIn())`.
    """

    def fill(self, network: nn.Module) -> None:
        for module in network.modules():
            if isinstance(module, nn.Linear) and _free(module.weight):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if isinstance(module, nn.Linear) and _free(module.bias):
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight)
        for module in network.modules():
            if isinstance(module, LinearProjectionModule) and module.qkv is not None and module.scale == 1.0:
                with torch.no_grad():
                    module.qkv.weight[: module.queries] *= module.key_width**-0.5


class Xavier(Initial, Value, frozen=True):
    """Uniform weights by the sizes of each map (Glorot & Bengio 2010).

    Example: `Model(width=64, embed=Tokens(256), body=body, outputs=(Language(),), initial=Xavier())`.
    """

    def fill(self, network: nn.Module) -> None:
        for module in network.modules():
            if isinstance(module, nn.Linear) and _free(module.weight):
                nn.init.xavier_uniform_(module.weight)
            if isinstance(module, nn.Linear) and _free(module.bias):
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        for module in network.modules():
            if isinstance(module, LinearProjectionModule) and module.qkv is not None:
                for weight in module.qkv.weight.split([n for n in (module.queries, module.keys, module.values) if n]):
                    nn.init.xavier_uniform_(weight)  # queries, keys and values share a matrix; each has its own fan-out
