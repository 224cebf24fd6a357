"""`everyformer export --to onnx`: onnxruntime returns what the network returns, and generates the same text with the cache as inputs."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
import torch

import everyformer
from everyformer.cli.main import main
from everyformer.data.tokenizer import ByteTokenizer
from everyformer.infer.decoder_graph import no_decoder_reason
from everyformer.infer.signature import Signature, call
from everyformer.infer.traced import trace
from everyformer.network.network import PairNetwork
from everyformer.train.export_onnx import write, write_decoder
from tests.train.test_export_graph import SIZES, noisy

ROUNDING = 1e-5  # of the largest output: some dozen float32 operations deep, each to 6e-8
FAST = {
    "reformer": {"layers": 1},
    "act-rnn": {"steps": 2},
    "vit": {"layers": 1},
}  # hashes, a loop with halting, an image
FAST_DECODERS = {"transformer-xl": {"layers": 1, "memory": 6}, "lstm": {"layers": 1}}
DECODERS = [name for name in everyformer.members() if no_decoder_reason(everyformer.member(name, "tiny")) is None]
PROMPT, TOKENS = [5, 6, 7, 8], 12


def ran(path, given):
    session = onnxruntime.InferenceSession(path)
    names = {one.name for one in session.get_inputs()}
    found = session.run(None, {name: np.asarray(x) for name, x in given.items() if name in names})
    return dict(zip([one.name for one in session.get_outputs()], found, strict=True))


def assert_onnx_equals_network(network, folder):
    signature = Signature.of(network.value)
    write(trace(network, signature), signature, folder / "model.onnx", lambda given: call(network, given), [])
    for batch, length in SIZES:
        given = signature.example(batch, length, seed=batch)
        with torch.no_grad():
            expected = dict(zip(signature.outputs, call(network, given), strict=True))
        found = ran(folder / "model.onnx", given)
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            assert np.abs(found[name] - x.numpy()).max() <= ROUNDING * x.abs().max()


def text_by_onnx(folder, config, tokens, given):
    """The tokens that a loop over decoder.onnx generates greedily."""
    past = {name: np.full(x["shape"], x["fill"], x["dtype"]) for name, x in config["decoder"]["start"].items()}
    text = list(tokens)
    for _ in range(TOKENS):
        found = ran(folder / "decoder.onnx", {"tokens": np.array([tokens])} | given | past)
        logits, *present = found.values()
        past = dict(zip(past, present, strict=True))
        tokens = [int(logits[0, -1].argmax())]
        text += tokens
    return text


def assert_onnx_generates_the_same_text(network, folder):
    config = write_decoder(network, folder)
    given, options = {}, {}
    if isinstance(network, PairNetwork):
        source_BS = torch.randint(0, 200, (1, 6), generator=torch.Generator().manual_seed(0))
        given = {"source_tokens": source_BS, "source_visible": torch.ones(1, 6, dtype=torch.bool)}
        cross = ran(folder / "encoder.onnx", given)
        with torch.no_grad():
            options = {"encoder_output": network.encode(source_BS, visible=given["source_visible"])}
        given |= cross
        network = network.decoder
    expected = everyformer.generate(network, [PROMPT], tokens=TOKENS, temperature=0, **options)
    assert text_by_onnx(folder, config, PROMPT, given) == expected[0]


@pytest.mark.parametrize("member", FAST)
def test_onnxruntime_returns_the_outputs_of_the_network(member, tmp_path):
    assert_onnx_equals_network(noisy(member, **FAST[member]), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("member", everyformer.members())
def test_onnxruntime_returns_the_outputs_of_every_member(member, tmp_path):
    assert_onnx_equals_network(noisy(member), tmp_path)


@pytest.mark.parametrize("member", FAST_DECODERS)
def test_a_decoder_with_its_cache_outside_generates_the_same_text(member, tmp_path):
    assert_onnx_generates_the_same_text(noisy(member, **FAST_DECODERS[member]), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("member", DECODERS)
def test_every_decoder_with_its_cache_outside_generates_the_same_text(member, tmp_path):
    assert_onnx_generates_the_same_text(noisy(member), tmp_path)


def test_the_code_in_the_readme_of_an_export_generates_the_same_text(tmp_path):
    network = noisy("byte-language", layers=1)
    everyformer.save(network, tmp_path / "saved")
    ByteTokenizer().save(tmp_path / "saved")
    assert main(["export", str(tmp_path / "saved"), "--to", "onnx", "--out", str(tmp_path / "onnx")]) == 0
    blocks = re.findall(r"```python\n(.*?)```", (tmp_path / "onnx" / "README.md").read_text(), re.S)
    program = "import sys\nsys.modules['everyformer'] = sys.modules['torch'] = None\n" + "\n".join(blocks)
    process = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", program], capture_output=True, encoding="utf-8", cwd=tmp_path / "onnx"
    )
    expected = everyformer.generate(network, [list(b"Once")], tokens=20, temperature=0)[0]
    assert process.stdout == ByteTokenizer().decode(expected) + "\n", process.stderr


def test_an_encoder_and_a_decoder_with_its_cache_outside_generate_the_same_text(tmp_path):
    assert_onnx_generates_the_same_text(noisy("t5", layers=1), tmp_path)


def test_a_graph_that_onnxruntime_cannot_run_is_one_sentence(tmp_path, monkeypatch):
    def fail(path):
        raise NotImplementedError("no kernel\n  for this node")

    network = noisy("gpt2", layers=1)
    signature = Signature.of(network.value)
    monkeypatch.setattr(onnxruntime, "InferenceSession", fail)
    with pytest.raises(
        ValueError, match=r"^onnxruntime cannot run this model: no kernel for this node; use --to torch$"
    ):
        write(trace(network, signature), signature, tmp_path / "model.onnx", lambda given: call(network, given), [])


def test_onnx_without_its_packages_is_one_sentence(tmp_path, monkeypatch, capsys):
    everyformer.save(noisy("gpt2", layers=1), tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["export", str(tmp_path / "saved"), "--to", "onnx", "--out", str(tmp_path / "onnx")]) == 2
    assert "ONNX needs onnxruntime; install it with pip install 'everyformer[export]'" in capsys.readouterr().err
    assert not (tmp_path / "onnx").exists()
