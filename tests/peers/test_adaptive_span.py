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
            "attention.heads.qkv.weight": torch.cat(maps),
            "attention.heads.out.weight": theirs[f"{prefix}attn.proj_out.weight"],
            "attention.score_mods.0.key_RE": torch.cat(
                (theirs["key_pe"][0].T, double([[0.0] * 4]))
            ),  # distances 10 .. 1, 0
            "attention.score_mods.1.part_H": span + 1 / sizes["span"],
        }
        for side in ("weight", "bias"):
            layer[f"feedforward.hidden.0.{side}"] = theirs[f"{prefix}ff.fc1.{side}"]
            layer[f"feedforward.out.{side}"] = theirs[f"{prefix}ff.fc2.{side}"]
            layer[f"steps.attention.norm.{side}"] = theirs[f"{prefix}norm1.{side}"]
            layer[f"steps.feedforward.norm.{side}"] = theirs[f"{prefix}norm2.{side}"]
        return {ours + name: x for name, x in layer.items()}

    state = {"embed.table.weight": theirs["in_emb.weight"]}
    state |= {"outputs.0.map.weight": theirs["out_emb.weight"], "outputs.0.bias": theirs["out_emb.bias"]}
    missing, unknown = network.double().load_state_dict(state | weights(0) | weights(1), strict=False)
    assert not unknown and missing == ["body.shared.0.key_RE"]  # a second name of the layers' shared table
    return network


@pytest.mark.spec(92, 93, 94, 95)
def test_the_member_is_the_published_module(network: Any) -> None:
    """Log-probabilities, the next memory, the penalty, and the slopes of the spans."""
    memory = tuple(LayerInputs(double(x)) for x in FOUND["memory"])
    span, layers, cost = (FOUND["sizes"][name] for name in ("span", "layers", "cost"))
    output = network(torch.tensor(FOUND["tokens"]), cache=Cache(span, memory, hidden=True))
    found, wanted = output.logits.log_softmax(-1), double(FOUND["log_probabilities"])
    assert (found - wanted).abs().max() < LIMIT
    for ours, theirs in zip(output.cache.entries, FOUND["next_memory"], strict=True):
        assert (ours.x_BMD - double(theirs)).abs().max() < LIMIT
    assert abs(output.aux["penalty"] - FOUND["span_loss"] - cost * layers) < LIMIT  # z is 1 more in every layer
    direction = torch.arange(found.numel()).reshape(found.shape).double().cos()
    spans = [layer.sublayers[0].score_mods[1].part_H for layer in network.body.layers]
    for slope, theirs in zip(torch.autograd.grad((found * direction).sum(), spans), FOUND["span_slopes"], strict=True):
        assert (slope - double(theirs)).abs().max() < LIMIT
