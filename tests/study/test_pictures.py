"""Pictures of what a network computes: every one reads its input as the task does, and shows the arrays of a probe."""

from __future__ import annotations

import io
from textwrap import wrap
from typing import Any

import pytest
import torch
from rich.console import Console

import everyformer as ef
from everyformer.attention.context import Probe, SideInputs
from everyformer.cli.main import main
from everyformer.cli.show_run import print_attention
from everyformer.network.lstm_cell import LstmCell
from everyformer.network.residual import Gate
from everyformer.study import attention_pictures, inner_maps
from everyformer.study.attention_pictures import layout, neighbourhood, wrapped
from everyformer.task.attention_maps import CLASS_TOKEN, attention_maps, probe
from everyformer.task.batch import Batch
from everyformer.task.classify import Classify
from everyformer.task.masked import Masked
from everyformer.task.table import task_for
from everyformer.task.task import FittedTask
from everyformer.task.translate import Translate
from everyformer.train.recipe import Recipe, override


def ready(member: str, task: Any = None, data: str | None = None, *settings: str) -> tuple[Any, FittedTask]:
    """An untrained network at its tiny size with its task, as a run makes them."""
    torch.manual_seed(0)
    recipe = override(Recipe(member=member, size="tiny", task=task or task_for(member, "tiny")), list(settings))
    opened = recipe.task.open(data)
    model = opened.adapt(recipe.value(opened.member_settings()))
    return model.build().eval(), opened.fit(model)


