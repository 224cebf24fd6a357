"""Regress: the loss and the metrics equal their definitions on every kind of input; classes that are numbers are said."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from everyformer import build, member
from everyformer.data.graphs import open_graph
from everyformer.data.labelled import open_labelled
from everyformer.infer.estimate import Estimate
from everyformer.network.output_head import Classify as ClassifyHead
from everyformer.network.output_head import PerToken
from everyformer.network.output_head import Regress as RegressHead
from everyformer.task.classify import Classify, Regress
from everyformer.task.table import task_for
from everyformer.task.target import NumberTarget
from everyformer.train import Recipe, load, train
from tests.network import close, model, ready, tokens
from tests.spec import regression as spec
from tests.task.members import features, nodes


@pytest.fixture
def prices(tmp_path):
    random = np.random.RandomState(0)
    texts = ["".join(random.choice(list("ab"), 8)) for _ in range(60)]
    rows = ["text,price"] + [f"{text},{1000 + 10 * text.count('a')}" for text in texts]
    (tmp_path / "prices.csv").write_text("\n".join(rows))
    return str(tmp_path / "prices.csv")


def fitted(data, **fields):
    task_data = Regress(**({"tokenizer": "bytes", "label": "price"} | fields)).open(data)
    value = task_data.adapt(member("byte-classifier", "tiny", **task_data.member_settings()))
    return task_data.fit(value), value.build().eval()


def test_the_head_is_a_linear_map_of_the_pooled_vector():
    visible = [[True] * 6, [True, True, True, False, False, False]]
    network, x = ready(model("full", outputs=(RegressHead(2, "mean"),))), tokens()
    output, head = network(x, visible=torch.tensor(visible)), network.outputs[0]
    for row, z_TD in enumerate(output.hidden):
        literal = spec.regress(z_TD.tolist(), visible[row], head.map.weight.tolist(), head.map.bias.tolist())
        close(output.logits[row], torch.tensor(literal, dtype=torch.float64))


def test_the_loss_is_the_squared_error_of_standardized_numbers(prices):
    task, network = fitted(prices)
    batch = task.data.batch(0, 8, 0)
    train_N = np.asarray(task.data.labelled.splits["train"][1])
    assert batch["label_B"].double().numpy() == pytest.approx(
        (train_N[epoch_rows(task, 8)] - train_N.mean()) / train_N.std(), abs=1e-5
    )
    with torch.no_grad():
        f = network(batch["token_BT"], visible=batch["visible_BT"]).logits[:, 0].tolist()
        loss = float(task.objective.loss(network, batch, "auto"))
    assert loss == pytest.approx(8 * spec.mean_squared_error(f, batch["label_B"].tolist()), rel=1e-5)


def epoch_rows(task, size):
    from everyformer.task.batch import epoch_rows as rows

    return rows(task.data.examples(), 0, size, 0).numpy()


def test_the_metrics_are_their_definitions_in_the_units_of_the_data(prices):
    task, network = fitted(prices, valid=0.4)
    texts, label_N = task.data.labelled.splits["valid"]
    f = task.inference.predict(network, texts).values.tolist()
    result, y = task.objective.evaluate(network, "valid", None, "auto"), label_N.tolist()
    assert result["mean_squared_error"] == pytest.approx(spec.mean_squared_error(f, y), rel=1e-5)
    assert result["r2"] == pytest.approx(spec.r2(f, y), rel=1e-4)
    half = 2.068658 * np.std((np.array(f) - y) ** 2, ddof=1) / 24**0.5  # Student's quantile for 23 degrees of freedom
    assert [result["mean_squared_error"] - result["low"], result["high"] - result["mean_squared_error"]] == [
        pytest.approx(half, rel=1e-4)
    ] * 2
    assert result["pearson"] == pytest.approx(spec.pearson(f, y), abs=1e-4)
    assert (task.objective.metric, task.objective.higher_is_better) == ("mean_squared_error", False)
    assert result["targets"] == result["targets_in_split"] == len(texts) == 24


def metrics(outputs, labels):
    target, estimate = NumberTarget(5.0, 2.0), Estimate()
    examples = torch.tensor(outputs)[:, None], torch.tensor(labels)
    estimate.add(target.losses(*examples), 1)
    return target.metrics(target.sums(*examples), estimate)


def test_metrics_that_are_undefined_are_left_out():
    """If all numbers, or all predictions, are equal: also to their mean, and up to rounding."""
    always = {"mean_squared_error", "low", "high", "loss"}
    for equal in (0.0, 0.5, 1e3 / 3, 1e5 / 3):
        assert set(metrics([0.5, 1.0, 2.0], [equal] * 3)) == always
        assert set(metrics([equal] * 3, [0.0, 1.0, 2.0])) == always | {"r2"}


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3])
def test_correlations_have_no_unit(scale):
    f, y = [0.5, 1.0, -2.0, 0.25], [1.0, 2.0, -1.0, 0.0]
    found = metrics([scale * one for one in f], [scale * one for one in y])
    assert found["r2"] == pytest.approx(spec.r2(f, y), rel=1e-5)
    assert found["pearson"] == pytest.approx(spec.pearson(f, y), rel=1e-5)


def test_a_run_predicts_numbers_and_keeps_their_unit(prices, tmp_path, monkeypatch):
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "cache"))
    settings = ("task.label=price", "task.tokenizer=bytes", "run.steps=60", "run.batch=16", "run.evaluate=0")
    recipe = Recipe.of("byte-classifier", *settings, size="tiny", data=prices, task="regress")
    trained = train(recipe, tmp_path / "run")
    assert trained.metrics["r2"] > 0.5
    run = load(tmp_path / "run", data=False)
    assert load(tmp_path / "run").predict(["aaaa"]).values == run.predict(["aaaa"]).values
    low, high = run.predict(["bbbbbbbb", "aaaaaaaa"]).values
    assert 990 < low < 1030 < 1050 < high < 1100
    assert float(run.generate("aaaaaaaa")) == pytest.approx(high, rel=1e-4)


def test_the_head_reads_the_sequence_as_the_models_own(prices):
    task_data = Regress(tokenizer="bytes", label="price").open(prices)
    heads = {name: task_data.adapt(build(name, "tiny").value).outputs for name in ("bert", "gpt2", "byte-classifier")}
    assert heads == {
        "bert": (RegressHead(1, "first", pooler=True),),
        "gpt2": (RegressHead(1, "last", bias=False),),
        "byte-classifier": (RegressHead(1, "mean"),),
    }
    with pytest.raises(ValueError, match="regress needs an output head Regress, the model has Classify"):
        task_data.fit(build("byte-classifier", "tiny").value)
    own = model("full", outputs=(RegressHead(),))
    assert isinstance(task_for(own), Regress)
    classify = Classify(tokenizer="bytes", label="price").open(prices)
    assert classify.adapt(own).outputs == (ClassifyHead(len(classify.classes), "mean"),)


@pytest.mark.parametrize(
    "name, changes, options",
    [
        ("bert", {}, {"pooler_activation": "tanh"}),
        ("bert", {"segments": 0}, {"pooler_activation": "relu"}),
        ("albert", {}, {"pooler_activation": "tanh"}),
        ("electra", {}, {"pooler_activation": "gelu"}),
        ("gpt2", {}, {"reading": "last", "bias": False}),
        ("vit", {}, {"reading": "mean"}),
    ],
)
def test_a_model_without_a_head_for_examples_gets_that_of_its_kind(name, changes, options):
    """DistilBERT has no segments; ELECTRA's embedding is narrow, as is ALBERT's, which repeats one layer."""
    value = replace(member(name, "tiny"), **changes)
    if "pooler_activation" in options:
        options |= {"reading": "first", "pooler": True, "dropout": value.dropout}
    pretrained = () if name == "vit" else value.outputs[:1]
    for outputs in {pretrained, ()}:
        assert NumberTarget(0.0, 1.0).head(replace(value, outputs=outputs)) == RegressHead(1, **options)


@pytest.mark.parametrize("kind", ["text", "sets", "images", "graph"])
def test_every_kind_of_input_has_numbers(kind, cache_folder):
    """The embedded data of each kind have a number of each example, and a few steps on it lower the error."""
    torch.manual_seed(0)
    task_data = Regress(kind=kind, tokenizer="bytes").open(None)
    settings = task_data.member_settings()
    value = {
        "text": lambda: member("byte-classifier", "tiny", **settings),
        "sets": lambda: features(**settings),
        "images": lambda: member("vit", "tiny", **settings),
        "graph": lambda: nodes(**settings),
    }[kind]()
    value = task_data.adapt(value)
    assert value.outputs[0] == (PerToken(1) if kind == "graph" else RegressHead(1, value.outputs[0].reading))
    task, network = task_data.fit(value), value.build()
    optimizer = torch.optim.Adam(network.parameters(), 5e-3)
    batch, losses = task.data.batch(0, 16, 0), []
    for _ in range(40):
        loss = task.objective.loss(network, batch, "auto") / 16
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert min(losses) < 0.6 * losses[0]
    assert {"mean_squared_error", "loss"} <= set(task.objective.evaluate(network.eval(), "valid", 32, "auto"))


@pytest.mark.parametrize(
    "numbers, said",
    [
        ([str(n % 5) for n in range(40)], False),
        ([str(n) for n in range(40)], True),
        (["0.5", "1.5"] * 20, True),
        (["a", "b"] * 20, False),
    ],
)
def test_classes_that_are_numbers_are_said_with_the_remedy(tmp_path, numbers, said):
    rows = ["text,label"] + [f"x{n},{number}" for n, number in enumerate(numbers)]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    notes = open_labelled(str(tmp_path / "a.csv"), "text", None, "label", 0.1).notes
    assert bool(notes) == said
    if said:
        assert "different numbers, which are taken as" in notes[0] and "use --task regress" in notes[0]
    graph = {"features": [[1]] * 40, "edges": [], "labels": numbers, "train": list(range(40))}
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    assert bool(open_graph(str(tmp_path / "graph.json"), 0.5).notes) == said


@pytest.mark.parametrize(
    "cell, message",
    [
        ("cheap", r"'label' on line 3 of .* is 'cheap'; give a finite number, or use --task classify"),
        ("nan", "is 'nan'; give a finite number"),
        ("", "is ''; give a finite number"),
        ("1", r"the 2 training labels of .* are all 1, so there is nothing to predict"),
    ],
)
def test_labels_that_are_no_numbers_are_refused(tmp_path, cell, message):
    (tmp_path / "a.csv").write_text(f"text,label\nx,1\ny,{cell}\nz,1\n")
    with pytest.raises(ValueError, match=message):
        open_labelled(str(tmp_path / "a.csv"), "text", None, "label", 0.1, numbers=True)
