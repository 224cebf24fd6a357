"""Docstrings as Markdown, for mkdocstrings: the lines "name   what it is" of a docstring become a list, and an example stands by itself."""

from __future__ import annotations

import re
from typing import Any

import griffe

ITEM = re.compile(r"^(\w[\w, =.()\[\]\"]*?)(?: {2,})(\S.*)$")


def listed(text: str) -> str:
    result: list[str] = []
    in_list = False
    for line in text.splitlines():
        match = ITEM.match(line)
        if match:
            result += [] if in_list else [""]
            result.append(f"- `{match[1]}`: {match[2]}")
        elif in_list and line.startswith("  "):
            result.append(f"  {line.strip()}")
        else:
            result += ["", line] if in_list or line.startswith("Example:") else [line]
        in_list = bool(match) or (in_list and line.startswith("  "))
    return "\n".join(result)


class Lists(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = listed(obj.docstring.value)

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """The fields of a value are its constructor's arguments."""
        if cls.docstring and "Value" in [str(base) for base in cls.bases]:
            fields = [one for one in cls.members.values() if isinstance(one, griffe.Attribute) and one.annotation]
            shown = [field(one) for one in fields if "ClassVar" not in str(one.annotation)]
            cls.docstring.value = f"```python\n{cls.name}({', '.join(shown)})\n```\n\n{cls.docstring.value}"


def field(attribute: griffe.Attribute) -> str:
    default = "" if attribute.value is None else f" = {attribute.value}"
    return f"{attribute.name}: {attribute.annotation}{default}"
