"""Classify: padding, epochs, images and graphs equal their definitions."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from everyformer import build, member
from everyformer.attention.context import SideInputs
from everyformer.data.labelled import Labelled
from everyformer.network.output_head import Classify as ClassifyHead
from everyformer.task.classify import Classify, kind_of
from everyformer.task.classify_images import LabelledImageData
from everyformer.task.target import ClassTarget
from tests.task.members import features, nodes

TEXTS = ["a b", "a", "b b a b a b a b " * 5, "c a b", "a b a b a b a b a b", "b", "c c c", "a a c"] * 3


@pytest.fixture
def texts(tmp_path):
    rows = [json.dumps({"text": text, "label": "odd" if text.count("a") % 2 else "even"}) for text in TEXTS]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    return str(tmp_path / "rows.jsonl")


def text_task(data, name="byte-classifier", **fields):
    task_data = Classify(**({"tokenizer": "bytes"} | fields)).open(data, None)
    settings = {
        key: setting for key, setting in task_data.member_settings().items() if name != "bert" or key != "classes"
    }
    network = build(name, "tiny", **settings).eval()
    return task_data.fit(network.value), network


@pytest.mark.spec(49)
@pytest.mark.parametrize("member", ["byte-classifier", "bert"])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_padding_does_not_change_the_loss(texts, member, kernel):
    """The loss of a batch is the sum of the losses of its examples, each computed alone."""
    torch.manual_seed(0)
    task, network = text_task(texts, member)
    batch = task.data.batch(0, 12, 0)
    assert not bool(batch["visible_BT"].all())
    with torch.no_grad():
        whole = float(task.objective.loss(network, batch, kernel))
        alone = 0.0
        for row in range(12):
            one = batch.rows(row, row + 1)
            length = int(one["visible_BT"].sum())
            logits = network(one["token_BT"][:, :length], kernel=kernel).logits
            alone += float(F.cross_entropy(logits[1] if member == "bert" else logits, one["label_B"], reduction="sum"))
    assert whole == pytest.approx(alone, rel=1e-5)


def test_an_epoch_has_every_example_once(texts):
    task, _ = text_task(texts)
    count = task.data.examples()
    rows = [task.data.batch(step, 7, 3) for step in range(count)]  # seven epochs
    texts_read = [
        bytes(row[visible].tolist())
        for batch in rows
        for row, visible in zip(batch["token_BT"], batch["visible_BT"], strict=True)
    ]
    expected = sorted(text.encode()[:64] for text in task.data.labelled.splits["train"][0])
    for epoch in range(7):
        assert sorted(texts_read[epoch * count : (epoch + 1) * count]) == expected
    assert texts_read[:count] != texts_read[count : 2 * count]


def test_batches_are_a_function_of_seed_and_step(texts):
    (one, _), (other, _) = text_task(texts), text_task(texts)
    assert torch.equal(one.data.batch(4, 5, 1)["token_BT"], other.data.batch(4, 5, 1)["token_BT"])
    assert one.data.batch(4, 5, 1)["label_B"].tolist() + one.data.batch(5, 5, 1)["label_B"].tolist() != (
        one.data.batch(4, 5, 2)["label_B"].tolist() + one.data.batch(5, 5, 2)["label_B"].tolist()
    )


def test_padded_lengths_are_few_and_never_exceed_the_context(texts):
    task, _ = text_task(texts)
    shapes = {task.data.batch(step, 3, 0)["token_BT"].shape[1] for step in range(40)}
    assert shapes <= {16, 32, 48, 64} and len(shapes) > 1


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_a_text_has_berts_marks_and_is_truncated(texts, kind):
    task, _ = text_task(texts, tokenizer=kind, vocabulary=300)
    task.data.context = 6
    cls, sep = task.data.tokenizer.special_id("[CLS]"), task.data.tokenizer.special_id("[SEP]")
    for ids in task.data.encode(["a b", "a b a b a b a b", ""]):
        assert ids[0] == cls and ids[-1] == sep and len(ids) <= 6
    assert len(task.data.encode(["a b a b a b a b"])[0]) == 6


def test_classes_of_a_run_keep_their_indices(texts, tmp_path):
    task, _ = text_task(texts)
    assert task.data.classes == ("even", "odd")
    assert ClassTarget(("even", "odd"), {"classes": ("odd", "even")}).classes == ("odd", "even")
    task.data.target = ClassTarget(("new", "odd", "even"))
    task.data.save(tmp_path)
    again = Classify(tokenizer="bytes").open(texts, tmp_path)
    assert again.classes == ("new", "odd", "even")
    names = [task.data.labelled.classes[label] for label in task.data.labelled.splits["train"][1]]
    assert [again.classes[label] for label in again.label["train"].tolist()] == names
    for data in (texts, None):  # neither is read for inference
        alone = Classify(tokenizer="bytes").open_for_inference(data, tmp_path)
        assert alone.classes == ("new", "odd", "even")
    with pytest.raises(ValueError, match="takes no prompt; use evaluate"):
        Classify().open_for_inference(texts, tmp_path / "nothing")


def test_texts_are_truncated_to_the_positions_of_each_layer(texts):
    task_data = Classify(tokenizer="bytes").open(texts, None)
    value = task_data.adapt(member("deep-character", "tiny", vocabulary=256, context=6))
    task = task_data.fit(value)
    assert task.data.context == 6
    assert task.objective.loss(value.build(), task.data.batch(0, 4, 0), "auto").isfinite()


def test_predictions_have_the_names_of_the_classes(texts):
    task, network = text_task(texts)
    with torch.no_grad():
        network.outputs[0].map.weight.zero_()
        network.outputs[0].map.bias.copy_(torch.tensor([0.0, 3.0]))
    assert task.inference.generate_text(network, "a b") == "odd 95.3%, even 4.7%"
    with pytest.raises(ValueError, match="has nothing to classify"):
        task.inference.generate_text(network, "\n")
    assert "odd 95.3%" in task.inference.sample(network, 0)


def test_examples_to_predict_are_read_from_the_column_of_texts_or_the_one_that_is_named(texts):
    task, _ = text_task(texts)
    assert [text for _, text in task.inference.read_inputs(texts).rows] == TEXTS
    assert {text for _, text in task.inference.read_inputs(texts, "label").rows} == {"odd", "even"}


def test_accuracy_is_the_share_of_right_predictions(texts):
    task, network = text_task(texts, valid=0.25)
    with torch.no_grad():
        network.outputs[0].map.weight.zero_()
        network.outputs[0].map.bias.copy_(torch.tensor([1.0, 0.0]))  # always "even"
    scored = []
    result = task.objective.evaluate(network, "valid", None, "auto", lambda *done_and_all: scored.append(done_and_all))
    label_N = task.data.labelled.splits["valid"][1]
    assert scored == [(6, 6)] and len(label_N) == 6
    assert result["accuracy"] == np.mean(label_N == 0)
    right = np.mean(label_N == 0)
    assert result["loss"] == pytest.approx(right * np.log1p(np.exp(-1)) + (1 - right) * np.log1p(np.exp(1)), rel=1e-5)
    assert task.objective.metric == "accuracy" and task.objective.higher_is_better


def test_unsuitable_models_are_refused(texts):
    task_data = Classify(tokenizer="bytes").open(texts, None)
    for value, message in [
        (
            build("byte-classifier", "tiny", classes=1).value,
            r"has 2 classes, but the model has 1; set model\.classes to 2",
        ),
        (build("byte-classifier", "tiny", vocabulary=99).value, "has 256 tokens, but the model has 99"),
        (build("gpt2", "tiny").value, "needs an output head Classify, the model has Language"),
        (build("transformer", "tiny").value, "needs a model of one sequence"),
        (build("vit", "tiny").value, "has tokens, but the model's inputs are patches"),
    ]:
        with pytest.raises(ValueError, match=message):
            task_data.fit(value)
    with pytest.raises(ValueError, match="has no split 'test'; it has train, valid"):
        text_task(texts)[0].objective.evaluate(build("byte-classifier", "tiny"), "test", None, "auto")


def test_adapt_adds_the_output_head_of_the_task(texts):
    """With the model's own pooling if it has one; that of GPT-2 is the last token, without a bias."""
    task_data = Classify(tokenizer="bytes").open(texts, None)
    heads = {name: task_data.adapt(build(name, "tiny").value).outputs for name in ("bert", "gpt2", "byte-classifier")}
    assert heads == {
        "bert": (ClassifyHead(2, "first", pooler=True),),
        "gpt2": (ClassifyHead(2, "last", bias=False),),
        "byte-classifier": (ClassifyHead(2, "mean"),),
    }
    for name, (head,) in heads.items():
        task_data.fit(task_data.adapt(build(name, "tiny").value))
        assert head.classes == 2


