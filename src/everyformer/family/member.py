"""What a member of the family is: a name, a paper, a function that returns its value, and sizes by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

from everyformer.attention.parse import parse
from everyformer.attention.pattern import Pattern
from everyformer.network.model import EncoderDecoder, Model
from everyformer.value import checked, nearest

Sizes = Mapping[str, Mapping[str, Any]]
NO_DROPOUT = ("model.dropout=0",)  # of language models that are too small to overfit: docs/results/defaults.md


@dataclass(frozen=True)
class Member:
    """One row of the family. Each file of this package exports its own, and table.py collects them."""

    name: str
    paper: str
    make: Callable[..., Model | EncoderDecoder]
    sizes: Sizes  # settings of `make` by the name of the size, as plain data: a pattern is text
    size: str  # the default size
    idea: str = ""  # two sentences, for docs/family.md
    paper_parameters: Mapping[str, float | None] = field(default_factory=dict)  # in millions, as the paper states them
    departures: Mapping[str, str] = field(default_factory=dict)  # by size: how and why it differs from the paper
    task: str | None = None  # the default task; None: that of the first output head
    recipes: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # by size: settings of a run on that task, path=value, before those of the user

    def settings(self) -> dict[str, Any]:
        """The names of the settings and their types."""
        kinds = get_type_hints(self.make, include_extras=True)
        del kinds["return"]
        return kinds

    def value(self, size: str | None = None, **changes: Any) -> Model | EncoderDecoder:
        """Returns the value of a size with some settings changed. Raises ValueError if a name or a setting is wrong."""
        size = size or self.size
        if size not in self.sizes:
            raise ValueError(f"{self.name} has no size {size!r}; {nearest(size, self.sizes)}")
        kinds = self.settings()
        for name in changes:
            if name not in kinds:
                raise ValueError(f"{self.name} has no {name!r} to set; {nearest(name, kinds)}")
        settings = {**self.sizes[size], **changes}
        return self.make(
            **{name: read_setting(f"{self.name}.{name}", one, kinds[name]) for name, one in settings.items()}
        )


def read_setting(name: str, setting: Any, kind: Any) -> Any:
    """Returns a setting converted to its type. A pattern may be text, a part of a model may be JSON data."""
    if any(issubclass(leaf, Pattern) for leaf in leaf_types(kind)):
        several = any(get_origin(one) is tuple for one in (kind, *get_args(kind)))
        if several and isinstance(setting, list | tuple):
            setting = tuple(_pattern(one) for one in setting)
        else:
            setting = (_pattern(setting),) if several and isinstance(setting, str) else _pattern(setting)
    return checked(name, setting, kind)


def is_part(kind: Any) -> bool:
    """Whether the settings of a type are parts of a model (a pattern, a sublayer, ...) rather than numbers or names."""
    return any(leaf not in (int, float, str, bool, type(None)) for leaf in leaf_types(kind))


def leaf_types(kind: Any) -> Iterator[type]:
    """The classes that a type consists of: Pattern and NoneType for tuple[Pattern, ...] | None."""
    if isinstance(kind, type) and not get_args(kind):
        yield kind
    for argument in get_args(kind):
        yield from leaf_types(argument)


def _pattern(setting: Any) -> Any:
    return parse(setting) if isinstance(setting, str) else setting
