"""Classify: padding, epochs, images and graphs against their definitions."""

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
from everyformer.task.classify import Classify, ImageWork
from tests.task.members import features, nodes

TEXTS = ["a b", "a", "b b a b a b a b " * 5, "c a b", "a b a b a b a b a b", "b", "c c c", "a a c"] * 3


@pytest.fixture
def texts(tmp_path):
    rows = [json.dumps({"text": text, "label": "odd" if text.count("a") % 2 else "even"}) for text in TEXTS]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    return str(tmp_path / "rows.jsonl")


def text_work(data, name="byte-classifier", **fields):
    work = Classify(**({"tokenizer": "bytes"} | fields)).open(data, None)
    changes = {key: number for key, number in work.changes().items() if name != "bert" or key != "classes"}
    network = build(name, "tiny", **changes).eval()
    work.fit(network.value)
    return work, network


@pytest.mark.spec(49)
@pytest.mark.parametrize("member", ["byte-classifier", "bert"])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_padding_changes_no_loss(texts, member, kernel):
    """The loss of a batch is the sum of the losses of its examples, each alone; the mean reading included."""
    torch.manual_seed(0)
    work, network = text_work(texts, member)
    batch = work.batch(0, 12, 0)
    assert not bool(batch["visible_BT"].all())
    with torch.no_grad():
        whole = float(work.loss(network, batch, kernel))
        alone = 0.0
        for row in range(12):
            one = batch.rows(row, row + 1)
            length = int(one["visible_BT"].sum())
            logits = network(one["token_BT"][:, :length], kernel=kernel).logits
            alone += float(F.cross_entropy(logits[1] if member == "bert" else logits, one["label_B"], reduction="sum"))
    assert whole == pytest.approx(alone, rel=1e-5)


def test_an_epoch_has_every_example_once(texts):
    work, _ = text_work(texts)
    count = work.examples()
    rows = [work.batch(step, 7, 3) for step in range(count)]  # seven epochs
    seen = [
        bytes(row[seen].tolist())
        for batch in rows
        for row, seen in zip(batch["token_BT"], batch["visible_BT"], strict=True)
    ]
    wanted = sorted(text.encode()[:64] for text in work.data.splits["train"][0])
    for epoch in range(7):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == wanted
    assert seen[:count] != seen[count : 2 * count]


def test_batches_follow_from_seed_and_step(texts):
    (one, _), (other, _) = text_work(texts), text_work(texts)
    assert torch.equal(one.batch(4, 5, 1)["token_BT"], other.batch(4, 5, 1)["token_BT"])
    assert one.batch(4, 5, 1)["label_B"].tolist() + one.batch(5, 5, 1)["label_B"].tolist() != (
        one.batch(4, 5, 2)["label_B"].tolist() + one.batch(5, 5, 2)["label_B"].tolist()
    )


def test_lengths_are_few_and_never_past_the_context(texts):
    work, _ = text_work(texts)
    shapes = {work.batch(step, 3, 0)["token_BT"].shape[1] for step in range(40)}
    assert shapes <= {16, 32, 48, 64} and len(shapes) > 1


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_a_text_has_berts_marks_and_is_cut(texts, kind):
    work, _ = text_work(texts, tokenizer=kind, vocabulary=300)
    work.context = 6
    cls, sep = work.tokenizer.special_id("[CLS]"), work.tokenizer.special_id("[SEP]")
    for ids in work.tokens(["a b", "a b a b a b a b", ""]):
        assert ids[0] == cls and ids[-1] == sep and len(ids) <= 6
    assert len(work.tokens(["a b a b a b a b"])[0]) == 6


def test_classes_keep_their_names_and_numbers(texts, tmp_path):
    work, _ = text_work(texts)
    assert work.classes == ("even", "odd")
    work.classes = ("new", "odd", "even")
    work.save(tmp_path)
    again = Classify(tokenizer="bytes").open(texts, None, tmp_path)
    assert again.classes == ("new", "odd", "even")
    names = [work.data.classes[label] for label in work.data.splits["train"][1]]
    assert [again.classes[label] for label in again.label["train"].tolist()] == names
    (tmp_path / "classes.json").write_text('["new", "odd", "even"]')  # of an older run
    for gone in (texts, None):  # who only writes reads no data, the embedded ones neither
        alone = Classify(tokenizer="bytes").reopen(gone, None, tmp_path)
        assert alone.classes == ("new", "odd", "even")
    with pytest.raises(ValueError, match="is of a model that does not write; use evaluate"):
        Classify().reopen(texts, None, tmp_path / "nothing")


def test_texts_are_cut_to_the_positions_that_each_layer_knows(texts):
    work = Classify(tokenizer="bytes").open(texts, None)
    value = work.adapt(member("deep-character", "tiny", vocabulary=256, context=6))
    work.fit(value)
    assert work.context == 6
    assert work.loss(value.build(), work.batch(0, 4, 0), "auto").isfinite()