# sets


@pytest.mark.spec(64)
def test_the_loss_ignores_the_order_of_a_set_and_its_padding():
    torch.manual_seed(0)
    task_data = Classify(kind="sets").open(None, None)
    network = features(**task_data.member_settings()).build().eval()
    task = task_data.fit(network.value)
    batch = task.data.batch(0, 16, 0)
    mixed = {name: x.clone() for name, x in batch.tensors.items()}
    for row, visible in enumerate(batch["visible_BT"]):
        count = int(visible.sum())
        mixed["feature_BTF"][row, :count] = batch["feature_BTF"][row, :count].flip(0)
        mixed["feature_BTF"][row, count:] = 7.0
    with torch.no_grad():
        plain, other = (float(task.objective.loss(network, one, "auto")) for one in (batch, type(batch)(mixed)))
    assert other == pytest.approx(plain, rel=1e-5)
    with pytest.raises(ValueError, match=r"has vectors of 3 numbers, but the model's inputs are .*model\.inputs to 3"):
        task.data.fit(features(inputs=4))


@torch.no_grad()
def test_an_embedding_of_a_set_is_the_mean_of_its_vectors_alone():
    torch.manual_seed(0)
    task_data = Classify(kind="sets").open(None, None)
    network = features(**task_data.member_settings()).build().eval()
    inference, sets = task_data.fit(network.value).inference, task_data.labelled.splits["valid"][0][:5]
    assert len({len(x_TF) for x_TF in sets}) > 1
    mean_BD = torch.stack([network(torch.from_numpy(x_TF)[None]).hidden[0].mean(0) for x_TF in sets])
    np.testing.assert_allclose(inference.embed(network, sets), mean_BD, atol=1e-5)
    np.testing.assert_allclose(inference.embed(network, sets, normalize=True), F.normalize(mean_BD), atol=1e-5)


