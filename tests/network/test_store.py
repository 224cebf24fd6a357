"""Saving and loading: bit-equal, and damaged folders are refused with a reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from everyformer import (
    Attention,
    BatchNorm,
    Convolution,
    CrossAttention,
    Depth,
    EncoderDecoder,
    Grid,
    Language,
    Layer,
    Learned,
    Lstm,
    Model,
    PonderRnn,
    PostNorm,
    Projection,
    Residual,
    Rotary,
    ScoreMod,
    Sinusoidal,
    Stack,
    Standard,
    Sublayer,
    Tokens,
    build,
    members,
    parse,
    save,
)
from everyformer.network.network import PairNetwork
from everyformer.network.store import load_network, read_tensors
from everyformer.study.example import example, parts
from everyformer.value import named
from tests.network import model, ready, tokens

PAIR = EncoderDecoder(
    encoder=model("full"),
    decoder=model(cross=CrossAttention(Standard(2)), outputs=(Language(),)),
    share_embedding=True,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", members())
def test_every_member_is_bit_equal_after_loading(name, dtype, tmp_path):
    network = build(name, "tiny").to(dtype).eval()
    again = load_network(save(network, tmp_path / "deep" / "folder"))
    assert again.value == network.value and not again.training
    assert again.state_dict().keys() == network.state_dict().keys()
    assert all(torch.equal(again.state_dict()[key], weight) for key, weight in network.state_dict().items())
    assert {p.dtype for p in again.parameters()} == {dtype}
    for (one, width), (two, _) in zip(parts(network), parts(again), strict=True):
        data = example(one.value, source_width=width).to(dtype=dtype)
        assert torch.equal(data.run(one).hidden, data.run(two).hidden)


def test_a_shared_embedding_is_still_one_tensor(tmp_path):
    network = ready(PAIR)
    again = load_network(save(network, tmp_path))
    assert isinstance(again, PairNetwork) and again.encoder.embed.table.weight is again.decoder.embed.table.weight
    one, two = network(tokens(), tokens(seed=1)), again(tokens(), tokens(seed=1))
    assert torch.equal(one.logits, two.logits)


def test_a_mixed_precision_is_kept(tmp_path):
    network = build("gpt2", "tiny").to(torch.bfloat16)
    network.body.stream.norm.float()
    again = load_network(save(network, tmp_path)).state_dict()
    for name, weight in network.state_dict().items():
        assert again[name].dtype == weight.dtype and torch.equal(again[name], weight)


def test_running_averages_are_kept(tmp_path):
    network = ready(model("full", residual=PostNorm(BatchNorm()))).train()
    network(tokens())
    again = load_network(save(network, tmp_path))
    assert torch.equal(network.eval()(tokens(seed=1)).hidden, again(tokens(seed=1)).hidden)


def test_saving_again_replaces_what_was_there(tmp_path):
    save(ready(model(position=Learned(5))), tmp_path)
    second = ready(model(layers=1), seed=1)
    save(second, tmp_path)
    assert torch.equal(load_network(tmp_path)(tokens()).hidden, second(tokens()).hidden)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "model.safetensors"]


def rewrite(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / "model.json").read_text()
        assert old in text
        (folder / "model.json").write_text(text.replace(old, new))

    return change


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


HARM: dict[str, tuple[Callable[[Path], object], str]] = {
    "no json": (lambda f: (f / "model.json").unlink(), "has no model.json: give a folder that everyformer.save wrote"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors: give a folder"),
    "cut off": (cut, r"model.safetensors does not fit .*model.json"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "does not fit .*header too small"),
    "no tensors": (lambda f: save_file({}, f / "model.safetensors"), r"does not fit (.|\n)*Missing key"),
    "another width": (rewrite('"width": 8', '"width": 16'), r"does not fit (.|\n)*size mismatch"),
    "another depth": (rewrite('"num_layers": 2', '"num_layers": 3'), r"does not fit (.|\n)*body.layers.2"),
    "unknown tag": (rewrite("pre_norm", "pre_nrom"), "no residual is named 'pre_nrom'; did you mean pre_norm"),
    "unknown kind": (rewrite('"type": "model"', '"type": "modell"'), "not a Model: Invalid value 'modell'"),
    "unknown field": (rewrite('"width": 8', '"width": 8, "wdith": 8'), "unknown field wdith"),
    "wrong number": (rewrite('"width": 8', '"width": -8'), "expected int >= 1, at width"),
    "illegal": (rewrite('"causal"', '"full"'), "this combination is refused: the pattern full attends to the future"),
    "another value": (lambda f: (f / "model.json").write_text('{"type": "causal"}'), "not a Model"),
    "not json": (lambda f: (f / "model.json").write_text("{"), "this JSON is not a Model"),
    "not text": (lambda f: (f / "model.json").write_bytes(b"\xff\xfe"), "this JSON is not a Model"),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_folder_is_refused_with_the_reason(harm, tmp_path):
    change, message = HARM[harm]
    save(ready(model(outputs=(Language(),))), tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_network(tmp_path)


def test_a_damaged_file_of_tensors_is_named(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    for name in ("x.safetensors", "y.safetensors"):
        with pytest.raises(ValueError, match=rf"{name} cannot be read .*; restore it from a copy"):
            read_tensors(tmp_path / name)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere has no model\.json"):
        load_network(tmp_path / "nowhere")


def test_a_damaged_pair_is_refused_too(tmp_path):
    save(ready(PAIR), tmp_path)
    rewrite('"share_embedding": true', '"share_embedding": 1')(tmp_path)
    with pytest.raises(ValueError, match=r"not a EncoderDecoder: expected bool"):
        load_network(tmp_path)


def test_a_fresh_process_loads_every_kind_of_part(tmp_path):
    """Values are found by name among imported classes, so loading a model imports all of them."""
    sublayers = (Lstm(), Convolution(4), PonderRnn(2), Attention(Standard(2), parse("causal"), (Rotary(),)))
    body = Stack(1, (Layer(sublayers),), PostNorm())
    for number, position in enumerate((Grid(2, 4), Sinusoidal(), None)):
        value = Model(width=8, embed=Tokens(9), body=body, position=position, outputs=(Language(),))
        save(value.build(), tmp_path / str(number))
    code = "import sys, everyformer; [everyformer.load(folder) for folder in sys.argv[1:]]"
    subprocess.run([sys.executable, "-c", code, *map(str, tmp_path.iterdir())], check=True, timeout=120)


@pytest.mark.parametrize("protocol", [Sublayer, ScoreMod, Projection, Residual, Depth], ids=lambda kind: kind.__name__)
def test_every_part_that_json_can_name_can_be_built(protocol):
    ours = {name: kind for name, kind in named(protocol).items() if kind.__module__.startswith("everyformer.")}
    assert ours and not [name for name, kind in ours.items() if kind.build is protocol.build]
