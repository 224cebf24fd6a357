"""Graphs with classes of nodes: Cora, a graph of one's own as JSON, or generated communities.

The JSON is an object with `features` (a list of numbers for each node, or, with num_features, the places of its ones),
`labels`, `edges` [[a, b], ...] counted from 0, and the nodes of the splits: train, and perhaps val (or valid) and test.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import reprlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everyformer.data import made
from everyformer.data.files import SPLITS, existing, read_text
from everyformer.data.labelled import hold_out
from everyformer.data.named import find, name_of


@dataclass(frozen=True)
class Graph:
    """N nodes with F features. Edges go both ways, and every node is joined to itself."""

    name: str
    feature_NF: NDArray[np.float32]  # each row sums to 1, or is as given where it has negative numbers
    edge_NN: NDArray[np.bool_]
    label_N: NDArray[np.int64]
    splits: dict[str, NDArray[np.int64]]  # nodes
    classes: tuple[str, ...]
    fingerprint: str


def open_graph(data: str | None, valid: float) -> Graph:
    name = name_of(data)
    if name not in (None, "cora"):
        raise ValueError(
            f"{name} does not hold a graph; give cora, or a JSON file with features, labels, edges and train"
        )
    if data is None:
        return _graph("the embedded communities", made.communities(), valid)
    if name == "cora":
        files = find(name, data)
        tree = json.loads(read_text(files["cora.json"])) if "cora.json" in files else planetoid(files)
        return _graph(name, tree, valid)
    if data == "-":
        raise ValueError("a graph cannot come from standard input; give a JSON file")
    path = existing(data)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the JSON file of a graph")
    try:
        tree = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not JSON ({error}); give an object with features, labels, edges and train"
        ) from None
    return _graph(str(path), tree, valid)


def _graph(name: str, tree: Any, valid: float) -> Graph:
    tree = {key: given for key, given in tree.items() if given is not None} if isinstance(tree, dict) else {}
    missing = [key for key in ("features", "labels", "edges", "train") if key not in tree]
    if missing:
        raise ValueError(f"{name} has no {' and no '.join(missing)}; a graph needs features, labels, edges and train")
    for key in ("features", "labels"):
        if not isinstance(tree[key], list):
            raise ValueError(f"{key} of {name} is {reprlib.repr(tree[key])}; give a list with one for each node")
    nodes = len(tree["features"])
    labels = tree["labels"]
    if nodes < 2 or len(labels) != nodes:
        raise ValueError(
            f"{name} has {nodes} nodes and {len(labels)} labels; give one label for each of two or more nodes"
        )
    for node, one in enumerate(labels):
        if not isinstance(one, str | int | float) or one != one:
            raise ValueError(
                f"the label of node {node} of {name} is {reprlib.repr(one)}; give the word or the number of its class"
            )
    names = sorted(set(labels), key=lambda one: (str(type(one)), one))
    if len(names) < 2:
        raise ValueError(f"{name} has only the class {names[0]!r}; give nodes of at least two classes")
    feature_NF = _features(name, tree["features"], tree.get("num_features"))
    edge_E2 = _nodes(name, tree["edges"], nodes, "edges").reshape(-1, 2)
    edge_NN = np.eye(nodes, dtype=bool)
    edge_NN[edge_E2[:, 0], edge_E2[:, 1]] = edge_NN[edge_E2[:, 1], edge_E2[:, 0]] = True
    splits = _splits(name, tree, nodes)
    if len(splits["train"]) < 2:
        raise ValueError(f"{name} has {len(splits['train'])} nodes for training; give at least 2")
    if "valid" not in splits:
        kept, held = hold_out(len(splits["train"]), valid)
        splits["train"], splits["valid"] = splits["train"][kept], splits["train"][held]
    number = {one: place for place, one in enumerate(names)}
    label_N = np.array([number[one] for one in labels], dtype=np.int64)
    mark = hashlib.sha256(feature_NF.tobytes() + edge_NN.tobytes() + label_N.tobytes())
    for split in sorted(splits):
        mark.update(f"{split} {len(splits[split])} ".encode() + splits[split].tobytes())
    return Graph(name, feature_NF, edge_NN, label_N, splits, tuple(map(str, names)), mark.hexdigest())


def _splits(name: str, tree: dict[str, Any], nodes: int) -> dict[str, NDArray[np.int64]]:
    splits: dict[str, NDArray[np.int64]] = {}
    taken: dict[int, str] = {}
    for key in ("train", "val", "valid", "test"):
        if key not in tree:
            continue
        node_N = splits[SPLITS[key]] = _nodes(name, tree[key], nodes, key)
        if key != "train" and len(node_N) == 0:
            raise ValueError(f"{key} of {name} has no nodes; give some, or leave it out")
        for node in node_N.tolist():
            if node in taken:
                raise ValueError(f"node {node} of {name} is in {taken[node]} and again in {key}; leave it in one place")
            taken[node] = key
    return splits


def _features(name: str, rows: list[Any], width: Any) -> NDArray[np.float32]:
    if width is None:
        try:
            feature_NF = np.array(rows, dtype=np.float32)
        except (TypeError, ValueError, OverflowError):
            feature_NF = np.empty(0, np.float32)
        if feature_NF.ndim != 2 or feature_NF.shape[1] == 0 or not np.isfinite(feature_NF).all():
            raise ValueError(
                f"features of {name} are not rows of as many finite numbers; mend them, or give num_features"
            )
    elif not isinstance(width, int) or width < 1:
        raise ValueError(f"num_features of {name} is {width!r}; give a whole number from 1 on, or leave it out")
    else:
        feature_NF = np.zeros((len(rows), width), dtype=np.float32)
        for number, row in enumerate(rows):
            feature_NF[number, _nodes(name, row, width, "features")] = 1
    if (feature_NF < 0).any():
        return feature_NF
    return feature_NF / np.maximum(feature_NF.sum(1, keepdims=True), 1e-12)


def _nodes(name: str, given: Any, count: int, key: str) -> NDArray[np.int64]:
    """Whole numbers below `count`."""
    try:
        found = np.array(given, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        found = np.array([-1.0])
    if found.size and not (0 <= found.min() <= found.max() < count and (found % 1 == 0).all()):
        raise ValueError(
            f"{key} of {name} must be whole numbers from 0 to {count - 1}; count from 0, and leave no other in"
        )
    if key == "edges" and found.size and found.shape[1:] != (2,):
        raise ValueError(f"edges of {name} have the shape {found.shape}; give pairs of nodes")
    if key != "edges" and found.ndim != 1:
        raise ValueError(f"{key} of {name} has the shape {found.shape}; give a list of whole numbers")
    return found.astype(np.int64)


class _Sparse:
    """Stands for scipy's matrix of compressed rows, so that scipy is not needed."""

    indices: NDArray[np.int32]
    indptr: NDArray[np.int32]

    def rows(self) -> list[list[int]]:
        return [sorted(self.indices[a:b].tolist()) for a, b in zip(self.indptr, self.indptr[1:], strict=False)]