# images


def image_data(channels=2, **fields):
    random = np.random.RandomState(0)
    image_NCYX = random.randint(0, 200, (40, channels, 8, 8)).astype(np.uint8)
    image_NCYX[:, 0] //= 3
    label_N = np.arange(40) % 2
    splits = {"train": (image_NCYX[:30], label_N[:30]), "valid": (image_NCYX[30:], label_N[30:])}
    return LabelledImageData(Classify(**fields), Labelled("images", splits, ("a", "b"), ""), None)


@pytest.mark.spec(63)
def test_images_are_normalized_in_each_channel():
    data = image_data()
    image_BCYX = data.tensors("train", torch.arange(30), None)["image_BCYX"]
    assert torch.allclose(image_BCYX.mean((0, 2, 3)), torch.zeros(2), atol=1e-5)
    assert torch.allclose(image_BCYX.std((0, 2, 3), correction=0), torch.ones(2), atol=1e-5)
    assert data.member_settings() == {"classes": 2, "image": 8, "channels": 2}


def test_shifted_images_are_crops_of_the_padded_image():
    """Only in training, by at most `shift` pixels in each direction, as a function of (seed, step)."""
    plain, shifted = image_data(), image_data(shift=2)
    one, other = plain.batch(3, 20, 0)["image_BCYX"], shifted.batch(3, 20, 0)["image_BCYX"]
    offsets = set()
    for image_CYX, moved_CYX in zip(one, other, strict=True):
        wide = F.pad(image_CYX[None], (2, 2, 2, 2), mode="replicate")[0]
        result = [(y, x) for y in range(5) for x in range(5) if torch.equal(wide[:, y : y + 8, x : x + 8], moved_CYX)]
        assert len(result) == 1
        offsets |= set(result)
    assert len(offsets) > 8
    assert torch.equal(other, image_data(shift=2).batch(3, 20, 0)["image_BCYX"])
    assert torch.equal(
        shifted.tensors("valid", torch.arange(10), None)["image_BCYX"],
        plain.tensors("valid", torch.arange(10), None)["image_BCYX"],
    )


