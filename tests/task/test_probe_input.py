"""One example as a network reads it: the output is that of evaluation or prediction, and each position has a label."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from everyformer import member
from everyformer.data.labelled import Labelled
from everyformer.task.batch import Batch
from everyformer.task.classify import Classify
from everyformer.task.classify_data import TextData
from everyformer.task.probe_input import EXAMPLE
from tests.task.members import features, nodes
from tests.task.test_classify import image_data

IDS = [np.array(row, np.uint32) for row in ([3, 1, 4], [1, 5, 9, 2], [6, 5])]


def fitted(task_data, value):
    torch.manual_seed(0)
    return task_data.fit(value), value.build().eval()


def close_logits(network, inputs, expected):
    with torch.no_grad():
        torch.testing.assert_close(network(*inputs.inputs, **inputs.options).logits, expected)


@pytest.mark.parametrize(
    "rows, default",
    [(["the first", "second", "c"], EXAMPLE), (["a b"], EXAMPLE), (IDS, IDS[0])],
    ids=["texts", "one text", "ids"],
)
def test_a_text_an_example_or_the_default_is_read_as_in_prediction(rows, default):
    """The default is a text, or the first example where texts are token ids."""
    splits = {"train": (rows * 4, np.arange(4 * len(rows)) % 2), "valid": (rows, np.arange(len(rows)) % 2)}
    task_data = TextData(Classify(tokenizer="bytes"), Labelled("rows", splits, ("a", "b"), ""), None)
    task, network = fitted(task_data, member("byte-classifier", "tiny", **task_data.member_settings()))
    given = [({}, default), *(({"example": example}, row) for example, row in enumerate(rows))]
    for options, read in given + ([({"text": "a b"}, "a b")] if isinstance(default, str) else []):
        inputs = task.inference.probe_input(network, **options)
        assert list(inputs.labels) == (list(read) if isinstance(read, str) else [f"{one} " for one in read])
        close_logits(network, inputs, task.inference.outputs(network, task_data.encode([read])))
    with pytest.raises(ValueError, match="the text is empty; give one, or leave it out"):
        task.inference.probe_input(network, "")


@pytest.mark.parametrize("kind", ["sets", "images", "graph"])
def test_an_example_is_read_as_in_evaluation_with_a_label_of_each_position(kind, cache_folder):
    task_data = image_data() if kind == "images" else Classify(kind=kind).open(None, None)
    make = {"sets": features, "graph": nodes, "images": lambda **sizes: member("vit", "tiny", patch=4, **sizes)}[kind]
    task, network = fitted(task_data, make(**task_data.member_settings()))
    for example in (None, 0, 2):
        inputs, row = task.inference.probe_input(network, example=example), example or 0
        batch = Batch(task_data.tensors("valid", torch.tensor([row]), None), task_data.shared())
        with torch.no_grad():
            close_logits(network, inputs, task.objective.forward(network, batch, "auto")[0].logits)
        if kind == "graph":
            graph = inputs.graph
            assert graph.node == task_data.graph.splits["valid"][row] and len(inputs.labels) == len(graph.class_N)
            assert torch.equal(graph.edge_NN, torch.from_numpy(task_data.graph.edge_NN))
            assert graph.class_N.tolist() == task_data.graph.label_N.tolist()
        elif kind == "images":
            pixel_CYX = torch.from_numpy(task_data.labelled.splits["valid"][0][row]) / 255
            assert torch.equal(inputs.image.pixel_CYX, pixel_CYX)
            assert inputs.labels == ["0,0", "0,1", "1,0", "1,1"]
            assert inputs.image.cell_P2.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]] and inputs.image.size == 4
        else:
            assert len(inputs.labels) == len(task_data.labelled.splits["valid"][0][row])
    with pytest.raises(ValueError, match="not text; give the number of an example"):
        task.inference.probe_input(network, "a text")
