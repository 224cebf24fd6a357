"""`everyformer explore`: a local page to look into runs, models and patterns."""

from __future__ import annotations

import shlex
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from everyformer.cli.options import Device
from everyformer.cli.own_parts import Imports, import_parts
from everyformer.cli.terminal import console, error_console

if TYPE_CHECKING:
    from everyformer.explore.app import Explorer

HOST, FOLDER = "127.0.0.1", Path("runs")


def explore(
    *runs: Path,
    view: Literal["inside", "patterns", "family", "runs"] | None = None,
    out: Path | None = None,
    text: str | None = None,
    example: int | None = None,
    port: int = 0,
    browser: Annotated[bool, Parameter(show_default=False)] = True,
    device: Device = "auto",
    imports: Imports = (),
) -> int:
    """Open a local page that shows the family, attention patterns, and what runs and models compute.

    Only this machine can reach it, and it loads nothing from elsewhere. Ctrl-C ends it. With --out it is written to a file instead.

    Parameters
    ----------
    runs
        Folders of runs or of saved models, or folders that have some. Default: those in the folder runs, if there is one.
    view
        The view that is opened or saved. Default: inside for one run, runs for several, family without one.
    out
        An HTML file for one view, which works without a server.
    text
        With --out, the text that the model reads; with --view patterns the pattern.
    example
        With --out, an example of the validation data instead of a text.
    port
        The port of the page. Default: a free one.
    browser
        Open the page in the browser. Default: yes.
    """
    import_parts(imports, runs[0] if len(runs) == 1 else None)
    try:
        from everyformer.explore.app import Explorer
    except ImportError as error:
        raise ValueError(f"the page needs {error.name}; install it with pip install 'everyformer[explore]'") from None
    from everyformer.explore.library import Library

    library = Library(runs or [folder for folder in (FOLDER,) if folder.is_dir()], device)
    if runs:
        library.check()
    names = list(library.entries())
    view = view or ("inside" if len(names) == 1 else "runs" if names else "family")
    if out is None:
        if text is not None or example is not None:
            raise ValueError("--text and --example are those of a page that --out saves; leave them out, or give --out")
        _serve(Explorer(library, imports), port, view, browser)
        return 0
    from everyformer.explore.saved import Saved, save_page

    save_page(Explorer(library, imports), out, Saved(view, text, example))
    console().print(f"wrote {out}: the view {view}, {out.stat().st_size / 2**20:.1f} MiB", soft_wrap=True)
    error_console().print(
        f"\nnext: open it in a browser, or everyformer explore {shlex.join(map(str, runs))}", style="dim"
    )
    return 0


def _serve(explorer: Explorer, port: int, view: str, browser: bool) -> None:
    """Print the address, open the browser, and answer until Ctrl-C."""
    from everyformer.serve.server import open_socket, serve_forever

    opened = open_socket(HOST, port)
    url = f"http://{HOST}:{opened.getsockname()[1]}/#{view}"

    def started() -> None:
        console().print(f"the page is at {url}", soft_wrap=True)
        error_console().print("Ctrl-C ends it", style="dim")
        if browser:
            webbrowser.open(url)

    try:
        serve_forever(explorer, opened, started)
    finally:
        opened.close()