def test_augmentation_is_for_photographs_in_classes_by_default():
    """Mirrored digits are not digits, so grayscale images are left alone; only training images change."""
    assert [(one.shift, one.flip) for one in (image_data(1), image_data(3), image_data(3, augment="none"))] == [
        (0, False),
        (1, True),
        (0, False),
    ]
    assert "task.augment=none" in image_data(3).notes[0] and not image_data(1).notes
    plain, flipped = image_data(1), image_data(1, augment="flip")
    one, other = plain.batch(0, 20, 0)["image_BCYX"], flipped.batch(0, 20, 0)["image_BCYX"]
    mirrored_B = (other == one.flip(-1)).flatten(1).all(1)
    assert (mirrored_B | (other == one).flatten(1).all(1)).all() and 4 < mirrored_B.sum() < 16
    assert torch.equal(other, image_data(1, augment="flip").batch(0, 20, 0)["image_BCYX"])
    row_N = torch.arange(10)
    assert torch.equal(
        flipped.tensors("valid", row_N, None)["image_BCYX"], plain.tensors("valid", row_N, None)["image_BCYX"]
    )


def test_unsuitable_images_are_refused():
    data = image_data(channels=3)
    with pytest.raises(ValueError, match=r"has images of 3 channels, .*choose vit, with model\.channels=3"):
        data.fit(build("vit", "tiny", classes=2).value)
    with pytest.raises(ValueError, match=r"task\.shift=8 moves images of 8 pixels out of view"):
        image_data(shift=8)


# graphs


@pytest.fixture(scope="module")
def graph(cache_folder):
    torch.manual_seed(0)
    task_data = Classify(kind="graph").open(None, None)
    network = nodes(**task_data.member_settings()).build()
    return task_data.fit(network.value), network


@pytest.mark.spec(71)
def test_only_training_nodes_have_a_loss(graph):
    """The features of other nodes are read, their labels are not."""
    task, network = graph
    batch = task.data.batch(0, 40, 0)
    assert sorted(batch["node_B"].tolist()) == sorted(task.data.graph.splits["train"].tolist())
    logits = network(batch.shared["feature_1NF"], side_inputs=SideInputs(edges=batch.shared["edge_NN"])).logits[0]
    expected = sum(
        -logits[node].log_softmax(-1)[task.data.graph.label_N[node]] for node in task.data.graph.splits["train"]
    )
    assert float(task.objective.loss(network, batch, "auto").detach()) == pytest.approx(
        float(expected.detach()), rel=1e-5
    )
    feature_1NF = batch.shared["feature_1NF"].clone().requires_grad_()
    task.objective.loss(
        network, type(batch)(batch.tensors, batch.shared | {"feature_1NF": feature_1NF}), "auto"
    ).backward()
    reached = set(feature_1NF.grad[0].abs().sum(-1).nonzero()[:, 0].tolist())
    near = task.data.graph.edge_NN[task.data.graph.splits["train"]].any(0)  # one step, then two for two layers
    assert reached == set(np.flatnonzero(task.data.graph.edge_NN[near].any(0)).tolist())
    assert reached > set(task.data.graph.splits["train"].tolist())