def test_the_answer_names_the_classes(texts):
    work, network = text_work(texts)
    with torch.no_grad():
        network.outputs[0].map.weight.zero_()
        network.outputs[0].map.bias.copy_(torch.tensor([0.0, 3.0]))
    assert work.write(network, "a b") == "odd 95.3%, even 4.7%"
    with pytest.raises(ValueError, match="nothing to classify"):
        work.write(network, "\n")
    assert "odd 95.3%" in work.sample(network, 0)


def test_accuracy_is_the_share_of_right_answers(texts):
    work, network = text_work(texts, valid=0.25)
    with torch.no_grad():
        network.outputs[0].map.weight.zero_()
        network.outputs[0].map.bias.copy_(torch.tensor([1.0, 0.0]))  # always "even"
    found = work.evaluate(network, "valid", None, "auto")
    label_N = work.data.splits["valid"][1]
    assert found["accuracy"] == np.mean(label_N == 0)
    right = np.mean(label_N == 0)
    assert found["loss"] == pytest.approx(right * np.log1p(np.exp(-1)) + (1 - right) * np.log1p(np.exp(1)), rel=1e-5)
    assert work.metric == "accuracy" and work.higher_is_better


def test_models_that_do_not_fit_are_refused(texts):
    work = Classify(tokenizer="bytes").open(texts, None)
    for value, message in [
        (
            build("byte-classifier", "tiny", classes=1).value,
            r"has 2 classes, the model tells 1; set model\.classes to 2",
        ),
        (build("byte-classifier", "tiny", vocabulary=99).value, "has 256 tokens, but the model knows 99"),
        (build("gpt2", "tiny").value, "needs a head Classify, the model has Language"),
        (build("transformer", "tiny").value, "needs a model of one sequence"),
        (build("vit", "tiny").value, "gives tokens, but the model's inputs are patches"),
    ]:
        with pytest.raises(ValueError, match=message):
            work.fit(value)
    with pytest.raises(ValueError, match="has no split 'test'; it has train, valid"):
        work.evaluate(build("byte-classifier", "tiny"), "test", None, "auto")


def test_a_body_gets_the_head_of_the_task(texts):
    """The model's own way of reading where it has one; the last token where it looks back only."""
    work = Classify(tokenizer="bytes").open(texts, None)
    heads = {name: work.adapt(build(name, "tiny").value).outputs for name in ("bert", "gpt2", "byte-classifier")}
    assert heads == {
        "bert": (ClassifyHead(2, "first", pooler=True),),
        "gpt2": (ClassifyHead(2, "last"),),
        "byte-classifier": (ClassifyHead(2, "mean"),),
    }
    for name, (head,) in heads.items():
        work.fit(work.adapt(build(name, "tiny").value))
        assert head.classes == 2


# sets


@pytest.mark.spec(64)
def test_a_set_has_no_order_and_its_padding_no_effect():
    torch.manual_seed(0)
    work = Classify(kind="sets").open(None, None)
    network = features(**work.changes()).build().eval()
    work.fit(network.value)
    batch = work.batch(0, 16, 0)
    mixed = {name: x.clone() for name, x in batch.tensors.items()}
    for row, seen in enumerate(batch["visible_BT"]):
        count = int(seen.sum())
        mixed["feature_BTF"][row, :count] = batch["feature_BTF"][row, :count].flip(0)
        mixed["feature_BTF"][row, count:] = 7.0
    with torch.no_grad():
        plain, other = (float(work.loss(network, one, "auto")) for one in (batch, type(batch)(mixed)))
    assert other == pytest.approx(plain, rel=1e-5)
    with pytest.raises(ValueError, match=r"has vectors of 3 numbers, but the model's inputs are .*model\.inputs to 3"):
        work.fit(features(inputs=4))


# images


def image_work(channels=2, **fields):
    random = np.random.RandomState(0)
    image_NCYX = random.randint(0, 200, (40, channels, 8, 8)).astype(np.uint8)
    image_NCYX[:, 0] //= 3
    label_N = np.arange(40) % 2
    splits = {"train": (image_NCYX[:30], label_N[:30]), "valid": (image_NCYX[30:], label_N[30:])}
    return ImageWork(Classify(**fields), Labelled("images", splits, ("a", "b"), ""), None)


@pytest.mark.spec(63)
def test_images_have_mean_0_and_deviation_1_in_each_channel():
    work = image_work()
    image_BCYX = work.inputs("train", torch.arange(30), None)["image_BCYX"]
    assert torch.allclose(image_BCYX.mean((0, 2, 3)), torch.zeros(2), atol=1e-5)
    assert torch.allclose(image_BCYX.std((0, 2, 3), correction=0), torch.ones(2), atol=1e-5)
    assert work.changes() == {"classes": 2, "image": 8, "channels": 2}


