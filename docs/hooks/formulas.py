"""Formulas in TeX become MathML when the site is built, so a browser needs no script to draw them.

They are written as GitHub reads them too: a fence of the language math, or $`x`$ in a line.
"""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

BLOCK = re.compile(r'(?<=<div class="formula">)(.*?)(?=</div>)', re.S)
INLINE = re.compile(r"\$<code>(.*?)</code>\$")


def tex(code: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", code)).strip()


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    content = BLOCK.sub(lambda match: convert(tex(match[1]), display="block"), content)
    return INLINE.sub(lambda match: convert(tex(match[1])), content)
