"""The context is one setting of the task, for every member: a table of positions takes its size from it."""

from __future__ import annotations

import pytest

from everyformer import member, members
from everyformer.cli.terminal import console
from everyformer.task.control import Control
from everyformer.task.image import Image
from everyformer.train.loop import train
from everyformer.train.progress import show_progress
from everyformer.train.recipe import Recipe
from tests.train.small import text

OTHERS = {"vit", "graph-classifier", "image-transformer"}  # their rows are no texts
OWN_DATA = {"bert", "transformer", "byte-classifier"}  # their embedded data; the others read a file


@pytest.mark.parametrize("name", sorted(set(members()) - OTHERS))
def test_every_member_reads_as_many_tokens_as_the_task_says(name, tmp_path):
    data = None if name in OWN_DATA else text(tmp_path)
    recipe = Recipe.of(name, "task.context=24", size="tiny", data=data)
    task_data = recipe.task.open(recipe.data)
    model = task_data.adapt(recipe.value(task_data.member_settings()))
    task = task_data.fit(model)
    batch = task.data.batch(0, 4, 0)
    lengths = {x.shape[1] for name, x in batch.tensors.items() if name.endswith(("_BT", "_BS"))}
    assert task.data.context == 24
    shortened = task.data.pads or name == "t5"  # in t5's rows one mark stands for each lost span
    assert max(lengths) <= 32 if shortened else lengths == {25}  # with the last target
    tables = [part.limit() for part in (model,) if hasattr(part, "limit")]
    assert all(table is None or 24 <= table < 32 for table in tables)


def test_a_member_has_its_own_context_by_default(tmp_path):
    found = {}
    for name in ("gpt2", "transformer-xl", "lstm"):
        recipe = Recipe.of(name, size="tiny", data=text(tmp_path))
        task_data = recipe.task.open(recipe.data)
        found[name] = task_data.fit(recipe.value(task_data.member_settings())).data.context
    assert found == {"gpt2": 64, "transformer-xl": 64, "lstm": 256}


def test_the_context_of_the_model_is_not_a_second_setting():
    with pytest.raises(ValueError, match=r"model\.context has the size that the task needs; write task\.context=32"):
        Recipe.of("gpt2", "model.context=32", size="tiny")
    with pytest.raises(ValueError, match=r"model\.context .*; leave it out: it follows from the data"):
        Recipe.of("sparse-transformer", "model.context=32", size="tiny", task="image")


def test_a_table_that_is_too_short_is_refused(tmp_path):
    own = member("gpt2", "tiny", context=16)
    data = Recipe.of(own, "task.context=17", data=text(tmp_path)).task.open(str(text(tmp_path)))
    with pytest.raises(
        ValueError, match=r"task\.context is 17, but the model's table of positions has 16; lower task\.context"
    ):
        data.fit(own)


def test_tasks_without_tokens_have_no_context():
    assert not any("context" in task.__struct_fields__ for task in (Control, Image))


@pytest.mark.parametrize("settings, shown", [(["task.context=8"], "run.batch 4 x task.context 8 = 32 tokens a step")])
def test_a_run_starts_with_its_context_and_its_tokens_a_step(tmp_path, capsys, settings, shown):
    few = ["run.steps=1", "run.batch=4", "run.evaluate=0", "model.width=16", "model.layers=1", *settings]
    with show_progress(console()) as callback:
        train(Recipe.of("gpt2", *few, size="tiny", data=text(tmp_path)), callbacks=(callback,))
    assert shown in " ".join(capsys.readouterr().out.split())