def test_moved_images_are_crops_of_the_widened_one():
    """Only in training, by at most `shift` points each way, as a function of (seed, step)."""
    plain, work = image_work(), image_work(shift=2)
    one, other = plain.batch(3, 20, 0)["image_BCYX"], work.batch(3, 20, 0)["image_BCYX"]
    places = set()
    for image_CYX, moved_CYX in zip(one, other, strict=True):
        wide = F.pad(image_CYX[None], (2, 2, 2, 2), mode="replicate")[0]
        found = [(y, x) for y in range(5) for x in range(5) if torch.equal(wide[:, y : y + 8, x : x + 8], moved_CYX)]
        assert len(found) == 1
        places |= set(found)
    assert len(places) > 8
    assert torch.equal(other, image_work(shift=2).batch(3, 20, 0)["image_BCYX"])
    assert torch.equal(
        work.inputs("valid", torch.arange(10), None)["image_BCYX"],
        plain.inputs("valid", torch.arange(10), None)["image_BCYX"],
    )


def test_images_that_do_not_fit_are_refused():
    work = image_work(channels=3)
    with pytest.raises(ValueError, match=r"gives images of 3 channels, .*choose vit, with model\.channels=3"):
        work.fit(build("vit", "tiny", classes=2).value)
    with pytest.raises(ValueError, match=r"task\.shift=8 moves images of 8 points out of sight"):
        image_work(shift=8)


# graphs


@pytest.fixture(scope="module")
def graph(cache_folder):
    torch.manual_seed(0)
    work = Classify(kind="graph").open(None, None)
    network = nodes(**work.changes()).build()
    work.fit(network.value)
    return work, network


@pytest.mark.spec(71)
def test_the_loss_is_of_the_training_nodes_only(graph):
    """Labels of other nodes are never looked at, their features are; each epoch has each training node once."""
    work, network = graph
    batch = work.batch(0, 40, 0)
    assert sorted(batch["node_B"].tolist()) == sorted(work.graph.splits["train"].tolist())
    logits = network(batch.shared["feature_1NF"], side_inputs=SideInputs(edges=batch.shared["edge_NN"])).logits[0]
    wanted = sum(-logits[node].log_softmax(-1)[work.graph.label_N[node]] for node in work.graph.splits["train"])
    assert float(work.loss(network, batch, "auto").detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    feature_1NF = batch.shared["feature_1NF"].clone().requires_grad_()
    work.loss(network, type(batch)(batch.tensors, batch.shared | {"feature_1NF": feature_1NF}), "auto").backward()
    reached = set(feature_1NF.grad[0].abs().sum(-1).nonzero()[:, 0].tolist())
    near = work.graph.edge_NN[work.graph.splits["train"]].any(0)  # one step, then two for two layers
    assert reached == set(np.flatnonzero(work.graph.edge_NN[near].any(0)).tolist())
    assert reached > set(work.graph.splits["train"].tolist())


def test_a_part_of_the_training_nodes_makes_a_batch(graph):
    """So the batch is cut over pieces and processes like any other, and each sees the whole graph."""
    work, network = graph
    assert (work.examples(), work.count(work.batch(0, 7, 0))) == (40, 7)
    batch = work.batch(2, 12, 0)
    parts = [work.loss(network, part, "auto") for part in (batch.rows(0, 5), batch.rows(5, 12))]
    assert float(sum(parts).detach()) == pytest.approx(float(work.loss(network, batch, "auto").detach()), rel=1e-5)
    seen = [node for step in range(10) for node in work.batch(step, 4, 1)["node_B"].tolist()]
    assert sorted(seen) == sorted(work.graph.splits["train"].tolist())


def test_each_split_of_a_graph_has_its_own_nodes(graph):
    work, network = graph
    label_N, logits = (
        work.graph.label_N,
        network(work.whole["feature_1NF"], side_inputs=SideInputs(edges=work.whole["edge_NN"])).logits[0],
    )
    for split in ("valid", "test"):
        node_N = work.graph.splits[split]
        right = float((logits[node_N].argmax(-1).numpy() == label_N[node_N]).mean())
        assert work.evaluate(network, split, None, "auto")["accuracy"] == pytest.approx(right)
    with pytest.raises(ValueError, match="needs a head PerToken, the model has Classify"):
        work.fit(features())


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
def test_the_kind_is_what_the_data_are(tmp_path, files, kind):
    from everyformer.task.classify import _kind

    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    single = len(files) == 1 and not next(iter(files)).startswith("train")
    assert _kind(str(tmp_path / next(iter(files)) if single else tmp_path), None) == kind
    assert [_kind(name, None) for name in (None, "-", "imdb", "mnist", "cora")] == [
        "text",
        "text",
        "text",
        "images",
        "graph",
    ]
