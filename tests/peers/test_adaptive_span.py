"""The published module of adaptive span (facebookresearch/adaptive-span): its numbers, once computed in float64.

`adaptive_span.json` has its weights, tokens, a full memory, and what it made of them. Its z is ours less 1, because it counts
distances from the nearest key; its weights are divided by their sum + 1e-8, which is the difference that is left.
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

FOUND = json.loads((Path(__file__).parent / "adaptive_span.json").read_text())
LIMIT = 1e-6  # that 1e-8 moves the slopes by 2e-7, and nothing else does


def double(numbers: list[Any]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.fixture
def network() -> Any:
    sizes, given = FOUND["sizes"], {name: double(x) for name, x in FOUND["weights"].items()}
    network: Any = everyformer.build("adaptive-span", "tiny", **sizes, dropout=0.0)

    def weights(number: int) -> dict[str, Tensor]:
        theirs, ours = f"layers.{number}.", f"body.layers.{number}."
        maps = [given[f"{theirs}attn.proj_{name}.weight"] for name in ("query", "key", "val")]
        span = given[f"{theirs}attn.attn.adaptive_span._mask.current_val"].flatten()
        found = {
            "attention.heads.qkv.weight": torch.cat(maps),
            "attention.heads.out.weight": given[f"{theirs}attn.proj_out.weight"],
            "attention.score_mods.0.key_RE": torch.cat(
                (given["key_pe"][0].T, double([[0.0] * 4]))
            ),  # distances 10 .. 1, 0
            "attention.score_mods.1.fraction_H": span + 1 / sizes["span"],
        }
        for side in ("weight", "bias"):
            found[f"feedforward.hidden.0.{side}"] = given[f"{theirs}ff.fc1.{side}"]
            found[f"feedforward.out.{side}"] = given[f"{theirs}ff.fc2.{side}"]
            found[f"steps.attention.norm.{side}"] = given[f"{theirs}norm1.{side}"]
            found[f"steps.feedforward.norm.{side}"] = given[f"{theirs}norm2.{side}"]
        return {ours + name: x for name, x in found.items()}

    taken = {"embed.table.weight": given["in_emb.weight"]}
    taken |= {"outputs.0.map.weight": given["out_emb.weight"], "outputs.0.bias": given["out_emb.bias"]}
    missing, unknown = network.double().load_state_dict(taken | weights(0) | weights(1), strict=False)
    assert not unknown and missing == ["body.shared.0.key_RE"]  # another name of what the layers have
    return network


@pytest.mark.spec(92, 93, 94, 95)
def test_the_member_is_the_published_module(network: Any) -> None:
    """Log-probabilities, the next memory, the penalty, and the slopes of the spans."""
    memory = tuple(LayerInputs(double(x)) for x in FOUND["memory"])
    span, layers, cost = (FOUND["sizes"][name] for name in ("span", "layers", "cost"))
    output = network(torch.tensor(FOUND["tokens"]), cache=Cache(span, memory, hidden=True))
    found, wanted = output.logits.log_softmax(-1), double(FOUND["log_probabilities"])
    assert (found - wanted).abs().max() < LIMIT
    for ours, theirs in zip(output.cache.layers, FOUND["next_memory"], strict=True):
        assert (ours.x_BMD - double(theirs)).abs().max() < LIMIT
    assert abs(output.aux["penalty"] - FOUND["span_loss"] - cost * layers) < LIMIT  # z is 1 more in every layer
    direction = torch.arange(found.numel()).reshape(found.shape).double().cos()
    spans = [layer.attention.score_mods[1].fraction_H for layer in network.body.layers]
    for slope, theirs in zip(torch.autograd.grad((found * direction).sum(), spans), FOUND["span_slopes"], strict=True):
        assert (slope - double(theirs)).abs().max() < LIMIT