class _Plain(pickle.Unpickler):
    """Reads arrays, matrices and dictionaries, and refuses everything else that a pickle can name."""

    def find_class(self, module: str, name: str) -> Any:
        core = np._core.multiarray  # type: ignore[attr-defined]
        known: dict[str, Any] = {
            "_reconstruct": core._reconstruct, "ndarray": np.ndarray, "dtype": np.dtype, "scalar": core.scalar,
            "csr_matrix": _Sparse, "defaultdict": defaultdict, "list": list,
        }  # fmt: skip
        if module.split(".")[0] not in ("numpy", "scipy", "collections", "__builtin__") or name not in known:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return known[name]


def planetoid(files: dict[str, Path]) -> dict[str, Any]:
    """Cora from the eight files of its public home, whose checksums have been verified, joined as Kipf & Welling do."""

    def read(name: str) -> Any:
        with files[f"ind.cora.{name}"].open("rb") as file:
            return _Plain(file, encoding="latin1").load()

    test = [int(line) for line in files["ind.cora.test.index"].read_text().split()]
    features = read("allx").rows() + read("tx").rows()
    labels = np.concatenate((read("ally"), read("ty"))).argmax(1).tolist()
    # The rows of the test nodes are in the order of the index; put each where its node is.
    moved = {node: (features[place], labels[place]) for node, place in zip(test, sorted(test), strict=True)}
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