def test_a_batch_is_a_part_of_the_training_nodes(graph):
    """So a batch is split into pieces like any other, and each piece reads the whole graph."""
    task, network = graph
    assert (task.data.examples(), task.data.count(task.data.batch(0, 7, 0))) == (40, 7)
    batch = task.data.batch(2, 12, 0)
    parts = [task.objective.loss(network, part, "auto") for part in (batch.rows(0, 5), batch.rows(5, 12))]
    assert float(sum(parts).detach()) == pytest.approx(
        float(task.objective.loss(network, batch, "auto").detach()), rel=1e-5
    )
    drawn = [node for step in range(10) for node in task.data.batch(step, 4, 1)["node_B"].tolist()]
    assert sorted(drawn) == sorted(task.data.graph.splits["train"].tolist())


def test_each_split_of_a_graph_has_its_own_nodes(graph):
    task, network = graph
    label_N, logits = (
        task.data.graph.label_N,
        network(
            task.data.whole["feature_1NF"],
            side_inputs=SideInputs(edges=task.data.whole["edge_NN"]),
        ).logits[0],
    )
    for split in ("valid", "test"):
        node_N = task.data.graph.splits[split]
        right = float((logits[node_N].argmax(-1).numpy() == label_N[node_N]).mean())
        assert task.objective.evaluate(network, split, None, "auto")["accuracy"] == pytest.approx(right)
    with pytest.raises(ValueError, match="needs an output head PerToken, the model has Classify"):
        task.data.fit(features())


@torch.no_grad()
def test_each_node_of_another_graph_is_embedded_and_predicted(graph):
    """Words that are indices are shares of a node's words, and edges have both directions."""
    task, network = graph
    tree = {"num_features": 40, "features": [[0], [1], [2, 3], [4, 5, 6, 7]], "edges": [[0, 1], [3, 2]]}
    feature_1NF = torch.stack([F.one_hot(torch.tensor(words), 40).float().mean(0) for words in tree["features"]])[None]
    edge_NN = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).bool()
    output = network(feature_1NF, side_inputs=SideInputs(edges=edge_NN))
    hidden_ND = output.hidden[0]
    np.testing.assert_allclose(task.inference.embed(network, tree), hidden_ND, atol=1e-5)
    np.testing.assert_allclose(task.inference.embed(network, tree, normalize=True), F.normalize(hidden_ND), atol=1e-5)
    found = task.inference.predict(network, tree).probabilities
    np.testing.assert_allclose(found, output.logits[0].softmax(-1), atol=1e-5)
    assert task.inference.takes_graph and task.inference.predicts_targets and task.inference.can_predict


@pytest.mark.parametrize(
    "files, kind",
    [
        ({"a.jsonl": '{"text": "x", "label": 1}'}, "text"),
        ({"a.jsonl": '{"set": [[1]], "label": 1}'}, "sets"),
        ({"graph.json": "{}"}, "graph"),
        ({"cat/1.png": "", "dog/1.png": ""}, "images"),
        ({"train-images-idx3-ubyte": ""}, "images"),
        ({"pos/1.txt": "", "neg/1.txt": ""}, "text"),
    ],
)
def test_the_kind_is_found_from_the_data(tmp_path, files, kind):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    single = len(files) == 1 and not next(iter(files)).startswith("train")
    assert kind_of(str(tmp_path / next(iter(files)) if single else tmp_path), None) == kind
    assert [kind_of(name, None) for name in (None, "-", "imdb", "mnist", "cora")] == [
        "text",
        "text",
        "text",
        "images",
        "graph",
    ]
