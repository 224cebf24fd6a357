"""The contents of a folder: its pages stand in the navigation, and the folder's index lists them with their first sentences.

In mkdocs.yml a path that ends in / stands for all pages of that folder, the index first.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

MARK = "<!-- the pages of this folder -->"


def expanded(nav: list[Any], docs: Path) -> list[Any]:
    result: list[Any] = []
    for item in nav:
        if isinstance(item, dict):
            result.append({title: entry(value, docs) for title, value in item.items()})
        else:
            result += entry(item, docs) if item.endswith("/") else [item]
    return result


def entry(value: Any, docs: Path) -> Any:
    if isinstance(value, list):
        return expanded(value, docs)
    if value.endswith("/"):
        return sorted(
            (str(page.relative_to(docs)) for page in (docs / value).glob("*.md")),
            key=lambda page: (not page.endswith("/index.md"), page),
        )
    return value


def summary(text: str) -> tuple[str, str]:
    """The title of a page, and the first sentence below it that is not code, a picture or a link."""
    title, _, body = text.removeprefix("# ").partition("\n")
    paragraphs = [
        part for part in body.split("\n\n") if re.match(r"[\w`]", part.strip()) and not part.startswith("    ")
    ]
    sentence = re.split(r"(?<=[.:])\s", " ".join(paragraphs[0].split()), maxsplit=1)[0] if paragraphs else ""
    return title, sentence.rstrip(":").rstrip(".") + "."


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = expanded(config.nav or [], Path(config.docs_dir))
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if MARK not in markdown:
        return markdown
    folder = Path(config.docs_dir, page.file.src_uri).parent
    pages = {path.name: summary(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.md"))}
    lines = [f"- [{title}]({name}): {text}" for name, (title, text) in pages.items() if name != "index.md"]
    return markdown.replace(MARK, "\n".join(lines))
