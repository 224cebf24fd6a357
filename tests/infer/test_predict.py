"""Predictions, embeddings and scores of rows of any length equal those of each row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer import Language, Learned, SegmentMemory
from everyformer.infer.embed import embeddings
from everyformer.infer.evaluate import streaming_nll, window_nll
from everyformer.infer.generate_images import ImageSequence
from everyformer.infer.predict import Predictions, in_batches
from everyformer.infer.score import row_nll
from everyformer.network.grid import Grid
from everyformer.task.target import ClassTarget
from tests.network import VOCABULARY, model, ready

ROWS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 1, 2, 3]]
VECTOR_VD = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))


def hidden(some: list[list[int]]) -> tuple[Tensor, Tensor]:
    """The rows of a table, with a class token before them that `visible` does not count, and padding after them."""
    length = max(map(len, some))
    x_BTD = torch.full((len(some), length + 1, 4), 99.0)
    visible_BT = torch.zeros(len(some), length, dtype=torch.bool)
    for row, tokens in enumerate(some):
        x_BTD[row, : len(tokens) + 1] = VECTOR_VD[[0, *tokens]]
        visible_BT[row, : len(tokens)] = True
    return x_BTD, visible_BT


@pytest.mark.parametrize("normalize", [False, True])
def test_an_embedding_is_pooled_over_the_class_token_and_what_is_visible(normalize):
    pooled = {
        "mean": [VECTOR_VD[[0, *row]].mean(0) for row in ROWS],
        "max": [VECTOR_VD[[0, *row]].amax(0) for row in ROWS],
        "first": [VECTOR_VD[0] for _ in ROWS],
        "last": [VECTOR_VD[row[-1]] for row in ROWS],
    }
    for pooling, vectors in pooled.items():
        wanted = [F.normalize(vector, dim=0) if normalize else vector for vector in vectors]
        found = embeddings(ROWS, hidden, pooling, normalize)
        np.testing.assert_allclose(found, torch.stack(wanted).numpy(), atol=1e-6)
    with pytest.raises(ValueError, match="pooling is 'men'; did you mean mean"):
        embeddings(ROWS, hidden, "men", normalize)
    with pytest.raises(ValueError, match="nothing to embed; give a list with at least one input"):
        embeddings([], hidden, "mean", normalize)


def test_an_empty_list_of_inputs_is_refused_with_a_reason():
    with pytest.raises(ValueError, match="nothing to predict; give a list with at least one input"):
        in_batches([], lambda some: torch.zeros(len(some)))


def test_rows_of_similar_length_are_computed_together_and_returned_in_order():
    seen: list[int] = []

    def forward(some: list[list[int]]) -> Tensor:
        seen.append(len(some))
        return torch.tensor([[float(sum(row))] for row in some])

    assert in_batches(ROWS, forward, size=3)[:, 0].tolist() == [sum(row) for row in ROWS] and seen == [3, 1]


@pytest.mark.parametrize("memory", [None, SegmentMemory(8)], ids=["window", "memory"])
def test_the_likelihood_of_a_row_is_the_sum_of_its_tokens(memory):
    """Rows that are longer than the window are read as in evaluation."""
    position = None if memory else Learned(8)
    value = model("causal", position=position, outputs=(Language(tied=False, bias=True),), memory=memory)
    network, numbers = ready(value), np.random.default_rng(0)
    rows = [numbers.integers(0, VOCABULARY, length).tolist() for length in (1, 2, 5, 5, 8, 9, 10, 20)]
    for row, total in zip(rows, row_nll(network, rows, 8), strict=True):
        if len(row) > 9:
            token_N = np.array(row)
            wanted, _ = streaming_nll(network, token_N, 8) if memory else window_nll(network, token_N, 8, 4)
        else:
            log_p = network(torch.tensor([row[:-1] or [0]])).logits[0].detach().log_softmax(-1)
            wanted = -sum(float(log_p[place, token]) for place, token in enumerate(row[1:]))
        assert total == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_a_row_is_read_in_windows_that_overlap_by_half_however_short_they_are():
    network = ready(model("causal", position=Learned(8), outputs=(Language(tied=False, bias=True),)))
    for window, stride in ((1, 1), (2, 1), (3, 1), (4, 2), (5, 2)):
        wanted, _ = window_nll(network, np.array(ROWS[3]), window, stride)
        assert row_nll(network, [np.array(ROWS[3])], window) == [pytest.approx(wanted)]
        assert row_nll(network, [np.array([4])], window) == [0]


def test_rows_of_similar_length_are_scored_together_and_within_the_number_of_logits_and_none_twice(monkeypatch):
    network = ready(model("causal", position=Learned(8), outputs=(Language(tied=False, bias=True),)))
    rows, shapes = [[5] * length for length in (2, 9, 3, 9, 4, 2, 1, 3)], list[tuple[int, ...]]()
    wanted = row_nll(network, rows, 8)
    monkeypatch.setattr("everyformer.infer.score.MAX_LOGITS", 8 * VOCABULARY)
    network.body.register_forward_pre_hook(lambda module, arguments: shapes.append(arguments[0].shape[:2]))
    assert row_nll(network, rows, 8) == pytest.approx(wanted)
    assert shapes == [(1, 8), (1, 8), (2, 3), (2, 2), (1, 1)]  # one row at least, even if its 9 tokens are too many


def test_a_text_has_no_score_if_its_first_tokens_have_no_probability():
    network = ready(model("causal | prefix(3)", outputs=(Language(),)))
    with pytest.raises(ValueError, match="the first 3 tokens are the model's prefix and have no probability"):
        row_nll(network, ROWS, 8)


def test_a_prediction_is_the_likeliest_class_with_the_probability_of_each():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    predictions = ClassTarget(("a", "b", "c")).predictions(logits)
    shares = logits.softmax(-1).tolist()
    assert predictions.values.tolist() == ["b", "a"] and len(predictions) == 2
    for row, share, likeliest in zip(predictions.rows(), shares, ("b", "a"), strict=True):
        named = {f"p({name})": pytest.approx(p, abs=1e-6) for name, p in zip("abc", share, strict=True)}
        assert row == {"prediction": likeliest, "probability": pytest.approx(max(share), abs=1e-6)} | named
    assert Predictions(np.array([1.23456789, 2.0])).rows() == [{"prediction": 1.234568}, {"prediction": 2.0}]


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("levels", [2, 256])
def test_an_image_is_a_sequence_and_back_and_joint_values_lie_between_minus_1_and_1(joint, levels):
    grid = Grid(4, 6) if joint else Grid(4, 18)
    layout = ImageSequence(3, levels, grid, joint)
    image = torch.randint(0, levels, (2, 3, 4, 6), generator=torch.Generator().manual_seed(0))
    image[0, 0, 0, :2] = torch.tensor([0, levels - 1])
    steps = layout.flatten(image)
    assert torch.equal(layout.unflatten(steps), image)
    inputs = layout.encode(steps, 0)
    if joint:
        assert torch.equal(inputs, steps / (levels - 1) * 2 - 1) and inputs.min() == -1 and inputs.max() == 1
    else:
        assert torch.equal(inputs, steps[..., 0] + levels * (torch.arange(72) % 3))
