"""Transformer-XL under the names of its authors' code: the weights of the recorded fixture, with its recorded outputs, as a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import everyformer
from everyformer.network.cache import Cache
from everyformer.train.imported import import_run
from everyformer.train.trained import load
from tests.peers.test_import import refused

FIXTURE = load_file(Path(__file__).parent / "fixtures" / "transformer_xl.safetensors")
MEMORY, SEGMENT = 6, 4
CONFIG = {
    "model_type": "transfo-xl", "vocab_size": 13, "d_model": 8, "d_embed": 8, "n_head": 2, "d_head": 4, "d_inner": 12, "n_layer": 2,
    "mem_len": MEMORY, "div_val": 1, "cutoffs": [],
}  # fmt: skip
CASES = {"plain": {}, "same_length": {"same_length": True}, "clamped": {"clamp_len": 3}}


def write(folder, prefix="transformer.", tied=True, shared=False, **changes):
    """A folder with the weights of the fixture, and an output map. With `shared` all layers have the vectors of the first."""
    state = {name.removeprefix("weights."): x for name, x in FIXTURE.items() if name.startswith("weights.")}
    if shared:
        state |= {
            name: state["layers.0." + name[9:]].clone() for name in state if name.endswith(("r_w_bias", "r_r_bias"))
        }
    state = {prefix + name: x for name, x in state.items()}
    generator = torch.Generator().manual_seed(0)
    table = state[prefix + "word_emb.emb_layers.0.weight"].clone()
    output = table if tied else torch.randn(13, 8, generator=generator)
    bias = torch.randn(13, generator=generator)
    state |= {"crit.out_layers.0.weight": output, "crit.out_layers.0.bias": bias}
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_weight": tied} | changes))
    return output, bias


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_recorded_outputs_follow_segment_by_segment(name, tied, tmp_path):
    output, bias = write(tmp_path / "xl", tied=tied, **CASES[name])
    network, cache = everyformer.from_pretrained(tmp_path / "xl"), Cache(segment_memory=True)
    parts = (FIXTURE[one].split(SEGMENT, dim=1) for one in ("ids", f"output.{name}"))
    for part, expected in zip(*parts, strict=True):
        with torch.no_grad():
            found = network(part, cache=cache)
        cache = found.cache
        assert (found.hidden - expected).abs().max() < 1e-5
        assert (found.logits - (expected @ output.T + bias)).abs().max() < 1e-4


def test_the_authors_names_have_vectors_that_all_layers_share(tmp_path):
    write(tmp_path / "xl", shared=True)
    expected = everyformer.from_pretrained(tmp_path / "xl").state_dict()
    write(tmp_path / "authors", prefix="", shared=True)
    path = tmp_path / "authors" / "pytorch_model.bin"
    state = torch.load(path, weights_only=True)
    for name in ("r_w_bias", "r_r_bias"):
        state[name] = state.pop(f"layers.0.dec_attn.{name}")
        del state[f"layers.1.dec_attn.{name}"]
    torch.save(state, path)
    found = everyformer.from_pretrained(tmp_path / "authors").state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(x, found[name]) for name, x in expected.items())


def test_an_imported_transformer_xl_generates_from_token_ids(tmp_path):
    write(tmp_path / "xl")
    import_run(tmp_path / "xl", tmp_path / "run")
    assert load(tmp_path / "run").generate("1 2 3", tokens=4, temperature=0).startswith("1 2 3 ")


def test_what_our_transformer_xl_has_not_is_refused_by_name(tmp_path, capsys):
    write(tmp_path / "xl")
    for changes, reason in (
        ({"cutoffs": [5, 9]}, "cutoffs is [5, 9]"),
        ({"div_val": 4}, "div_val is 4"),
        ({"pre_lnorm": True}, "pre_lnorm is True"),
        ({"d_embed": 4}, "d_embed is 4"),
        ({"d_head": 3}, "d_head is 3"),
        ({"mem_len": 0}, "mem_len is 0"),
        ({"n_head": "2"}, "n_head"),
        ({"clamp_len": "far"}, "clamp_len is 'far', which is no value of this field"),
        ({"same_length": "maybe"}, "same_length is 'maybe'"),
        ({"n_layer": 3}, "they have 2 layers, but n_layer is 3"),
    ):
        (tmp_path / "xl" / "config.json").write_text(json.dumps(CONFIG | changes))
        assert reason in refused(capsys, "import", tmp_path / "xl", "--out", tmp_path / "run")
    (tmp_path / "xl" / "config.json").write_text(json.dumps(CONFIG))
    state = torch.load(tmp_path / "xl" / "pytorch_model.bin", weights_only=True)
    torch.save(state | {"crit.cluster_weight": torch.ones(2, 8)}, tmp_path / "xl" / "pytorch_model.bin")
    assert "crit.cluster_weight is left over" in refused(capsys, "import", tmp_path / "xl", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()
