"""The models that the page composes: legal or the reason, their texts, and what they differ in."""

from __future__ import annotations

import json
import shlex

import pytest

from everyformer.family.table import MEMBERS, member, parameters
from everyformer.network.store import model_from_json
from everyformer.study.choices import choose, illegal
from everyformer.study.plan import plan
from everyformer.study.python_source import to_python
from everyformer.train import Recipe
from everyformer.value import to_json

TINY = [(name, next(iter(one.sizes))) for name, one in MEMBERS.items()]


def ask(client, path, **body):
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, one in MEMBERS.items() for size in one.sizes])
def test_the_python_of_a_member_makes_it_again(name, size):
    names: dict = {}
    exec(to_python(member(name, size)), names)
    assert names["model"] == member(name, size)


def test_a_member_is_its_own_nearest_and_trains_by_its_name(client):
    for name, size in TINY:
        data = ask(client, "/api/family/member", name=name, size=size)
        assert data["reasons"] == [] and data["parameters"] == parameters(member(name, size))
        assert (data["nearest"]["name"], data["nearest"]["differences"]) == (name, [])
        assert data["train"] == f"everyformer train {name} --size {size} --out runs/mine"


@pytest.mark.parametrize(
    ("question", "choice", "says"),
    [
        ("pattern", "window(8)", "attends to the future"),
        ("memory", 32, "has a last position"),
        ("heads", 5, "5 heads"),
        ("residual", {"type": "post_norm", "norm": {"type": "batch_norm"}}, "mixes positions"),
    ],
)
def test_an_illegal_choice_has_its_reason(client, question, choice, says):
    start = ask(client, "/api/family/member", name="gpt2", size="tiny")
    data = ask(client, "/api/family/choose", json=start["json"], question=question, choice=choice)
    assert says in data["reasons"][0] and data["parameters"] is None


CHOICES = {
    "pattern": "causal & window(8)", "score_mods": [{"type": "alibi"}], "heads": 8, "residual": {"type": "reversible"},
    "depth": {"type": "repeat", "steps": 3}, "layers": 5, "position": None, "width": 96,
    "outputs": {"type": "classify", "classes": 3, "reading": "mean"},
    "sublayers": [{"type": "lstm"}, {"type": "attention", "heads": {"type": "standard", "heads": 2}}],
}  # fmt: skip


@pytest.mark.parametrize("question", CHOICES)
def test_a_choice_changes_what_it_names_and_stays_legal(client, question):
    start = ask(client, "/api/family/member", name="gpt2", size="tiny")
    data = ask(client, "/api/family/choose", json=start["json"], question=question, choice=CHOICES[question])
    assert data["reasons"] == []
    changed = choose(member("gpt2", "tiny"), question, CHOICES[question])
    assert data["json"] == to_json(changed) and changed != member("gpt2", "tiny")
    assert illegal(changed) == [] and data["parameters"] == parameters(changed)
    assert data["nearest"]["differences"] and json.loads(data["json"])


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_choice_for_one_side_of_a_pair_leaves_the_other(client, side):
    start, pattern = member("transformer", "tiny"), "causal & window(8)" if side == "decoder" else "window(8)"
    request = {"json": to_json(start), "question": "pattern", "choice": pattern, "side": side}
    data = ask(client, "/api/family/choose", **request)
    other = "decoder" if side == "encoder" else "encoder"
    changed = choose(start, "pattern", pattern, side)
    assert data["json"] == to_json(changed) and getattr(changed, other) == getattr(start, other)
    assert (data["side"], data["answers"]["pattern"], data["reasons"]) == (side, pattern, [])


def test_sublayers_that_are_sent_back_are_the_same_model(client):
    for name, size in TINY:
        start = ask(client, "/api/family/member", name=name, size=size)
        choice = start["answers"]["sublayers"]
        data = ask(client, "/api/family/choose", json=start["json"], question="sublayers", choice=choice)
        assert data["json"] == start["json"], name


@pytest.mark.parametrize("name", ["gpt2", "bert", "transformer", "graph-classifier"])
def test_the_plan_is_the_librarys_for_the_command_that_is_shown(client, name):
    start = ask(client, "/api/family/member", name=name, size="tiny")
    data = ask(client, "/api/family/plan", json=start["json"])
    planned = plan(Recipe.of(name, "run.steps=100", size="tiny"))
    shown = {field: data[field] for field in ("parameters", "flops", "targets", "tensors", "checkpoint")}
    assert shown == {field: getattr(planned, field) for field in shown}


@pytest.mark.parametrize(("name", "size"), TINY)
def test_the_command_of_a_changed_member_fits_the_embedded_data(client, name, size):
    start = ask(client, "/api/family/member", name=name, size=size)
    data = ask(client, "/api/family/choose", json=start["json"], question="layers", choice=3)
    echo, text, *_ = shlex.split(data["train"])
    recipe = Recipe.of(model_from_json(text.encode()))
    data = recipe.task.open(None)
    data.fit(data.adapt(recipe.value(data.member_settings())))  # raises ValueError otherwise
    assert echo == "echo"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"json": "{"}, "not"),
        ({"json": '{"type": "model"}'}, "width"),
        ({"question": "colour", "choice": 1}, "no choice 'colour'"),
        ({"question": "layers", "choice": "many"}, "many"),
        ({"question": "layers", "choice": 60_000}, "512 layers"),
        ({"question": "residual", "choice": {"type": "residul"}}, "no residual is named"),
        ({"question": "sublayers", "choice": [1]}, "sublayer"),
        ({"question": "depth", "choice": None}, "cannot be"),
    ],
)
def test_what_is_no_model_is_refused_with_the_reason(client, body, says):
    body = {"json": to_json(member("gpt2", "tiny"))} | body
    answer = client.post("/api/family/choose", json=body)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text


def test_a_member_is_no_file(client, folder):
    answer = client.post("/api/family/member", json={"name": str(folder / "first" / "model.json")})
    assert answer.status_code == 400 and "no member of the family" in answer.json()["error"]["message"]
