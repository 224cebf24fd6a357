"""Writes a view of the page as one file, with the answers that it shows inside: it needs no server and no network."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from everyformer.explore.answer import key_of
from everyformer.explore.app import PAGE, Explorer
from everyformer.family.table import MEMBERS
from everyformer.serve.error import RequestError

View = Literal["inside", "patterns", "family", "runs"]
PATTERN, LENGTH = "causal & (window(8) | stride(8))", 64
PICTURE = 48  # positions of the pictures of a member's patterns
MAX_BYTES = 100 << 20


@dataclass(frozen=True)
class Saved:
    """What a saved page shows."""

    view: View
    text: str | None = None  # that the model reads, or the pattern
    example: int | None = None


class Recorder:
    """Asks the explorer and keeps the answers."""

    def __init__(self, explorer: Explorer):
        self.explorer, self.answers, self.size = explorer, dict[str, Any](), 0

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        try:
            answer = self.explorer.answer(path, json.dumps(body).encode())
        except RequestError as error:
            raise ValueError(str(error)) from None
        encoded = answer.encode()
        self.size += len(encoded)
        if self.size > MAX_BYTES:
            raise ValueError(f"the page would take more than {MAX_BYTES >> 20} MiB; give a shorter text, or fewer runs")
        data = base64.b64encode(encoded).decode() if answer.arrays else json.loads(encoded)
        self.answers[key_of(path, body)] = data
        return answer.data


def save_page(explorer: Explorer, file: Path, saved: Saved) -> None:
    """Write a view as one HTML file. Raises ValueError if it cannot be shown or written."""
    if file.suffix not in (".html", ".htm") or not file.parent.is_dir():
        raise ValueError(f"cannot write the page to {file}; give a .html file in a folder that exists")
    recorder = Recorder(explorer)
    shown: dict[str, Any] = {"view": saved.view}
    runs = [one["name"] for one in recorder.ask("/api/runs")["runs"]]
    if saved.view == "inside":
        if len(runs) != 1:
            raise ValueError(f"a saved view of a model's inside shows one run, but {len(runs)} are given; give one")
        shown |= {"run": runs[0], "text": saved.text, "example": saved.example}
        _inside(recorder, runs[0], saved)
    elif saved.view == "patterns":
        shown["text"] = saved.text or PATTERN
        _patterns(recorder, shown["text"])
    elif saved.view == "family":
        _family(recorder)
    else:
        shown["runs"] = runs[:12]
        for path in ("/api/runs/curves", "/api/runs/recipes"):
            recorder.ask(path, runs=shown["runs"])
    file.write_text(_html(shown | {"answers": recorder.answers}), encoding="utf-8")


def _inside(recorder: Recorder, run: str, saved: Saved) -> None:
    body: dict[str, Any] = {"run": run}
    body |= {} if saved.text is None else {"text": saved.text}
    body |= {} if saved.example is None else {"example": saved.example}
    reading = recorder.ask("/api/inside", **body)
    for part in reading["parts"]:
        for layer, heads in enumerate(part["layers"]):
            for head in range(heads):
                recorder.ask("/api/inside/head", **body, part=part["name"], layer=layer, head=head)
    if reading["graph"] is not None:
        recorder.ask("/api/inside/graph", **body, node=reading["graph"]["node"])
    for kind in reading["inner"]:
        recorder.ask("/api/inside/inner", **body, kind=kind)


def _patterns(recorder: Recorder, text: str) -> None:
    recorder.ask("/api/pattern/names")
    first = recorder.ask("/api/pattern", text=text, length=LENGTH, head=0)
    for head in range(1, first["heads"]):
        recorder.ask("/api/pattern", text=text, length=LENGTH, head=head)
    recorder.ask("/api/pattern/cost", text=text, length=LENGTH)


def _family(recorder: Recorder) -> None:
    recorder.ask("/api/family")
    for name, member in MEMBERS.items():
        about = recorder.ask("/api/family/member", name=name, size=next(iter(member.sizes)))
        for pattern in about["answers"]["patterns"][:4]:
            recorder.ask("/api/pattern", text=pattern, length=PICTURE, head=0)


def _html(recorded: dict[str, Any]) -> str:
    """The page with its script, its style and the answers inside. Only this script may run, and nothing may be loaded."""
    page, script, style = ((PAGE / name).read_text(encoding="utf-8") for name in ("index.html", "page.js", "page.css"))
    script = script.replace("</script", "<\\/script")
    answers = json.dumps(recorded, ensure_ascii=False).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        '<script type="module" crossorigin src="./page.js"></script>': f'<meta http-equiv="Content-Security-Policy" content="{policy}" />',
        '<link rel="stylesheet" crossorigin href="./page.css">': f"<style>{style}</style>",
        "</body>": f'<script id="recorded" type="application/json">{answers}</script>\n'
        f'    <script type="module">{script}</script>\n  </body>',
    }
    for old, new in parts.items():
        assert page.count(old) == 1
        page = page.replace(old, new)
    return page


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
