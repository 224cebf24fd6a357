"""Reformer as transformers stores what the authors published: equal logits, with the random matrices that it draws from `hash_seed`."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import transformers

import everyformer
from everyformer.train.imported import import_run
from everyformer.train.trained import load
from tests.peers.test_import import refused
from tests.train.test_export_graph import SIZES as SIZES_OF_GRAPHS
from tests.train.test_export_graph import assert_graph_equals_network
from tests.train.test_export_onnx import assert_onnx_equals_network

SIZES = {
    "hidden_size": 16, "num_attention_heads": 2, "attention_head_size": 6, "feed_forward_size": 20, "vocab_size": 23,
    "attn_layers": ["local", "lsh", "lsh", "local"], "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [4, 12],
    "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8, "num_buckets": 4, "hash_seed": 7, "is_decoder": True,
    "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip
CASES = {
    "local and hashed layers": {},
    "buckets as a product": {"num_buckets": [4, 2]},
    "buckets for the longest text": {"num_buckets": None},
    "several rounds": {"num_hashes": 3},
    "hashed layers alone": {"attn_layers": ["lsh", "lsh"]},
    "local layers alone": {"attn_layers": ["local", "local"], "local_attn_chunk_length": 4},
    "another activation": {"hidden_act": "gelu"},
}


def write(folder, **changes):
    torch.manual_seed(0)
    theirs = transformers.ReformerModelWithLMHead(transformers.ReformerConfig(**SIZES | changes)).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    theirs.save_pretrained(folder)
    return theirs


def logits(theirs, token_BT):
    """Their logits, with the bias of the output map: transformers 5 stores it and leaves it out, transformers 4 added it."""
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it pads, and says so
    with torch.no_grad():
        return theirs(token_BT).logits + theirs.lm_head.bias


@pytest.mark.parametrize("name", CASES)
def test_a_published_reformer_has_equal_logits_at_every_length(name, tmp_path):
    theirs = write(tmp_path, **CASES[name])
    ours = everyformer.from_pretrained(tmp_path)
    if name == "several rounds":
        in_float64(theirs, ours)
    for length in (
        64,
        5,
        8,
        16,
        20,
        24,
    ):  # within a chunk, several, and a part of one; the longest decides on their buckets
        token_BT = torch.randint(0, 23, (2, length), generator=torch.Generator().manual_seed(length))
        expected = logits(theirs, token_BT)
        with torch.no_grad():
            found = ours(token_BT).logits
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max(), length


def in_float64(theirs, ours):
    """In float32 their weights of a token that attends to itself alone sum to 1 within 1e-2 only, from scores of -100,000."""
    for model in (theirs, ours):
        model.double()
    torch.manual_seed(7)
    rotation_HERN = torch.randn(2, 6, 3, 2, dtype=torch.float64)  # as they draw it
    for name, x_RHEN in ours.state_dict().items():
        if name.endswith("rotation_RHEN"):
            x_RHEN.copy_(rotation_HERN.permute(2, 0, 1, 3))


def test_the_number_of_parameters_is_theirs(tmp_path):
    theirs = write(tmp_path)
    ours = everyformer.from_pretrained(tmp_path)
    assert sum(x.numel() for x in ours.parameters()) == sum(x.numel() for x in theirs.parameters())


def test_the_random_matrices_are_drawn_once_and_are_equal_in_every_import(tmp_path):
    write(tmp_path / "theirs", hash_seed=None)
    import_run(tmp_path / "theirs", tmp_path / "run")
    runs = [load(tmp_path / "run"), load(tmp_path / "run"), load(tmp_path / "theirs")]
    names = [name for name in runs[0].network.state_dict() if name.endswith("rotation_RHEN")]
    first, second = (runs[0].network.state_dict()[name] for name in names)
    assert not torch.equal(first, second)  # each layer has its own
    texts = {run.generate("1 2 3 4 5 6 7 8 9 10", tokens=4, temperature=0) for run in runs}
    assert len(texts) == 1 and texts.pop().startswith("1 2 3 4 5 6 7 8 9 10 ")


def test_a_published_reformer_is_exported_as_a_graph_of_any_length(tmp_path):
    """Sorted chunks, with padding: the number of positions is read from no data."""
    write(tmp_path, num_hashes=2, attn_layers=["lsh"])
    network = everyformer.from_pretrained(tmp_path)
    assert_graph_equals_network(network, SIZES_OF_GRAPHS)
    (tmp_path / "onnx").mkdir()
    assert_onnx_equals_network(network, tmp_path / "onnx")


def test_what_our_reformer_has_not_is_refused_by_name(tmp_path, capsys):
    write(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text())
    for changes, reason in (
        ({"is_decoder": False}, "is_decoder is False"),
        ({"axial_pos_embds": False}, "axial_pos_embds is False"),
        ({"lsh_num_chunks_before": 2}, "lsh_num_chunks_before is 2"),
        ({"local_num_chunks_after": 1}, "local_num_chunks_after is 1"),
        ({"axial_pos_shape": [8, 8, 8]}, "axial_pos_shape is [8, 8, 8]"),
        ({"axial_pos_embds_dim": [4, 13]}, "axial.widths sum to 17, but 16 features are added to"),
        ({"attn_layers": ["local", "lsh", "lsh"]}, "attn_layers names 3 layers, but num_hidden_layers is 4"),
        ({"attn_layers": ["local", "lsh", "lsh", "full"]}, "attn_layers is ['local', 'lsh', 'lsh', 'full']"),
        ({"num_buckets": 5}, "chunked.buckets is 5"),
        ({"num_buckets": "many"}, "num_buckets is 'many'"),
        ({"num_hashes": "two"}, "num_hashes is 'two'"),
        ({"hash_seed": 10**30}, "hash_seed is 1000000000000000000000000000000"),
        ({"hash_seed": "seven"}, "hash_seed is 'seven'"),
    ):
        path.write_text(json.dumps(config | changes))
        assert reason in refused(capsys, "import", tmp_path / "theirs", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()
