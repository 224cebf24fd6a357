"""adaptive-span equals the published code (facebookresearch/adaptive-span) on outputs that were recorded in float64.

`adaptive_span.json` holds its weights, tokens, a full memory and the outputs. Its z is ours minus 1, because it counts distances from
the nearest key. It divides the attention weights by their sum + 1e-8, which explains the remaining difference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import everyformer
from everyformer import Cache
from everyformer.network.cache import LayerInputs

RECORDED = json.loads((Path(__file__).parent / "adaptive_span.json").read_text())
LIMIT = 1e-6  # the 1e-8 changes the gradients by 2e-7


def double(numbers: list[Any]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.fixture
def network() -> Any:
    sizes, theirs = RECORDED["sizes"], {name: double(x) for name, x in RECORDED["weights"].items()}
    network: Any = everyformer.build("adaptive-span", "tiny", **sizes, dropout=0.0)

    def weights(number: int) -> dict[str, Tensor]:
        prefix, ours = f"layers.{number}.", f"body.layers.{number}."
        maps = [theirs[f"{prefix}attn.proj_{name}.weight"] for name in ("query", "key", "val")]
        span = theirs[f"{prefix}attn.attn.adaptive_span._mask.current_val"].flatten()
        layer = {
            "sublayers.0.heads.qkv.weight": torch.cat(maps),
            "sublayers.0.heads.out.weight": theirs[f"{prefix}attn.proj_out.weight"],
            "sublayers.0.score_mods.1.fraction_H": span + 1 / sizes["span"],
        }
        for side in ("weight", "bias"):
            layer[f"sublayers.1.hidden.0.{side}"] = theirs[f"{prefix}ff.fc1.{side}"]
            layer[f"sublayers.1.out.{side}"] = theirs[f"{prefix}ff.fc2.{side}"]
            layer[f"residuals.0.norm.{side}"] = theirs[f"{prefix}norm1.{side}"]
            layer[f"residuals.1.norm.{side}"] = theirs[f"{prefix}norm2.{side}"]
        return {ours + name: x for name, x in layer.items()}

    state = {"embed.table.weight": theirs["in_emb.weight"]}
    state["body.shared.0.key_RE"] = torch.cat((theirs["key_pe"][0].T, double([[0.0] * 4])))  # distances 10 .. 1, 0
    state |= {"outputs.0.map.weight": theirs["out_emb.weight"], "outputs.0.bias": theirs["out_emb.bias"]}
    network.double().load_state_dict(state | weights(0) | weights(1))
    return network


@pytest.mark.spec(92, 93, 94, 95)
def test_adaptive_span_equals_the_published_code(network: Any) -> None:
    """Compares log-probabilities, the next memory, the penalty, and the gradients of the spans."""
    memory = tuple(LayerInputs((double(x),), True) for x in RECORDED["memory"])
    span, layers, cost = (RECORDED["sizes"][name] for name in ("span", "layers", "cost"))
    output = network(torch.tensor(RECORDED["tokens"]), cache=Cache(span, memory, segment_memory=True))
    log_p, expected = output.logits.log_softmax(-1), double(RECORDED["log_probabilities"])
    assert (log_p - expected).abs().max() < LIMIT
    for ours, theirs in zip(output.cache.entries, RECORDED["next_memory"], strict=True):
        assert (ours.tensors[0] - double(theirs)).abs().max() < LIMIT
    penalty = RECORDED["span_loss"] + cost * layers  # our z is larger by 1 in every layer
    assert abs(output.aux["penalty"] - penalty) < LIMIT
    direction = torch.arange(log_p.numel()).reshape(log_p.shape).double().cos()
    spans = [layer.sublayers[0].score_mods[1].fraction_H for layer in network.body.layers]
    gradients = torch.autograd.grad((log_p * direction).sum(), spans)
    for gradient, theirs in zip(gradients, RECORDED["span_gradients"], strict=True):
        assert (gradient - double(theirs)).abs().max() < LIMIT
