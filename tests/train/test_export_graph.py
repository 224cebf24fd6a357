"""`everyformer export --to torch`: graphs with open sizes that compute what the network computes, without everyformer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import everyformer
from everyformer.attention.pattern import Causal
from everyformer.attention.projection import Standard
from everyformer.attention.score_mod import ImageBias
from everyformer.cli.export import reasons
from everyformer.cli.main import main
from everyformer.infer.decoder_graph import CachedCall
from everyformer.infer.signature import Signature, call
from everyformer.infer.traced import record, trace
from everyformer.network.depth import Stack
from everyformer.network.embed import Embed, Tokens
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.output_head import Language, PerToken
from everyformer.network.residual import PreNorm
from everyformer.value import Value

# One member of each mechanism; test_export_onnx.py has those that are not here. An encoder with a decoder, windows and a soft cap,
# spans, sparse patterns, halting, a linear recurrence, edges, n-grams.
FAST = {
    "t5": {"layers": 1}, "gemma2": {"layers": 2}, "adaptive-span": {"layers": 1}, "sparse-transformer": {"layers": 1},
    "universal-transformer": {"steps": 2}, "ablated-lstm": {"layers": 1}, "graph-classifier": {"layers": 1},
    "speedrun": {"layers": 1},
}  # fmt: skip
SIZES = ((1, 1), (1, 2), (2, 5), (4, 23))  # batch and length; graphs are recorded at 3 and 7
WITHOUT_EVERYFORMER = """
import sys, torch
sys.modules["everyformer"] = None
for folder in sys.argv[1:]:
    model = torch.export.load(f"{folder}/model.pt2").module()
    for given, expected in torch.load(f"{folder}/expected.pt"):
        with torch.no_grad():
            found = model(**given)
        found = found if isinstance(found, tuple) else (found,)
        for x, y in zip(found, expected, strict=True):
            assert (x - y).abs().max() <= 1e-5 * y.abs().max(), folder
"""


class Bits(Embed, Value, frozen=True):
    """An embedding of one's own, of which nobody knows which tensors it takes."""

    def build(self, width):
        return Tokens(2).build(width)


def attention(*score_mods):
    return Stack(1, (Layer((Attention(Standard(2), Causal(), score_mods),)),), PreNorm())


def noisy(member, **settings):
    """A small network all of whose parts matter, in evaluation mode."""
    torch.manual_seed(0)
    network = everyformer.build(member, "tiny", **settings)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return network.eval()


def assert_graph_equals_network(network, sizes):
    """At every size: the error is one of rounding, 1e-5 of the largest output."""
    signature = Signature.of(network.value)
    graph = trace(network, signature).module()
    for batch, length in sizes:
        given = signature.example(batch, length, seed=batch)
        with torch.no_grad():
            expected, found = call(network, given), graph(**given)
        for x, y in zip(found if isinstance(found, tuple) else (found,), expected, strict=True):
            assert (x - y).abs().max() <= 1e-5 * y.abs().max()


@pytest.mark.parametrize("member", FAST)
def test_a_graph_equals_its_network_at_shorter_and_longer_lengths(member):
    assert_graph_equals_network(noisy(member, **FAST[member]), SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("member", everyformer.members())
def test_the_graph_of_every_member_equals_its_network(member):
    assert_graph_equals_network(noisy(member), (*SIZES, (1, 64)))


def test_a_graph_is_equal_where_the_network_uses_a_sparse_kernel():
    network = noisy("mistral", layers=1, window=32)
    assert_graph_equals_network(network, ((1, 1100),))


def test_exported_folders_need_torch_alone(tmp_path):
    folders = []
    for member in ("byte-classifier", "lstm"):
        network = noisy(member, layers=1)
        everyformer.save(network, tmp_path / member)
        folder = tmp_path / f"{member}-torch"
        assert main(["export", str(tmp_path / member), "--to", "torch", "--out", str(folder)]) == 0
        signature = Signature.of(network.value)
        examples = [signature.example(*size) for size in SIZES]
        with torch.no_grad():
            torch.save([(given, call(network, given)) for given in examples], folder / "expected.pt")
        folders.append(str(folder))
        config = json.loads((folder / "config.json").read_text())
        assert list(config["inputs"]) == [one.name for one in signature.inputs]
        assert config["outputs"]["logits"]["shape"][0] == "batch"
    process = subprocess.run([sys.executable, "-c", WITHOUT_EVERYFORMER, *folders], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_a_graph_states_how_long_its_inputs_may_be():
    network = noisy("gpt2", layers=1, context=20)
    signature = Signature.of(network.value)
    graph = trace(network, signature).module()
    assert signature.limits == {"length": 20} and graph(**signature.example(2, 20)).shape[1] == 20
    with pytest.raises(AssertionError, match="<= 20"):
        graph(tokens=torch.zeros(1, 21, dtype=torch.int64))


def test_a_graph_has_no_weights_that_serve_training_alone():
    network = noisy("electra", layers=1)
    names = trace(network, Signature.of(network.value)).state_dict
    assert network.generator is not None and not any("generator" in name for name in names)


def test_an_input_that_is_not_known_as_tensors_is_refused():
    found = reasons(Model(width=8, embed=Bits(), body=attention(), outputs=(PerToken(2),)).build())
    assert found["torch"] == found["onnx"] == "its input is made by Bits, an embedding that is not known as tensors"


def test_a_graph_with_a_cache_has_a_limit_for_each_open_size():
    value = Model(width=8, embed=Tokens(20), body=attention(ImageBias(4, 4)), outputs=(Language(),))
    with torch.no_grad():
        calls = CachedCall(value.build().eval())
        signature = calls.signature()
        graph = record(
            calls.network, calls.decode, signature, calls.example(3, 7, 5), [calls.example(2, 3, 6)]
        ).module()
        assert signature.limits == {"length": 16, "past": 16}
        assert graph(**calls.example(2, 4, 12))[1].shape == (2, 2, 16, 4)
