"""The table that `everyformer family` prints, as data.

The table is stored in family.json, because importing torch and building every size takes seconds. A test compares the file with
the members; after a change to a member, write it again:

    python -m everyformer.study.family_listing
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everyformer.value import snake

if TYPE_CHECKING:
    from everyformer.attention.pattern import Pattern
    from everyformer.family.member import Member
    from everyformer.network.depth import Depth
    from everyformer.network.model import Model
    from everyformer.network.multi_head_attention import Attention

FILE = Path(__file__).with_name("family.json")
NOTHING = "–"


def read_listing() -> list[dict[str, Any]]:
    """The rows of all members, as `compute_listing` returned them when the file was written."""
    rows: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return rows


def compute_listing() -> list[dict[str, Any]]:
    from everyformer.family.table import MEMBERS

    return [row(member) for member in MEMBERS.values()]


def row(member: Member) -> dict[str, Any]:
    """One row. Pattern, score mods, sublayers, residual and depth are lists with one entry per side: encoder, decoder."""
    from everyformer.family.table import parameters
    from everyformer.study.example import models

    sides = models(member.value())
    return {
        "member": member.name,
        "paper": member.paper,
        "size": member.size,
        "pattern": [_join(_short(one.pattern) for one in _attentions(side.body)) for side in sides],
        "score mods": [
            _join(_name(score_mod) for one in _attentions(side.body) for score_mod in one.score_mods) for side in sides
        ],
        "residual": [_name(side.body.residual) for side in sides],
        "sublayers": [_join(_name(one) for one in side.body.sublayers()) for side in sides],
        "depth": [_name(side.body) for side in sides],
        "cache": cache_of(sides[-1]),
        "sizes": {
            size: {**settings, "parameters": parameters(member.value(size))} for size, settings in member.sizes.items()
        },
    }


def cache_of(model: Model) -> str:
    """What a model carries over from one call to the next: a choice of the model."""
    return ", ".join(model.cache_kinds()) or NOTHING


def _attentions(body: Depth) -> list[Attention]:
    from everyformer.network.multi_head_attention import Attention

    return [sublayer for sublayer in body.sublayers() if isinstance(sublayer, Attention)]


def _name(value: object) -> str:
    return snake(type(value).__name__).replace("_", "-")


def _short(pattern: Pattern) -> str:
    """The pattern as text; of more than two patterns by head only the first."""
    from everyformer.attention.pattern import ByHead

    if isinstance(pattern, ByHead) and len(pattern.patterns) > 2:
        return f"by_head({pattern.patterns[0]}, ...)"
    return str(pattern)


def _join(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names)) or NOTHING


if __name__ == "__main__":
    FILE.write_text(json.dumps(compute_listing(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
