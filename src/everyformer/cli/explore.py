"""`everyformer explore`: a local page to look into runs, models and patterns."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from everyformer.cli.options import Device
from everyformer.cli.own_parts import Imports, import_parts
from everyformer.cli.terminal import console, error_console

HOST, FOLDER = "127.0.0.1", Path("runs")


def explore(
    *runs: Path,
    port: int = 0,
    browser: Annotated[bool, Parameter(show_default=False)] = True,
    device: Device = "auto",
    imports: Imports = (),
) -> int:
    """Open a local page that shows the family, attention patterns, and what runs and models compute.

    Only this machine can reach it. Ctrl-C ends it.

    Parameters
    ----------
    runs
        Folders of runs or of saved models, or folders that have some. Default: those in the folder runs, if there is one.
    port
        The port of the page. Default: a free one.
    browser
        Open the page in the browser. Default: yes.
    """
    import_parts(imports, runs[0] if len(runs) == 1 else None)
    try:
        from everyformer.serve.server import open_socket, serve_forever
    except ImportError as error:
        raise ValueError(f"the page needs {error.name}; install it with pip install 'everyformer[explore]'") from None
    from everyformer.explore.app import Explorer
    from everyformer.explore.library import Library

    library = Library(runs or [folder for folder in (FOLDER,) if folder.is_dir()], device)
    if runs:
        library.check()
    opened = open_socket(HOST, port)
    try:
        url = f"http://{HOST}:{opened.getsockname()[1]}"

        def started() -> None:
            console().print(f"the page is at {url}", soft_wrap=True)
            error_console().print("Ctrl-C ends it", style="dim")
            if browser:
                webbrowser.open(url)

        serve_forever(Explorer(library), opened, started)
    finally:
        opened.close()
    return 0
