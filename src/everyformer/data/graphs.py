"""Opens graphs with labelled nodes: Cora, a JSON file, or generated communities.

The JSON file holds an object with `features` (a list of numbers per node or, with num_features, the indices of its ones), `labels`
(names of classes, or numbers), `edges` [[a, b], ...] with nodes counted from 0, and the nodes of the splits: train, and optionally val
(or valid) and test. To predict, features and edges are enough.
"""

from __future__ import annotations

import hashlib
import pickle
import reprlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everyformer.data import synthetic
from everyformer.data.datasets import dataset_files, dataset_name
from everyformer.data.files import SPLITS, existing_path, parse_json, read_text
from everyformer.data.labelled import check_numbers, hold_out, number_notes
from everyformer.data.labelled_records import parse_number


@dataclass(frozen=True)
class Graph:
    """N nodes with F features. Edges are undirected, and every node has an edge to itself."""

    name: str
    feature_NF: NDArray[np.float32]  # each row sums to 1, unless there are negative numbers
    edge_NN: NDArray[np.bool_]
    label_N: NDArray[Any]  # indices of classes, or numbers if there are no classes
    splits: dict[str, NDArray[np.int64]]  # nodes
    classes: tuple[str, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()  # what was decided about the data, for the user


def open_graph(data: str | None, valid: float, numbers: bool = False) -> Graph:
    """Opens the graph that `data` names. The fraction `valid` of the training nodes is held out where there are no validation nodes.

    With `numbers` the labels are numbers to predict.
    """
    return make_graph(*read_graph(data, numbers), valid, numbers)


def read_graph(data: str | None, numbers: bool = False) -> tuple[str, Any]:
    """Returns the name of a graph, and its JSON tree."""
    name = dataset_name(data)
    if name not in (None, "cora"):
        raise ValueError(
            f"{name} does not hold a graph; give cora, or a JSON file with features, labels, edges and train"
        )
    if data is None:
        return "the embedded communities", synthetic.communities(numbers=numbers)
    if name == "cora":
        files = dataset_files(name, data)
        tree = parse_json(read_text(files["cora.json"])) if "cora.json" in files else read_planetoid(files)
        return name, tree
    if data == "-":
        raise ValueError("a graph cannot be read from standard input; give a JSON file")
    path = existing_path(data)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the JSON file of a graph")
    text = read_text(path)
    try:
        tree = parse_json(text)
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON ({error}); give an object with features, labels, edges and train"
        ) from None
    return str(path), tree


def _checked_tree(name: str, tree: Any, keys: tuple[str, ...]) -> dict[str, Any]:
    """Returns the tree without nulls, which count as missing. Raises ValueError if it lacks a key, or an entry per node."""
    tree = {key: value for key, value in tree.items() if value is not None} if isinstance(tree, dict) else {}
    missing = [key for key in keys if key not in tree]
    if missing:
        needed = f"{', '.join(keys[:-1])} and {keys[-1]}"
        raise ValueError(f"{name} has no {' and no '.join(missing)}; a graph needs {needed}")
    for key in ("features", "labels"):
        if key in keys and not isinstance(tree[key], list):
            raise ValueError(f"{key} of {name} is {reprlib.repr(tree[key])}; give a list with one entry per node")
    return tree


