"""docs/data.md is true: its graph can be opened, and its settings exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

from everyformer.cli.predict import FORMATS
from everyformer.data.graphs import graph_inputs, make_graph, open_graph
from everyformer.data.labelled import MANY
from everyformer.task.answer import Answer
from everyformer.task.classify import Classify, Regress
from everyformer.task.translate import Translate

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def test_the_graph_of_the_page_is_opened_and_every_key_is_described(tmp_path):
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, re.S)
    (tmp_path / "graph.json").write_text(block)
    graph, tree = open_graph(str(tmp_path / "graph.json"), 0.1), json.loads(block)
    assert graph.classes == ("a", "b")
    assert {split: node_N.tolist() for split, node_N in graph.splits.items()} == {
        "train": [0, 1],
        "valid": [2],
        "test": [3],
    }
    table = PAGE[PAGE.index("| key |") :]
    assert all(f"`{key}`" in table for key in (*tree, "num_features", "valid"))
    graph_inputs("graph", {"features": tree["features"], "edges": tree["edges"]})  # enough to predict
    numbers = make_graph("graph", tree | {"labels": [0.5, 1.5, 2.5, 3.5]}, 0.1, numbers=True)
    assert numbers.classes == () and numbers.label_N.tolist() == [0.5, 1.5, 2.5, 3.5]


def test_the_settings_and_forms_of_the_page_exist():
    settings = {name for task in (Answer, Classify, Regress, Translate) for name in task.__struct_fields__}
    assert set(re.findall(r"task\.(\w+)", PAGE)) <= settings
    assert all(form in PAGE for form in FORMATS)
    assert f"more than {MANY} different integers" in PAGE
