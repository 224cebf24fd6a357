"""Writes the table of members and export formats into docs/import_export.md: `python -m tests.peers.make_export_table`."""

from __future__ import annotations

import re
from pathlib import Path

import everyformer
from everyformer.cli.export import FORMATS, reasons
from everyformer.family.table import MEMBERS

PAGE = Path(__file__).parents[2] / "docs" / "import_export.md"
BEGIN, END = "<!-- table of members and formats -->", "<!-- end of the table -->"


def table() -> str:
    rows = [f"| member | {' | '.join(FORMATS)} |", f"| --- |{' --- |' * len(FORMATS)}"]
    for name in MEMBERS:
        found = reasons(everyformer.build(name, "tiny"))
        rows.append(f"| {name} | {' | '.join('yes' if found[one] is None else '–' for one in FORMATS)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", f"{BEGIN}\n\n{table()}\n\n{END}", text, flags=re.S))