def graph_inputs(name: str, tree: Any) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Returns the features N, F and the edges N, N of the JSON tree of a graph, which needs no labels."""
    tree = _checked_tree(name, tree, ("features", "edges"))
    nodes = len(tree["features"])
    feature_NF = _parse_features(name, tree["features"], tree.get("num_features"))
    edge_E2 = _parse_indices(name, tree["edges"], nodes, "edges").reshape(-1, 2)
    edge_NN = np.eye(nodes, dtype=bool)
    edge_NN[edge_E2[:, 0], edge_E2[:, 1]] = edge_NN[edge_E2[:, 1], edge_E2[:, 0]] = True
    return feature_NF, edge_NN


def make_graph(name: str, tree: Any, valid: float, numbers: bool = False) -> Graph:
    """Checks a graph and builds it from its JSON tree."""
    tree = _checked_tree(name, tree, ("features", "labels", "edges", "train"))
    classes, label_N = _parse_labels(name, tree, numbers)
    nodes = len(label_N)
    feature_NF, edge_NN = graph_inputs(name, tree)
    splits = _parse_splits(name, tree, nodes)
    if len(splits["train"]) < 2:
        raise ValueError(f"{name} has {len(splits['train'])} training nodes; give at least 2")
    if "valid" not in splits:
        train, held_out = hold_out(len(splits["train"]), valid)
        splits["train"], splits["valid"] = splits["train"][train], splits["train"][held_out]
    if numbers:
        check_numbers(label_N[splits["train"]], name)
    hasher = hashlib.sha256(feature_NF.tobytes() + edge_NN.tobytes() + label_N.tobytes())
    for split in sorted(splits):
        hasher.update(f"{split} {len(splits[split])} ".encode() + splits[split].tobytes())
    notes = number_notes(classes, name)
    return Graph(name, feature_NF, edge_NN, label_N, splits, classes, hasher.hexdigest(), notes)


def _parse_labels(name: str, tree: dict[str, Any], numbers: bool) -> tuple[tuple[str, ...], NDArray[Any]]:
    """Returns the names of the classes, sorted, and the class of each node; with `numbers` no classes, and the numbers."""
    nodes, labels = len(tree["features"]), tree["labels"]
    if nodes < 2 or len(labels) != nodes:
        raise ValueError(
            f"{name} has {nodes} nodes and {len(labels)} labels; give one label for each of two or more nodes"
        )
    if numbers:
        found = [parse_number(label, f"the label of node {node} of {name}") for node, label in enumerate(labels)]
        return (), np.array(found, dtype=np.float64)
    for node, label in enumerate(labels):
        if not isinstance(label, str | int | float) or label != label:
            raise ValueError(
                f"the label of node {node} of {name} is {reprlib.repr(label)}; give the name or the number of its class"
            )
    names = sorted(set(labels), key=lambda one: (str(type(one)), one))
    if len(names) < 2:
        raise ValueError(f"{name} has only the class {names[0]!r}; give nodes of at least two classes")
    index = {label: number for number, label in enumerate(names)}
    return tuple(map(str, names)), np.array([index[label] for label in labels], dtype=np.int64)


def _parse_splits(name: str, tree: dict[str, Any], nodes: int) -> dict[str, NDArray[np.int64]]:
    splits: dict[str, NDArray[np.int64]] = {}
    split_of: dict[int, str] = {}
    for key in ("train", "val", "valid", "test"):
        if key not in tree:
            continue
        node_N = splits[SPLITS[key]] = _parse_indices(name, tree[key], nodes, key)
        if key != "train" and len(node_N) == 0:
            raise ValueError(f"{key} of {name} has no nodes; give some, or omit {key}")
        for node in node_N.tolist():
            if node in split_of:
                raise ValueError(f"node {node} of {name} is in {split_of[node]} and again in {key}; list it once")
            split_of[node] = key
    return splits


def _parse_features(name: str, rows: list[Any], width: Any) -> NDArray[np.float32]:
    if width is None:
        try:
            feature_NF = np.array(rows, dtype=np.float32)
        except (TypeError, ValueError, OverflowError):
            feature_NF = np.empty(0, np.float32)
        if feature_NF.ndim != 2 or feature_NF.shape[1] == 0 or not np.isfinite(feature_NF).all():
            raise ValueError(
                f"features of {name} are not rows of equally many finite numbers; repair them, or give num_features"
            )
    elif not isinstance(width, int) or width < 1:
        raise ValueError(f"num_features of {name} is {width!r}; give a positive integer, or omit it")
    else:
        feature_NF = np.zeros((len(rows), width), dtype=np.float32)
        for node, row in enumerate(rows):
            feature_NF[node, _parse_indices(name, row, width, "features")] = 1
    if (feature_NF < 0).any():
        return feature_NF
    return feature_NF / np.maximum(feature_NF.sum(1, keepdims=True), 1e-12)


def _parse_indices(name: str, value: Any, count: int, key: str) -> NDArray[np.int64]:
    """Returns a list of integers (for "edges", of pairs) from 0 to `count` - 1. Raises ValueError if `value` is anything else."""
    try:
        index = np.array(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        index = np.array([-1.0])
    if index.size and not (0 <= index.min() <= index.max() < count and (index % 1 == 0).all()):
        raise ValueError(f"{key} of {name} must be integers from 0 to {count - 1}; count from 0, and remove others")
    if key == "edges" and index.size and index.shape[1:] != (2,):
        raise ValueError(f"edges of {name} have the shape {index.shape}; give pairs of nodes")
    if key != "edges" and index.ndim != 1:
        raise ValueError(f"{key} of {name} has the shape {index.shape}; give a list of integers")
    return index.astype(np.int64)


class _SparseMatrix:
    """Replaces scipy's csr_matrix when unpickling, so that scipy is not needed."""

    indices: NDArray[np.int32]
    indptr: NDArray[np.int32]

    def rows(self) -> list[list[int]]:
        return [sorted(self.indices[a:b].tolist()) for a, b in zip(self.indptr, self.indptr[1:], strict=False)]


class _SafeUnpickler(pickle.Unpickler):
    """Unpickles arrays, matrices and dictionaries only. Raises UnpicklingError for anything else."""

    def find_class(self, module: str, name: str) -> Any:
        core = np._core.multiarray  # type: ignore[attr-defined]
        known: dict[str, Any] = {
            "_reconstruct": core._reconstruct, "ndarray": np.ndarray, "dtype": np.dtype, "scalar": core.scalar,
            "csr_matrix": _SparseMatrix, "defaultdict": defaultdict, "list": list,
        }  # fmt: skip
        if module.split(".")[0] not in ("numpy", "scipy", "collections", "__builtin__") or name not in known:
            raise pickle.UnpicklingError(f"the pickle refers to {module}.{name}, which is not data; get the file again")
        return known[name]


def read_planetoid(files: dict[str, Path]) -> dict[str, Any]:
    """Reads Cora from Planetoid's eight files, whose checksums have been verified, and joins them as Kipf & Welling 2017 do."""

    def read(name: str) -> Any:
        with files[f"ind.cora.{name}"].open("rb") as file:
            return _SafeUnpickler(file, encoding="latin1").load()

    test = [int(line) for line in files["ind.cora.test.index"].read_text().split()]
    features = read("allx").rows() + read("tx").rows()
    labels = np.concatenate((read("ally"), read("ty"))).argmax(1).tolist()
    # The rows of the test nodes are in the order of the index file. Move each to the row of its node.
    moved = {node: (features[row], labels[row]) for node, row in zip(test, sorted(test), strict=True)}
    for node, (feature, label) in moved.items():
        features[node], labels[node] = feature, label
    edges = {(min(a, b), max(a, b)) for a, others in read("graph").items() for b in others if a != b}
    train = len(read("y"))
    return {
        "num_nodes": len(labels),
        "num_features": 1433,
        "num_classes": 7,
        "features": features,
        "labels": labels,
        "edges": [list(edge) for edge in sorted(edges)],
        "train": list(range(train)),
        "val": list(range(train, train + 500)),
        "test": sorted(test),
    }
