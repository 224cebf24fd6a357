"""The pages of the reference, made from the library when the site is built: its public names, its commands and its settings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import everyformer
from everyformer.cli.main import app
from everyformer.cli.settings_listing import read_listing

NUMBERS = (
    "In the fields, `Size` and `Few` are whole numbers from 1, `Count` from 0; `Positive` is a number above 0, `NotNegative` 0 or above, "
    "`Share` and `Part` are from 0 to 1."
)
GROUPS = {
    "attention": (
        "Attention",
        "Patterns, score modifications, projections of the heads, and the function that computes them.",
    ),
    "network": (
        "Models",
        "Embeddings, positions, norms, sublayers, residuals, depths, caches and output heads; what networks return.",
    ),
    "use": (
        "Members and runs",
        "Members of the family, training, generation, evaluation, contracts, and saved models.",
    ),
}


def names(group: str) -> str:
    """The public names whose module is in a package; those of all other packages are in the last group."""
    title, text = GROUPS[group]
    parts = [f"# {title}\n\n{text} {NUMBERS}"]
    for name in everyformer.__all__:
        value = getattr(everyformer, name)
        home = getattr(value, "__module__", "")
        package = home.split(".")[1] if "." in home else ""
        if hasattr(value, "__qualname__") and group == (package if package in GROUPS else "use"):
            parts.append(f"::: {home}.{value.__qualname__}")
    if group == "use":
        parts.append("::: everyformer.train.loop.train")
    return "\n\n".join(parts)


def commands() -> str:
    text = app.generate_docs(output_format="markdown").partition("**Commands**")[2]
    text = re.sub(
        r"^everyformer (?P<path>.*?)(?P<verb>\S+) (?P=verb) ", r"everyformer \g<path>\g<verb> ", text, flags=re.M
    )
    return f"# Commands\n\nEvery command prints this with `--help`.\n\n**Commands**{text}"


def settings() -> str:
    listing = read_listing()
    parts = [
        "# Settings\n\nA setting is written `path=value` behind a command, or as a string in `Recipe.of`. "
        "`everyformer settings MEMBER` lists those of one member and its task, with the defaults of a size."
    ]
    parts += [section("Runs: `run.`", listing["run"]), section("Optimizers: `optim.`", listing["optim"])]
    parts += [section(f"Task {name}: `task.`", rows) for name, rows in listing["tasks"].items()]
    parts += [section(f"Member {name}: `model.`", entry["model"]) for name, entry in listing["members"].items()]
    return "\n\n".join(parts)


def section(title: str, rows: list[dict[str, Any]]) -> str:
    return "\n".join(
        [
            f"## {title}\n",
            "| setting | type | default | meaning | example |",
            "| --- | --- | --- | --- | --- |",
            *lines(rows),
        ]
    )


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        default = "none" if row["default"] is None else json.dumps(row["default"], ensure_ascii=False).strip('"')
        cells = (
            f"`{row['name']}`",
            row["type"],
            f"`{default}`" if default else "",
            row["meaning"],
            f"`{row['example']}`",
        )
        yield f"| {' | '.join(cell.replace('|', '&#124;') if '`' not in cell else cell.replace('|', chr(92) + '|') for cell in cells)} |"


PAGES: dict[str, Callable[[], str]] = {
    **{group: lambda group=group: names(group) for group in GROUPS},
    "commands": commands,
    "settings": settings,
}


def on_files(files: Files, config: MkDocsConfig) -> None:
    for name, make in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=make()))
