"""All settings as data: name, type, default, meaning and an example.

The types and defaults are those of the values (`Run`, `Optim`, the tasks) and of the members; the meaning of a field is the comment
behind it, that of a member's setting is in family/settings.py. The listing is stored in settings.json, because completion in a shell
cannot wait for torch. A test compares the file with the values; after a change to a setting, write it again:

    python -m everyformer.cli.settings_listing
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
import tokenize
import types
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from everyformer.family.member import Member

FILE = Path(__file__).with_name("settings.json")
# Where neither the type nor the default makes a good example.
EXAMPLES: dict[str, Any] = {
    "run.steps": 5000, "run.batch": 64, "run.batch_schedule": [[0, 8], [500, 32]], "run.device": "cuda", "run.kernel": "sdpa",
    "task.context_schedule": [[0, 64], [500, 128]],
    "run.loggers": "tensorboard", "run.examples": "none", "optim.lr": 3e-4, "optim.muon_lr": 1e-2, "optim.beta2": 0.95,
    "task.column": "review", "task.label": "stars", "task.environment": "popgym:RepeatPreviousEasy",
    "task.tokenizer_files": "gpt2", "task.source": "fr", "task.target": "en", "model.heads": 8, "model.patterns":
    '["causal & window(16)","causal & stride(16)"]', "model.pattern": "causal & window(64)", "model.local_pattern": "none",
    "model.four_term": '{"type":"four_term","width":512}', "model.auxiliary": "none",
    "model.scaling": '{"type":"linear_scaling","factor":4.0}', "model.transition":
    '{"type":"convolution","hidden":256}', "model.encoder_transition": '{"type":"convolution","hidden":256,"causal":false}',
    "model.gate_bias": 2, "model.initial_span": 0.5, "run.seed": 1, "run.checkpoint_segments": 4, "optim.beta1": 0.95,
    "optim.ema": 0.999, "task.extra_targets": 2, "task.shift": 2, "task.levels": 16, "task.size": 32, "task.discount": 0.995,
    "task.gae_lambda": 0.9, "model.columns": 4, "model.patch": 4,
}  # fmt: skip


def read_listing() -> dict[str, Any]:
    """What `compute_listing` returned when the file was written."""
    listing: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return listing


def settings_of(member: str, size: str | None, task: str | None) -> list[dict[str, Any]]:
    """The settings of a run of a member, with the defaults of a size. A model of your own has no size: it has none of `model.`, and
    its learning rate is not known here."""
    listing = read_listing()
    entry = listing["members"].get(member, {"task": task or "language", "size": None, "sizes": {None: {}}, "model": []})
    size, named = size or entry["size"], task or entry["task"]
    defaults = {f"model.{name}": default for name, default in entry["sizes"].get(size, {}).items()}
    defaults["optim.lr"] = entry.get("rates", {}).get(size, {}).get(named, "")
    if named == entry["task"]:
        defaults |= entry.get("recipes", {}).get(size, {})
    rows = [*entry["model"], *listing["tasks"][named], *listing["optim"], *listing["run"]]
    return [_with_default(row, defaults[row["name"]]) if row["name"] in defaults else row for row in rows]


def _with_default(row: dict[str, Any], default: Any) -> dict[str, Any]:
    """The row with another default, and with an example beside it if it is a number."""
    is_number = isinstance(default, int | float) and not isinstance(default, bool) and default
    if is_number and row["name"] not in EXAMPLES:
        row = row | {"example": f"{row['name']}={json.dumps(_beside(default))}"}
    return row | {"default": default}


def compute_listing() -> dict[str, Any]:
    from everyformer.family.table import MEMBERS
    from everyformer.task.table import TASKS, task_for
    from everyformer.train.recipe import Optim, Run

    names = {kind: name for name, kind in TASKS.items()}
    return {
        "run": list(_fields("run", Run)),
        "optim": list(_fields("optim", Optim)),
        "tasks": {name: list(_fields("task", kind)) for name, kind in TASKS.items()},
        "members": {
            name: {
                "task": names[type(task_for(name))],
                "size": member.size,
                "sizes": {size: {key: _plain(one) for key, one in of.items()} for size, of in member.sizes.items()},
                "model": list(_model_settings(member)),
                "rates": {size: _rates(member, size) for size in member.sizes},
            }
            | ({"recipes": {size: _set_by(name, size) for size in member.recipes}} if member.recipes else {})
            for name, member in MEMBERS.items()
        },
    }


def _rates(member: Member, size: str) -> dict[str, float]:
    """The default learning rate of each task for a size of a member."""
    from everyformer.network.model import EncoderDecoder
    from everyformer.task.table import TASKS

    value = member.value(size)
    model = value.decoder if isinstance(value, EncoderDecoder) else value
    return {name: kind().default_lr(model) for name, kind in TASKS.items()}


def _set_by(member: str, size: str) -> dict[str, Any]:
    """The settings of a run that a size of a member sets, by their paths, and the warm-up that follows from its steps."""
    from everyformer.family.table import find
    from everyformer.train.recipe import Recipe

    recipe, found = Recipe.of(member, size=size), dict[str, Any]()
    for path in (*(setting.partition("=")[0] for setting in find(member).recipes[size]), "optim.warmup"):
        part, _, name = path.partition(".")
        found[path] = _plain(recipe.model[name] if part == "model" else getattr(getattr(recipe, part), name))
    return found


def _fields(part: str, kind: type) -> Iterator[dict[str, Any]]:
    hints, comments = get_type_hints(kind, include_extras=True), field_comments(kind)
    for name, default in zip(kind.__struct_fields__, kind.__struct_defaults__, strict=True):  # type: ignore[attr-defined]
        meaning = re.sub(r"\b(None|True|False):", lambda match: match[0].lower(), comments.get(name, ""))
        yield _row(f"{part}.{name}", hints[name], default, meaning)


def _model_settings(member: Member) -> Iterator[dict[str, Any]]:
    from everyformer.family.settings import meaning_of

    parameters = inspect.signature(member.make).parameters
    for name, kind in member.settings().items():
        if name != "context":  # it follows from task.context
            yield _row(f"model.{name}", kind, parameters[name].default, meaning_of(member.name, name))


def _row(path: str, kind: Any, default: Any, meaning: str) -> dict[str, Any]:
    row = {"name": path, "type": type_in_words(kind), "default": _plain(default), "meaning": meaning}
    example = EXAMPLES.get(path, _example(kind, default))
    text = example if isinstance(example, str) else json.dumps(example, separators=(",", ":"))
    return row | {"example": f"{path}={text}", "choices": _choices(kind)}


def _plain(default: Any) -> Any:
    """A default as JSON: a pattern as text, another value as its JSON."""
    from everyformer.attention.pattern import Pattern
    from everyformer.value import Value

    if isinstance(default, Pattern):
        return str(default)
    if isinstance(default, tuple | list):
        return [_plain(one) for one in default]
    return json.loads(_json(default)) if isinstance(default, Value) else default


def _json(value: Any) -> str:
    from everyformer.value import to_json

    return to_json(value)


def _alternatives(kind: Any) -> list[Any]:
    """The types of a union without None, or the type itself."""
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return [one for one in members if one is not type(None)]


def _choices(kind: Any) -> list[str]:
    """The values that can be written, if they are few."""
    found: list[str] = []
    for one in _alternatives(kind):
        item = get_args(one)[0] if get_origin(one) is tuple else one
        found += ["true", "false"] if one is bool else map(str, get_args(item)) if get_origin(item) is Literal else []
    return [*found, "none"] if found and _is_optional(kind) else found


def _is_optional(kind: Any) -> bool:
    return type(None) in get_args(kind)


def _example(kind: Any, default: Any) -> Any:
    """Another value than the default: the other choice, or twice or half the number."""
    if choices := [one for one in _choices(kind) if one != str(default).lower()]:
        return choices[0]
    if isinstance(default, int | float) and default:
        return _beside(default)
    return 0.1 if float in (get_args(one)[0] for one in _alternatives(kind) if get_args(one)) else 64


def _beside(number: float) -> float:
    """Half of a fraction, twice an integer."""
    return number / 2 if isinstance(number, float) else 2 * number


def type_in_words(kind: Any) -> str:
    """integer >= 1, number from 0 to 1, true or false, a | b, pattern, ..."""
    words = " or ".join(dict.fromkeys(map(_one_in_words, _alternatives(kind))))
    return f"{words}, or none" if _is_optional(kind) else words


def _one_in_words(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        bare, *metas = get_args(kind)
        bounds = {name: getattr(meta, name) for meta in metas for name in ("gt", "ge", "lt", "le")}
        signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        shown = [f"{signs[name]} {bound}" for name, bound in bounds.items() if bound is not None and bound < 2**31 - 1]
        return " ".join((_one_in_words(bare), *shown))
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        items = [one for one in get_args(kind) if one is not Ellipsis]
        return f"list of {type_in_words(items[0])}" if len(items) == 1 else f"({', '.join(map(type_in_words, items))})"
    plain = {bool: "true or false", int: "integer", float: "number", str: "text"}
    return plain.get(kind) or str(kind.__name__).lower()


def field_comments(kind: type) -> dict[str, str]:
    """The comments behind the fields of a class and of the classes that it inherits from."""
    bases = [one for one in kind.__bases__ if one.__module__.startswith("everyformer.")]
    inherited = {name: text for base in bases for name, text in field_comments(base).items()}
    source = textwrap.dedent(inspect.getsource(kind))
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    found = inherited
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            found[node.target.id] = " ".join(comments[line] for line in lines if line in comments)
    return found


if __name__ == "__main__":
    FILE.write_text(json.dumps(compute_listing(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
