"""The benchmark of training: operations, ways, failures, profiles, and its command."""

from __future__ import annotations

import json

import pytest
import torch

from everyformer.cli.main import main
from everyformer.family.table import member
from everyformer.network.model import Model
from everyformer.study import bench_train
from everyformer.study.bench_peers import PlainGpt2, Shape
from everyformer.study.bench_profile import covered
from everyformer.study.bench_steps import measure
from everyformer.study.bench_train import ROWS, Row, bench, choose_rows, operations, way_of, weights_in_products

CPU = torch.device("cpu")
TINY = Shape(16, 2, 2, 32, 256, 2)
NAMES = {  # of the plain script's weights in a layer: ours
    "qkv": "sublayers.0.heads.qkv", "merge": "sublayers.0.heads.out", "up": "sublayers.1.hidden.0", "down": "sublayers.1.out",
    "norm1": "residuals.0.norm", "norm2": "residuals.1.norm",
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    """The rows `gpt2` and `long-span` at a tiny size."""
    for name in ("gpt2", "long-span"):
        row = ROWS[name]
        monkeypatch.setitem(bench_train.ROWS, name, Row(row.member, TINY, TINY, row.settings, row.dense, row.ways))


def test_the_operations_of_a_step_of_gpt2_are_those_counted_by_hand():
    value = member("gpt2")
    assert isinstance(value, Model)
    layer = 768 * (3 * 768 + 768 + 4 * 768 + 4 * 768) + (3 + 1 + 4 + 1) * 768 + 4 * 768  # matrices, biases, two norms
    n = 12 * layer + 2 * 768 + 50257 * 768  # the last norm, and the output, which is tied to the tokens
    assert weights_in_products(value) == n == 124_439_808 - 1024 * 768
    assert operations(value, Shape(768, 12, 12, 1024, 50257, 32)) == 32 * 1024 * (6 * n + 12 * 12 * 1024 * 768)


def test_an_output_that_is_not_tied_does_not_count_the_table_of_tokens():
    value = member("byte-language", "paper")
    assert isinstance(value, Model)
    every = sum(p.numel() for p in value.build().parameters())
    assert weights_in_products(value) == every - 2 * 256 * 256  # tokens and positions


def test_the_plain_script_has_the_parameters_of_gpt2():
    shape = Shape(16, 2, 2, 32, 300, 2)
    value = member("gpt2", width=16, layers=2, heads=2, context=32, vocabulary=300)
    assert sum(p.numel() for p in PlainGpt2(shape).parameters()) == sum(p.numel() for p in value.build().parameters())


def test_the_plain_script_computes_gpt2():
    """The same weights give the same logits."""
    torch.manual_seed(0)
    plain = PlainGpt2(TINY)
    network = member("gpt2", width=16, layers=2, heads=2, context=32, vocabulary=256, dropout=0.0).build()
    names = {
        f"blocks.{layer}.{theirs}": f"body.layers.{layer}.{ours}" for layer in (0, 1) for theirs, ours in NAMES.items()
    }
    names |= {"token": "embed.table", "position": "position.table", "norm": "body.stream.norm"}
    state = {f"{names[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": p for name, p in plain.named_parameters()}
    assert state.keys() == dict(network.named_parameters()).keys()
    network.load_state_dict(state, strict=False)
    token_BT = torch.randint(256, (2, 32))
    torch.testing.assert_close(network.eval()(token_BT).logits, plain(token_BT))


def test_every_way_is_measured_with_its_spread_memory_and_rate(tiny):
    (speeds,) = bench(["gpt2"], CPU, ways=["everyformer", "plain"], steps=3)
    assert [speed.way for speed in speeds] == ["everyformer", "plain"]
    for speed in speeds:
        steps = speed.steps
        assert steps.failure is None and 0 < steps.least <= steps.median <= steps.most and steps.count == 3
        assert speed.rate == 64 / steps.median and steps.memory is not None
        weights = sum(p.numel() for p in PlainGpt2(TINY).parameters())
        assert steps.memory > 16 * weights  # weights, gradients and two moments of AdamW in four bytes each


def test_a_way_that_fails_is_reported_and_the_others_are_measured():
    def fails(tick):
        tick()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 750 GiB")

    def sleeps(tick):
        while tick():
            pass

    found = measure({"large": fails, "small": sleeps}, CPU, 3)
    assert found["large"].failure == "out of memory" and found["large"].count == 0
    assert found["small"].failure is None and found["small"].count == 3


def test_the_command_goes_on_after_a_row_that_fails(tiny, capsys, monkeypatch, tmp_path):
    real = way_of

    def way(name, way, *rest):
        if name == "gpt2":

            def fails(tick):
                raise MemoryError("too large")

            return fails
        return real(name, way, *rest)

    monkeypatch.setattr(bench_train, "way_of", way)
    words = ["bench", "train", "gpt2", "long-span", "--ways", "everyformer", "--steps", "2", "--device", "cpu"]
    file, figure = tmp_path / "train.json", tmp_path / "train.png"
    assert main([*words, "--json", str(file), "--figure", str(figure)]) == 0
    out = capsys.readouterr().out
    assert (
        "# command:" in out
        and "matrix product of" in out
        and "gpt2              everyformer           failed: out of memory" in out
    )
    failed, span = json.loads(file.read_text())["rows"]
    assert failed["failure"] == "out of memory" and span["failure"] is None
    assert span["tokens_per_second"] == 64 / span["median"] and span["teraflops"] is None
    assert figure.stat().st_size > 5_000


def test_the_profile_names_operators_and_the_time_without_any(tiny, capsys):
    words = "bench train gpt2 --profile --steps 2 --ways everyformer --device cpu"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert "gpt2 everyformer: " in out and "without any operator" in out and "x  aten::" in out


def test_time_that_two_kernels_cover_counts_once():
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5


def test_rows_are_chosen_by_name_or_by_their_first_word():
    assert choose_rows(["long", "gpt2"]) == [*(name for name in ROWS if name.startswith("long-")), "gpt2"]
    assert choose_rows([]) == list(ROWS)


@pytest.mark.parametrize(
    "words, reason",
    [
        ("gtp2", "no row is named 'gtp2'; did you mean gpt2"),
        ("gpt2 --ways plan", "there is no way 'plan' to train; did you mean plain"),
        ("gpt2 --ways plain-graphs --device cpu", "the way plain-graphs needs a GPU with CUDA"),
        ("gpt2 --steps 0", "steps is 0; give 1 or more"),
        ("gpt2 --json nowhere/x.json", "is in a folder that does not exist; create it first"),
        ("gpt2 --figure x.txt", "x.txt has the suffix .txt, which is not an image type"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(words, reason, capsys):
    assert main(["bench", "train", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert reason in err and "matrix" not in out
