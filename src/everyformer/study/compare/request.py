"""What a comparison is asked for: members with settings of all and of one, data, budgets.

gpt2 transformer-xl reformer            entries: members, .json files of models of your own, folders of runs
deep=gpt2                               an entry with a name of its own
optim.warmup=50                         a setting of all entries
deep:model.layers=6 deep:size=small     a setting, or the size, of one entry
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from everyformer.value import Count, Few, Value, flatten, nearest

Match = Literal["parameters", "flops", "memory", "training-flops", "seconds", "none"]
MATCHED_BY = {  # what a match changes
    "parameters": "width", "flops": "width", "memory": "width", "training-flops": "steps", "seconds": "steps", "none": "",
}  # fmt: skip
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class EntryRequest(Value, frozen=True):
    """One entry as it is asked for."""

    name: str
    member: str
    settings: tuple[str, ...] = ()
    search: tuple[str, ...] = ()  # settings with several values, to search over besides the rate
    size: str | None = None


class RowRequest(Value, frozen=True):
    """Data on which all entries are compared, with settings of their own."""

    data: str | None
    settings: tuple[str, ...] = ()


class Request(Value, frozen=True, kw_only=True):
    """All arguments of a comparison. A folder belongs to one request."""

    entries: tuple[EntryRequest, ...]
    rows: tuple[RowRequest, ...]
    task: str | None = None
    match: tuple[Match, ...] = ("parameters",)
    baseline: str
    trials: Few = 5
    seeds: Count = 3
    budget: float | None = None  # seconds in all; None: run.steps decides
    imports: tuple[str, ...] = ()


def read_entries(words: Sequence[str], size: str | None = None, search: Sequence[str] = ()) -> tuple[EntryRequest, ...]:
    """Returns the entries of the words of a command line. Raises ValueError if a word is none."""
    members: dict[str, str] = {}
    for word in words:
        left, equals, right = word.partition("=")
        if equals and (":" in left or "." in left):
            continue
        name, member = (left, right) if equals else (_name(word), word)
        if name in members:
            raise ValueError(f"two entries are named {name}; name one of them, as in {name}-2={member}")
        if not re.fullmatch(r"[\w-]+", name):
            raise ValueError(f"{name!r} is not a name of an entry; write letters, digits and - only")
        members[name] = member
    if not members:
        raise ValueError("no member is given; name at least one, as in everyformer compare gpt2 lstm")
    settings: dict[str, list[str]] = {name: [] for name in members}
    sizes = {name: None if _is_own(member) else size for name, member in members.items()}
    searches: dict[str, list[str]] = {name: [] for name in members}
    for name, text in _of_entries(words, members):
        if text.startswith("size="):
            sizes[name] = text.removeprefix("size=")
        else:
            settings[name].append(text)
    for name, text in _of_entries(search, members):
        searches[name].append(text)
    return tuple(
        EntryRequest(name, _absolute(member), tuple(settings[name]), tuple(searches[name]), sizes[name])
        for name, member in members.items()
    )


def _of_entries(words: Sequence[str], members: dict[str, str]) -> list[tuple[str, str]]:
    """Each setting with the name of its entry; those of all entries come first, so that those of one replace them."""
    general, own = list[tuple[str, str]](), list[tuple[str, str]]()
    for word in words:
        left, equals, right = word.partition("=")
        name, colon, path = left.partition(":")
        if colon and equals:
            if name not in members:
                raise ValueError(f"{word}: no entry is named {name!r}; {nearest(name, members)}")
            own.append((name, f"{path}={right}"))
        elif equals and "." in left:
            general += [(one, word) for one in members]
    return general + own


def _name(word: str) -> str:
    """The name of an entry that is given without one: that of the member, or of the file or folder."""
    path = Path(word)
    return path.stem if word.endswith(".json") else path.name


def _is_own(member: str) -> bool:
    """Whether a member is a model of the user's, in a file or in the folder of a run."""
    path = Path(member).expanduser()
    return path.suffix == ".json" or (path / "model.json").is_file()


def _absolute(member: str) -> str:
    return str(Path(member).expanduser().absolute()) if _is_own(member) else member


def absolute_data(data: str | None) -> str | None:
    """Data by a name that means the same in every working directory."""
    if data is None or not Path(data).expanduser().exists():
        return data
    return str(Path(data).expanduser().absolute())


def read_seconds(text: str) -> float:
    """Returns a time such as 20m, 90s, 1.5h or 2d in seconds. Raises ValueError if it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a time; write a number with its unit, as in 90s, 20m or 2h")
    return float(match[1]) * UNITS[match[2]]


def read_match(text: str) -> tuple[Match, ...]:
    """Returns what is to be equal: at most one quantity by the width, and one by the steps, with a comma between them."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in get_args(Match):
            raise ValueError(f"--match {name}: {nearest(name, get_args(Match))}")
    kinds = [MATCHED_BY[name] for name in names]
    if len(set(kinds)) < len(kinds):
        raise ValueError(
            f"--match {text} asks for the same {kinds[0] or 'name'} twice; give one of parameters, flops and memory, which the width "
            "decides, and one of training-flops and seconds, which the steps decide"
        )
    result: tuple[Match, ...] = msgspec.convert(names, tuple[Match, ...])
    return result


def difference(old: Request, new: Request) -> str | None:
    """The first setting in which two requests differ, in words; None if they are equal."""
    if old == new:
        return None
    before, after = (dict(flatten(msgspec.to_builtins(one))) for one in (old, new))
    for name in [*before, *after]:
        first, second = (_plain(tree.get(name)) for tree in (before, after))
        if first != second:
            return f"{name} is {second}, and was {first}"
    return "the requests differ"


def _plain(value: Any) -> str:
    return "not given" if value in (None, (), []) else str(value)
