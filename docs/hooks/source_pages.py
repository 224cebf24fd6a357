"""Links from pages to files of the source work in the site too: each linked file becomes a page with line numbers.

A page links to a file as it does in the repository, `../src/everyformer/value.py#L12`. The site has no repository, so this hook of
mkdocs writes the file as HTML under code/ and points the link there. A link to a file or a line that does not exist is an error.
"""

from __future__ import annotations

import html
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()(?P<path>(?:\.\./)+[^)#\s]+)(?:#L(?P<line>\d+))?(?=\))")
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{path}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="{top}code.css">
<h1><a href="{top}index.html">everyformer</a> {path}</h1>
{code}
</html>
"""


def linked(page: str, markdown: str) -> Iterator[tuple[re.Match[str], str, int]]:
    """The links of a page that leave docs/, each with its file, as a path in the repository, and its line or 0."""
    for match in LINK.finditer(markdown):
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), match["path"]))
        if not path.startswith("docs/"):
            yield match, path, int(match["line"] or 0)


def check(page: str, path: str, line: int) -> None:
    file = ROOT / path
    if not file.is_file():
        raise PluginError(f"{page} links to {path}, which is not a file of the repository; correct the link")
    if line > len(file.read_text(encoding="utf-8").splitlines()):
        raise PluginError(f"{page} links to line {line} of {path}, which is shorter; correct the link")


def written(path: str) -> str:
    """The file as HTML; line 12 has the id L12."""
    try:
        lexer = get_lexer_for_filename(path)
    except ClassNotFound:
        lexer = TextLexer()
    formatter = HtmlFormatter(linenos="inline", linespans="L", anchorlinenos=True, lineanchors="A", wrapcode=True)
    code = highlight((ROOT / path).read_text(encoding="utf-8"), lexer, formatter)
    code = re.sub(r'id="L-(\d+)"', r'id="L\1"', code)
    return PAGE.format(path=html.escape(path), code=code, top="../" * (path.count("/") + 1))


def on_files(files: Files, config: MkDocsConfig) -> None:
    paths: dict[str, None] = {}
    for file in files.documentation_pages():
        for _, path, line in linked(file.src_uri, file.content_string):
            check(file.src_uri, path, line)
            paths[path] = None
    for path in paths:
        files.append(File.generated(config, f"code/{path}.html", content=written(path)))
    colors = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    own = (ROOT / "docs" / "hooks" / "code.css").read_text(encoding="utf-8")
    sheet = f"{colors}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{own}"
    files.append(File.generated(config, "code.css", content=sheet))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = posixpath.dirname(page.file.src_uri)
    for match, path, line in reversed(list(linked(page.file.src_uri, markdown))):
        target = os.path.relpath(f"code/{path}.html", here or ".") + (f"#L{line}" if line else "")
        markdown = markdown[: match.start()] + target + markdown[match.end() :]
    return markdown
