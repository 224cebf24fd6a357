"""Auxiliary predictions: more to predict in training, by maps that generation and evaluation do not use.

Paper: Al-Rfou et al. 2018, Character-Level Language Modeling with Deeper Self-Attention. In training, every layer predicts the next
token (`every_layer`), and each prediction also covers the tokens after the next (`extra_targets`), each through a map of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from everyformer.attention.context import Probe
from everyformer.network.embed import Embed
from everyformer.network.linear_cross_entropy import LogitMap
from everyformer.network.output_head import Language, vocabulary_size
from everyformer.value import Count, Value


class AuxiliaryPredictions(Value, frozen=True):
    """Predictions of the `extra_targets` tokens after the next, and with `every_layer` of all of them by every layer.

    Example: `AuxiliaryPredictions(extra_targets=1, every_layer=True)`.
    """

    extra_targets: Count = 1
    every_layer: bool = True

    def build(self, width: int, embed: Embed, head: Language, layers: int) -> nn.ModuleList:
        """The maps of each predicting layer. The next token of the last layer is predicted by the language head itself."""
        size = head.vocabulary or vocabulary_size(embed)
        counts = [1 + self.extra_targets] * (layers - 1 if self.every_layer else 0) + [self.extra_targets]
        return nn.ModuleList(
            nn.ModuleList(nn.Linear(width, size, bias=head.bias) for _ in range(count)) for count in counts
        )


class Prediction(NamedTuple):
    layer: int  # counted from 1
    offset: int  # 0: the next token, 1: the one after it, ...
    logits: Tensor | LogitMap


class AuxiliaryNetwork(nn.Module):
    """A `network` together with its auxiliary predictions, as training calls it.

    Example: `AuxiliaryNetwork(build("deep-character", "tiny"))(token_BT)`.
    """

    def __init__(self, network: Any):
        super().__init__()
        if network.auxiliary is None:
            raise ValueError("the model has no auxiliary predictions; build it with auxiliary=AuxiliaryPredictions()")
        self.network = network

    def forward(
        self, inputs: Any, *, lowest_layer: int = 1, logits: bool = True, **options: Any
    ) -> tuple[Any, tuple[Prediction, ...]]:
        """Returns the network's output and the predictions of the layers from `lowest_layer` on, counted from 1.

        With `logits` False their logits are a `LogitMap`, as those of the output.
        """
        maps = self.network.auxiliary
        probe = Probe(records_weights=False, records_layers=len(maps) > 1, logits=logits)
        output = self.network(inputs, probe=probe, **options)
        predictions: list[Prediction] = []
        unused = output.hidden.new_zeros(())
        for layer, (x_BTD, layer_maps) in enumerate(zip((*probe.layers, output.hidden), maps, strict=True), 1):
            if layer < lowest_layer:
                # A gradient of 0, because with several processes each waits for one of every weight.
                unused = unused + sum(0 * weight.sum() for weight in layer_maps.parameters())
                continue
            first = int(layer == len(maps))  # the language head predicts the next token of the last layer
            for offset, one in enumerate(layer_maps, first):
                prediction = LogitMap(x_BTD, one.weight, one.bias)
                predictions.append(Prediction(layer, offset, prediction.logits() if logits else prediction))
        return replace(output, aux=output.aux | {"unused": unused}), tuple(predictions)
