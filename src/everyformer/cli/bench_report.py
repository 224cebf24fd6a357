"""What the verbs of `everyformer bench` share: rows, ceilings, JSON, and the files that are checked first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter
from rich.console import Console

from everyformer.cli.tables import print_labelled

if TYPE_CHECKING:
    import torch

    from everyformer.study.ceilings import Ceiling

AsFile = Annotated[Path | None, Parameter(name="--json")]


def check_files(json_file: Path | None, figure: Path | None) -> None:
    """Raises ValueError if the results could not be written, before they are measured."""
    from everyformer.study.pattern_images import check_file

    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ValueError(f"--json {json_file} is in a folder that does not exist; create it first")
    if figure is not None:
        check_file(figure)


class Ceilings(NamedTuple):
    """The matrix rate in TFLOP/s and the bandwidth in GB/s."""

    found: list[Ceiling]

    @classmethod
    def measure(cls, screen: Console, device: torch.device) -> Ceilings:
        """Measure and print them."""
        from everyformer.study.ceilings import ceilings

        found = []
        for one in ceilings(device):
            screen.print(f"{one.name}: {one.rate:,.3g} {one.unit} ({one.least:,.3g} to {one.most:,.3g})")
            found.append(one)
        return cls(found)

    @property
    def matrix(self) -> float:
        return self.found[0].rate


def print_row(screen: Console, line: str, narrow: Mapping[str, str]) -> None:
    """Print a line of a table, or in a terminal that is too narrow for it the same as labels and texts."""
    if screen.width >= len(line):
        screen.print(line, soft_wrap=True)
    else:
        print_labelled(screen, narrow)


def write_json(
    screen: Console,
    file: Path | None,
    facts: Mapping[str, str],
    ceilings: Ceilings | None,
    rows: Sequence[dict[str, Any]],
) -> None:
    """Write a table as JSON, with what its log begins with."""
    if file is not None:
        table = {
            "facts": facts,
            "ceilings": [asdict(one) for one in (ceilings.found if ceilings else ())],
            "rows": rows,
        }
        file.write_text(json.dumps(table, indent=1) + "\n")
        screen.print(f"table: {file}")
