"""Published code that living libraries no longer have: numbers of transformers 4.35.2, written by fixtures/make.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from everyformer import Attention, Cache, Chunked, Context, ScoreModModule, Shared, build
from tests.spec import lsh

FIXTURES = Path(__file__).parent / "fixtures"
BUCKETS, CHUNK, MEMORY, SEGMENT = 4, 4, 6, 4


class Counted(ScoreModModule):
    """log N_ij: a key counts in every round that shows it."""

    def __init__(self, log_BHQK: Tensor):
        super().__init__()
        self.log_BHQK = log_BHQK

    def bias(self, q_BHQE: Tensor, k_BHKE: Tensor, scale: float, context: Context) -> Any:
        return lambda b, h, i, j: self.log_BHQK[b, h, i, j]


def times(q_BHTE: Tensor, rotation_RHEN: Tensor, bidirectional: bool) -> Tensor:
    """How often the rounds show each key to each query."""
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
def test_chunked_is_reformers_attention_with_the_same_rotations(rounds, sides):
    """But for the duplicates: their code leaves out the paper's -log N_ij, which is put back into ours by a rule."""
    theirs = {
        name.split(".")[-1]: x
        for name, x in load_file(FIXTURES / "reformer.safetensors").items()
        if name.startswith(f"{rounds}.{sides}.")
    }
    pattern = Chunked(rounds, BUCKETS, CHUNK, bidirectional=sides == "both")
    layer = Attention(Shared(2), pattern).build(12).double()
    layer.heads.qkv.weight.data = torch.cat((theirs["query_key"], theirs["value"]))
    layer.hash.rotation_RHEN = theirs["rotation"].permute(2, 0, 1, 3)
    layer.heads.out = None  # theirs merges elsewhere
    q_BHTE, _, _ = layer.heads.project(theirs["x"])
    count_BHQK = times(q_BHTE.detach(), layer.hash.rotation_RHEN, pattern.bidirectional)
    once = layer(theirs["x"], Context.of(16, 16, q_BHTE.device), None)[0]
    layer.score_mods.append(Counted(count_BHQK.log()))
    counted = layer(theirs["x"], Context.of(16, 16, q_BHTE.device), None)[0]
    assert (counted - theirs["answer"]).abs().max() < 1e-5  # they add 1e-6 to the mean square of a key
    assert ((once - theirs["answer"]).abs().max() > 1e-3) == (rounds > 1 or bool((count_BHQK > 1).any()))


@pytest.mark.spec(38, 86, 88)
@pytest.mark.parametrize(
    "name, changes", [("plain", {}), ("same_length", {"same_length": True}), ("clamped", {"reach": 3})]
)
@pytest.mark.parametrize("hidden", [True, False], ids=["memory", "keys"])
def test_transformer_xl_reads_segments_as_the_published_code(name, changes, hidden):
    """Three segments from an empty memory that fills and then drops its oldest; their layers share u and v."""
    theirs = load_file(FIXTURES / "transformer_xl.safetensors")
    sizes = {"width": 8, "heads": 2, "layers": 2, "memory": MEMORY, "hidden": 12, "vocabulary": 13}
    network = build("transformer-xl", "tiny", **(sizes | changes)).eval()
    missing = network.load_state_dict(_renamed(theirs), strict=False)
    assert missing == (["outputs.0.bias"], [])
    cache, found = Cache(segment_memory=hidden), []
    for part in theirs["ids"].split(SEGMENT, dim=1):
        output = network(part, cache=cache)
        cache = output.cache
        found.append(output.hidden)
    assert cache.length == (MEMORY - 1 if changes.get("same_length") else MEMORY)  # a window needs no more
    assert (torch.cat(found, dim=1) - theirs[f"answer.{name}"]).abs().max() < 1e-5
    if name != "plain":
        assert (theirs["answer.plain"] - theirs[f"answer.{name}"]).abs().max() > 1e-2


def _renamed(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "word_emb.emb_layers.0": "embed.table",
        "dec_attn.qkv_net": "sublayers.0.heads.qkv",
        "dec_attn.o_net": "sublayers.0.heads.out",
        "dec_attn.r_net": "sublayers.0.score_mods.0.place",
        "dec_attn.r_w_bias": "sublayers.0.score_mods.0.u_HE",
        "dec_attn.r_r_bias": "sublayers.0.score_mods.0.v_HE",
        "dec_attn.layer_norm": "residuals.0.norm",
        "pos_ff.layer_norm": "residuals.1.norm",
        "pos_ff.CoreNet.0": "sublayers.1.hidden.0",
        "pos_ff.CoreNet.3": "sublayers.1.out",
    }
    found = {}
    for name, x in theirs.items():
        if name.startswith("weights.") and "pos_emb" not in name:
            ours = name.replace("weights.layers.", "body.layers.").removeprefix("weights.")
            for old, new in names.items():
                ours = ours.replace(old, new)
            found[ours] = x
    return found
