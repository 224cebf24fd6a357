"""Graphs are read from JSON and checked."""

from __future__ import annotations

import json

import pytest

from everyformer.data.graphs import open_graph

GRAPH = {
    "num_features": 4,
    "features": [[0, 1], [1], [2, 3], [3]],
    "labels": [0, 0, 1, 1],
    "edges": [[0, 1], [2, 3]],
    "train": [0, 2],
    "val": [1],
    "test": [3],
}


def graph(folder, **changes):
    tree = {name: value for name, value in (GRAPH | changes).items() if value is not None}
    (folder / "graph.json").write_text(json.dumps(tree))
    return open_graph(str(folder / "graph.json"), 0.5)


@pytest.mark.spec(71)
def test_edges_are_undirected_and_include_self_loops(tmp_path):
    opened = graph(tmp_path)
    assert opened.edge_NN.tolist() == [
        [True, True, False, False],
        [True, True, False, False],
        [False, False, True, True],
        [False, False, True, True],
    ]
    assert opened.feature_NF.tolist() == [[0.5, 0.5, 0, 0], [0, 1, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0, 1]]
    assert {split: node_N.tolist() for split, node_N in opened.splits.items()} == {
        "train": [0, 2],
        "valid": [1],
        "test": [3],
    }


def test_features_may_be_dense(tmp_path):
    opened = graph(tmp_path, num_features=None, features=[[1, -2.5], [0, 1], [3, 3], [0, 0]])
    assert opened.feature_NF.tolist() == [[1, -2.5], [0, 1], [3, 3], [0, 0]]


def test_validation_nodes_are_held_out_if_there_are_none(tmp_path):
    opened = graph(tmp_path, val=None, test=None, train=[0, 1, 2, 3])
    assert sorted([*opened.splits["train"], *opened.splits["valid"]]) == [0, 1, 2, 3]
    assert len(opened.splits["valid"]) == 2


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"labels": None}, "has no labels; a graph needs"),
        ({"labels": [0, 1]}, "has 4 nodes and 2 labels"),
        ({"edges": [[0, 4]]}, "edges of .* must be integers from 0 to 3"),
        ({"edges": [[0, 1, 2]]}, "edges of .* give pairs"),
        ({"train": [-1, 2]}, "train of .* must be integers from 0 to 3"),
        ({"train": [0]}, "has 1 training nodes"),
        ({"features": [[0], [9], [1], [1]]}, "features of .* must be integers from 0 to 3"),
        ({"num_features": None}, "features of .* are not rows of equally many"),
        ({"labels": [[1, 0], [1, 0], [0, 1], [0, 1]]}, r"the label of node 0 of .* is \[1, 0\]; give the name or"),
        ({"labels": [0, 1, None, 1]}, "the label of node 2 of .* is None; give"),
        ({"labels": [0, 1, float("nan"), 1]}, "the label of node 2 of .* is nan; give"),
        ({"labels": "abba"}, "labels of .* is 'abba'; give a list"),
        ({"labels": [7, 7, 7, 7]}, "has only the class 7; give nodes of at least two"),
        ({"features": 5}, "features of .* is 5; give a list"),
        ({"features": [0, 1, 2, 3]}, r"features of .* has the shape \(\); give a list of integers"),
        ({"num_features": "5"}, "num_features of .* is '5'; give a positive integer"),
        ({"num_features": 0}, "num_features of .* is 0; give a positive integer"),
        ({"edges": [[0, 1.5]]}, "edges of .* must be integers from 0 to 3"),
        ({"edges": [[0, 10**400]]}, "edges of .* must be integers from 0 to 3"),
        ({"train": 3}, r"train of .* has the shape \(\); give a list"),
        ({"train": [[0], [2]]}, r"train of .* has the shape \(2, 1\); give a list"),
        ({"val": []}, "val of .* has no nodes; give some, or omit val"),
        ({"test": []}, "test of .* has no nodes; give some, or omit test"),
        ({"val": [1, 2]}, "node 2 of .* is in train and again in val; list it once"),
        ({"test": [3, 1]}, "node 1 of .* is in val and again in test; list it once"),
        ({"train": [0, 2, 0]}, "node 0 of .* is in train and again in train; list it once"),
    ],
)
def test_invalid_graphs_raise(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        graph(tmp_path, **changes)


@pytest.mark.parametrize("key", ["features", "labels", "edges", "train"])
def test_a_null_counts_as_a_missing_key(tmp_path, key):
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH | {key: None}))
    with pytest.raises(ValueError, match=f"has no {key}; a graph needs"):
        open_graph(str(tmp_path / "graph.json"), 0.5)


def test_a_byte_order_mark_of_a_graph_is_dropped(tmp_path):
    (tmp_path / "graph.json").write_text("\ufeff" + json.dumps(GRAPH))
    assert open_graph(str(tmp_path / "graph.json"), 0.5).fingerprint == graph(tmp_path).fingerprint


def test_a_graph_from_standard_input_raises():
    with pytest.raises(ValueError, match="a graph cannot be read from standard input; give a JSON file"):
        open_graph("-", 0.5)


def test_the_fingerprint_of_a_graph_depends_on_its_splits(tmp_path):
    graph = {"features": [[1, 0]] * 6, "edges": [[0, 1]], "labels": [0, 1] * 3}
    fingerprints = set()
    for train in (3, 4):
        tree = graph | {"train": list(range(train)), "val": list(range(train, 6))}
        (tmp_path / "graph.json").write_text(json.dumps(tree))
        fingerprints.add(open_graph(str(tmp_path / "graph.json"), 0.5).fingerprint)
    assert len(fingerprints) == 2