def logits_of(network: Any, inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return network(*inputs.inputs, **inputs.options).logits


def test_a_classifier_reads_the_marks_that_it_adds():
    """The same tokens as in `generate`, where the class comes from."""
    network, fitted = ready("bert", Classify())
    data: Any = fitted.data
    inputs = fitted.inference.probe_input(network, "a fine film")
    assert inputs.labels[0] == "[CLS]" and inputs.labels[-1] == "[SEP]" and len(inputs.labels) > 3
    objective: Any = fitted.objective
    _, wanted_1C = objective.forward(network, Batch(data.collate(data.encode(["a fine film"]))), "auto")
    torch.testing.assert_close(logits_of(network, inputs), wanted_1C, rtol=0, atol=0)
    maps = attention_maps(network, inputs)
    count = len(inputs.labels)
    assert all(weight_HQK.shape[1:] == (count, count) for weight_HQK in maps.weight_LHQK)  # without padding
    torch.testing.assert_close(maps.weight_LHQK[0].sum(-1), torch.ones(maps.weight_LHQK[0].shape[:2]))


def test_a_masked_model_reads_its_marks_and_segments():
    network, fitted = ready("bert", Masked())
    inputs = fitted.inference.probe_input(network, "to be")
    assert (inputs.labels[0], inputs.labels[-1]) == ("[CLS]", "[SEP]")
    first = SideInputs(segments=torch.zeros(1, len(inputs.labels), dtype=torch.long))
    assert torch.equal(network(*inputs.inputs).hidden, network(*inputs.inputs, side_inputs=first).hidden)


def test_a_pair_is_drawn_with_its_own_translation():
    network, fitted = ready("transformer", Translate(tokenizer="characters", context=20))
    inputs = fitted.inference.probe_input(network, "apples")
    assert list(inputs.source_labels) == [*"apples", "[SEP]"] and inputs.labels[0] == "[CLS]"
    for part, queries, keys in (
        (None, inputs.labels, inputs.source_labels),
        ("encoder", inputs.source_labels, inputs.source_labels),
        ("decoder", inputs.labels, inputs.labels),
    ):
        maps = attention_maps(network, inputs, part)
        assert (list(maps.queries), list(maps.keys)) == (list(queries), list(keys))
        assert len(maps.weight_LHQK) == 2
        for weight_HQK in maps.weight_LHQK:
            assert weight_HQK.shape[1:] == (len(queries), len(keys))
            torch.testing.assert_close(weight_HQK.sum(-1), torch.ones(weight_HQK.shape[:2]))  # nothing on padding
    figure = attention_pictures.draw(attention_maps(network, inputs))
    assert [one.get_text() for one in figure.subfigs[0].axes[-2].get_xticklabels()] == list(inputs.source_labels)
    with pytest.raises(ValueError, match="no part of an encoder-decoder is named 'croos'; did you mean cross"):
        attention_maps(network, inputs, "croos")
    with pytest.raises(ValueError, match="nothing to translate"):
        fitted.inference.probe_input(network, " ")


def test_a_long_translation_is_drawn_as_far_as_it_is_legible(monkeypatch):
    network, fitted = ready("transformer", Translate(tokenizer="characters", context=20))
    maps = attention_maps(network, fitted.inference.probe_input(network, "apples"))
    monkeypatch.setattr(attention_pictures, "MAX_TOKENS", count := len(maps.keys))
    assert len(maps.queries) > count
    title, heads = attention_pictures.matrices(maps)
    assert title.endswith(f"the first {count} of {len(maps.queries)} queries")
    torch.testing.assert_close(heads[0].value_QK, maps.weight_LHQK[0][0, :count])
    labels = attention_pictures.draw(maps).subfigs[0].axes[0].get_yticklabels()
    assert [one.get_text() for one in labels] == list(maps.queries)[:count]
    monkeypatch.setattr(attention_pictures, "MAX_TOKENS", count - 1)
    with pytest.raises(ValueError, match=f"{count} positions, but 1 to {count - 1} can be drawn"):
        attention_pictures.draw(maps)


def test_a_model_reads_a_text_or_an_example():
    network, fitted = ready("gpt2")
    with pytest.raises(ValueError, match="reads no examples by number; give a text"):
        fitted.inference.probe_input(network, example=0)
    network, fitted = ready("byte-classifier", Classify())
    second, default = (fitted.inference.probe_input(network, example=one).labels for one in (1, None))
    assert second != default
    with pytest.raises(ValueError, match="a text and an example are given, and a model reads one of them"):
        fitted.inference.probe_input(network, "a fine film", 1)


def test_a_terminal_shades_weights_relative_to_the_largest():
    network, fitted = ready("transformer", Translate(tokenizer="characters", context=20))
    maps = attention_maps(network, fitted.inference.probe_input(network, "apples"))
    largest = max(float(weight_HQK.max()) for weight_HQK in maps.weight_LHQK)
    screen = Console(file=io.StringIO(), width=80)
    print_attention(screen, maps)
    shown = screen.file.getvalue()
    assert largest < 0.75 and "█" in shown and f"more weight, up to {largest:.2g}\n" in shown


@pytest.mark.parametrize("width", [30, 57, 72])
def test_the_lines_of_a_title_are_about_equally_long(width):
    for title in (
        "cross-attention: rows are positions of the decoder, columns of the encoder",
        "gates by position: groups of features, from closed to open",
        "short",
    ):
        lines = wrapped(title, width).split("\n")
        assert " ".join(lines) == title and max(map(len, lines)) <= width and len(lines) == len(wrap(title, width))
        assert min(map(len, lines)) > 0.6 * max(map(len, lines))


def test_attention_over_an_image_is_that_of_the_class_token():
    network, fitted = ready("vit", Classify(kind="images"))
    inputs = fitted.inference.probe_input(network, example=2)
    maps = attention_maps(network, inputs)
    assert maps.image is not None and maps.keys[0] == CLASS_TOKEN and maps.image.query == 0
    figure = attention_pictures.draw(maps)
    heat_YX = torch.from_numpy(figure.subfigs[0].axes[0].images[1].get_array().data)
    wanted_K = maps.weight_LHQK[0][0, 0, 1:]
    torch.testing.assert_close(heat_YX.flatten(), wanted_K / wanted_K.max())
    image: Any = fitted.data
    wanted_CYX = torch.from_numpy(image.labelled.splits["valid"][0][2]) / 255
    torch.testing.assert_close(maps.image.pixel_CYX, wanted_CYX)
    with pytest.raises(ValueError, match="reads images, not text"):
        fitted.inference.probe_input(network, "a text")
    with pytest.raises(ValueError, match="example 100000 is not one of the"):
        fitted.inference.probe_input(network, example=100_000)


def test_attention_of_a_generator_of_images_is_drawn_where_its_keys_are():
    network, fitted = ready("image-transformer")
    maps = attention_maps(network, fitted.inference.probe_input(network))
    assert (
        maps.image is not None
        and maps.image.query is not None
        and "marked pixel" in str(attention_pictures.draw(maps).subfigs[0].get_suptitle())
    )
    query, (rows, columns) = maps.image.query, maps.image.pixel_CYX.shape[1:]
    assert maps.image.cell_P2[query + 1].tolist() == [rows // 2, columns // 2]  # read by the next position
    assert maps.image.cell_P2[0].tolist() == [-1, -1] and torch.all(maps.image.cell_P2[1:] >= 0)
    assert all((weight_HQK[:, query, query + 1 :] == 0).all() for weight_HQK in maps.weight_LHQK)


def test_attention_of_a_graph_follows_its_edges():
    network, fitted = ready("graph-classifier")
    inputs = fitted.inference.probe_input(network)
    maps = attention_maps(network, inputs)
    assert maps.graph is not None
    edge_NN = maps.graph.edge_NN
    assert all((weight_HQK[:, ~edge_NN] == 0).all() for weight_HQK in maps.weight_LHQK)
    nodes = neighbourhood(edge_NN, maps.graph.node)
    assert nodes[0] == maps.graph.node and len(nodes) == len(set(nodes)) <= 40
    assert f"node {maps.graph.node}" in str(attention_pictures.draw(maps).subfigs[0].get_suptitle())


def test_the_layout_puts_neighbours_closer_than_others():
    joined_NN = torch.zeros(8, 8, dtype=torch.bool)
    for one in range(8):
        joined_NN[one, (one + 1) % 8] = joined_NN[(one + 1) % 8, one] = True
    at = torch.from_numpy(layout(joined_NN))
    apart_NN = torch.cdist(at, at)
    assert apart_NN[joined_NN].max() < apart_NN[~joined_NN & ~torch.eye(8, dtype=torch.bool)].max()


@pytest.mark.parametrize("member", ["universal-transformer", "act-rnn"])
def test_halting_is_drawn_by_step_and_position(member):
    settings = ["model.halting=freeze"] if member == "universal-transformer" else []
    network, fitted = ready(member, None, None, *settings)
    maps = inner_maps.halting_maps(network, fitted.inference.probe_input(network, "to be"))
    for one in maps:
        assert one.value_RT.shape == (len(one.rows), 5) and one.count_T is not None
        assert one.rows[0] == "step 0"  # as attention names the same step
        torch.testing.assert_close(one.value_RT.sum(0), torch.ones(5))
        assert one.count_T.tolist() == (one.value_RT > 0).sum(0).tolist()
    figure = inner_maps.draw(maps, "halting")
    assert len(figure.axes) == len(maps) + 1
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == list("to be")


def test_buckets_are_those_of_the_keys():
    network, fitted = ready("reformer")
    inputs = fitted.inference.probe_input(network, "to be or not")
    (side,) = probe(network, inputs)
    maps, first = inner_maps.bucket_maps(network, inputs), network.body.layers[0].sublayers[0]
    rounds, heads = first.hash.pattern.rounds, first.heads.heads
    assert len(maps) == len(side.probe.buckets) * heads and maps[0].value_RT.shape == (rounds, 12)
    assert torch.equal(maps[1].value_RT, side.probe.buckets[0][0, 1])
    assert min(int(one.value_RT.min()) for one in maps) >= 0
    assert max(int(one.value_RT.max()) for one in maps) < first.hash.pattern.buckets
    figure = inner_maps.draw(maps, "buckets")
    written = [int(text.get_text()) for text in figure.axes[0].texts]
    assert written == maps[0].value_RT.flatten().tolist()


@pytest.mark.parametrize(
    "kind, names", [("gru", ["reset", "update"]), ("output", ["sublayer"]), ("highway", ["stream"]), ("none", [])]
)
def test_the_gate_that_is_recorded_is_the_one_that_is_used(kind, names):
    """A gate that is closed passes the stream alone; the record says the same."""
    for bias, share in ((50.0, 0.0), (-50.0, 1.0)):
        gate, recorded = Gate(4, kind, bias).double(), Probe()
        x_BTD, y_BTD = torch.randn(1, 3, 4).double(), torch.randn(1, 3, 4).double()
        output_BTD = gate(x_BTD, y_BTD, recorded)
        assert list(recorded.gates[0]) == names
        if names:
            passed = recorded.gates[0][names[-1]] if kind != "highway" else 1 - recorded.gates[0]["stream"]
            torch.testing.assert_close(passed, torch.full_like(passed, share))
            if share == 0:
                torch.testing.assert_close(output_BTD, x_BTD)


def test_the_gates_of_an_lstm_are_those_of_its_equations():
    torch.manual_seed(0)
    cell, x_BTD = LstmCell(3, 4, "ifco", "tanh", True, True).double(), torch.randn(2, 5, 3).double()
    context, recorded = ef.attention.context.Context.of(5, 5), Probe()
    context.call.probe = recorded
    h_BTD, _ = cell(x_BTD, None, None, context, False)
    gates, c_BD = recorded.cell_gates[0], torch.zeros(2, 4).double()
    assert list(gates) == ["input", "forget", "output"]
    for time in range(5):
        before_BD = h_BTD[:, time - 1] if time else torch.zeros(2, 4).double()
        candidate_BD = (cell.of_x(x_BTD[:, time]) + cell.of_h(before_BD))[:, 8:12].tanh()
        c_BD = gates["input"][:, time] * candidate_BD + gates["forget"][:, time] * c_BD
        torch.testing.assert_close(gates["output"][:, time] * c_BD.tanh(), h_BTD[:, time])


def test_gates_are_drawn_by_layer_and_position():
    network, fitted = ready("gtrxl", None, None, "model.layers=1")
    inputs = fitted.inference.probe_input(network, *(["to be"] if hasattr(fitted.inference, "tokenizer") else []))
    maps = inner_maps.gate_maps(network, inputs)
    assert [one.title.partition(", mean")[0] for one in maps] == [
        f"layer 0, {sublayer}: {gate} gate" for sublayer in ("Attention", "FeedForward") for gate in ("reset", "update")
    ]
    assert all(0 <= one.value_RT.min() <= one.value_RT.max() <= 1 for one in maps)
    assert torch.equal(maps[0].value_RT.mean(1), maps[0].value_RT.mean(1).sort().values)  # from closed to open
    assert len(inner_maps.draw(maps, "gates").axes) == len(maps) + 1


@pytest.mark.parametrize(
    "maps, reason",
    [
        (inner_maps.halting_maps, "does not halt by position; give a run of universal-transformer or act-rnn"),
        (inner_maps.bucket_maps, "does not hash its keys; give a run of reformer"),
        (inner_maps.gate_maps, "has no gates; give a run of gtrxl"),
    ],
)
def test_a_model_without_what_is_drawn_is_refused(maps, reason):
    network, fitted = ready("gpt2")
    with pytest.raises(ValueError, match=reason):
        maps(network, fitted.inference.probe_input(network, "to be"))


def test_the_commands_draw_the_pictures_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    words = "train lstm --size tiny --data text.txt run.steps=1 run.batch=1 run.evaluate=0 run.examples=1 --out run"
    assert main(words.split()) == 0
    for kind in ("gates", "attention"):
        assert main(["show", kind, "run", "--text", "to be", "--out", f"{kind}.png"]) == 0
        assert (tmp_path / f"{kind}.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main(["show", "buckets", "run"]) == 2
    assert "does not hash its keys" in capsys.readouterr().err
    assert main(["show", "gates", "run", "--text", "to be " * 20, "--out", "gates.png"]) == 2
    assert "120 positions, but at most 64 can be drawn" in capsys.readouterr().err
