"""Layers of Reformer and of Transformer-XL equal transformers 4.35.2, on outputs recorded by fixtures/make.py.

Later versions have no Transformer-XL; test_import_reformer.py compares a whole Reformer with today's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from everyformer import Alibi, Attention, Cache, Chunked, Context, FourTerm, ScoreModModule, Shared, build
from tests.spec import lsh

FIXTURES = Path(__file__).parent / "fixtures"
BUCKETS, CHUNK, MEMORY, SEGMENT = 4, 4, 6, 4


class AddLogCount(ScoreModModule):
    """Adds log N_ij to the scores, so that a key counts once per hash round that contains it."""

    def __init__(self, log_BHQK: Tensor):
        super().__init__()
        self.log_BHQK = log_BHQK

    def bias(self, q_BHQE: Tensor, k_BHKE: Tensor, scale: float, context: Context) -> Any:
        return lambda b, h, i, j: self.log_BHQK[b, h, i, j]


def key_counts(q_BHTE: Tensor, rotation_RHEN: Tensor, bidirectional: bool) -> Tensor:
    """N_ij: the number of hash rounds in which query i can attend to key j."""
    count_BHQK = torch.ones(*q_BHTE.shape[:2], q_BHTE.shape[2], q_BHTE.shape[2], dtype=torch.float64)
    for b, q_HTE in enumerate(q_BHTE):
        for h, q_TE in enumerate(q_HTE):
            buckets = [[lsh.bucket(q_E, r_EN) for q_E in q_TE] for r_EN in rotation_RHEN[:, h]]
            for i, rounds in enumerate(lsh.chunked(buckets, CHUNK, bidirectional)):
                for j in set().union(*map(set, rounds)):
                    count_BHQK[b, h, i, j] = lsh.count(rounds, j)
    return count_BHQK


@pytest.mark.spec(113, 114, 115)
@pytest.mark.parametrize("sides", ["back", "both"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_chunked_attention_equals_reformer_with_the_same_rotations(rounds, sides):
    """The published code omits the paper's -log N_ij for keys that occur in several rounds; a score modification undoes ours."""
    theirs = {
        name.split(".")[-1]: x
        for name, x in load_file(FIXTURES / "reformer.safetensors").items()
        if name.startswith(f"{rounds}.{sides}.")
    }
    pattern = Chunked(rounds, BUCKETS, CHUNK, bidirectional=sides == "both")
    layer = Attention(Shared(2), pattern, (Alibi(),)).build(12).double()
    layer.heads.qkv.weight.data = torch.cat((theirs["query_key"], theirs["value"]))
    layer.hash.rotation_RHEN = theirs["rotation"].permute(2, 0, 1, 3)
    layer.heads.out = None  # their module has no output projection
    q_BHTE, _, _ = layer.heads.project(theirs["x"])
    count_BHQK = key_counts(q_BHTE.detach(), layer.hash.rotation_RHEN, pattern.bidirectional)
    layer.score_mods[0] = AddLogCount(torch.zeros_like(count_BHQK))
    once = layer(theirs["x"], Context.of(16, 16, q_BHTE.device), None)[0]
    layer.score_mods[0] = AddLogCount(count_BHQK.log())
    counted = layer(theirs["x"], Context.of(16, 16, q_BHTE.device), None)[0]
    assert (counted - theirs["output"]).abs().max() < 1e-5  # they add 1e-6 to the mean square when they normalize keys
    assert ((once - theirs["output"]).abs().max() > 1e-3) == (rounds > 1 or bool((count_BHQK > 1).any()))


@pytest.mark.spec(38, 86, 88)
@pytest.mark.parametrize(
    "name, changes",
    [
        ("plain", {}),
        ("same_length", {"pattern": f"causal & window({MEMORY})"}),
        ("clamped", {"four_term": FourTerm(8, 3)}),
    ],
)
@pytest.mark.parametrize("hidden", [True, False], ids=["memory", "keys"])
def test_transformer_xl_equals_the_published_code_segment_by_segment(name, changes, hidden):
    """Runs three segments: the memory starts empty, fills, and drops its oldest entries. Their layers share u and v."""
    theirs = load_file(FIXTURES / "transformer_xl.safetensors")
    sizes = {"width": 8, "heads": 2, "layers": 2, "memory": MEMORY, "hidden": 12, "vocabulary": 13}
    network = build("transformer-xl", "tiny", **(sizes | changes)).eval()
    missing = network.load_state_dict(_renamed(theirs), strict=False)
    assert missing == (["outputs.0.bias"], [])
    cache, outputs = Cache(segment_memory=hidden), []
    for part in theirs["ids"].split(SEGMENT, dim=1):
        output = network(part, cache=cache)
        cache = output.cache
        outputs.append(output.hidden)
    assert cache.length == (
        MEMORY - 1 if name == "same_length" else MEMORY
    )  # the window of same_length needs one entry less
    assert (torch.cat(outputs, dim=1) - theirs[f"output.{name}"]).abs().max() < 1e-5
    if name != "plain":
        assert (theirs["output.plain"] - theirs[f"output.{name}"]).abs().max() > 1e-2


def _renamed(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "word_emb.emb_layers.0": "embed.table",
        "dec_attn.qkv_net": "sublayers.0.heads.qkv",
        "dec_attn.o_net": "sublayers.0.heads.out",
        "dec_attn.r_net": "sublayers.0.score_mods.0.w_r",
        "dec_attn.r_w_bias": "sublayers.0.score_mods.0.u_HE",
        "dec_attn.r_r_bias": "sublayers.0.score_mods.0.v_HE",
        "dec_attn.layer_norm": "residuals.0.norm",
        "pos_ff.layer_norm": "residuals.1.norm",
        "pos_ff.CoreNet.0": "sublayers.1.hidden.0",
        "pos_ff.CoreNet.3": "sublayers.1.out",
    }
    state = {}
    for name, x in theirs.items():
        if name.startswith("weights.") and "pos_emb" not in name:
            ours = name.replace("weights.layers.", "body.layers.").removeprefix("weights.")
            for old, new in names.items():
                ours = ours.replace(old, new)
            state[ours] = x
    return state
