"""`everyformer explore`: a local page to look into runs, models and patterns."""

from __future__ import annotations

import webbrowser
from typing import Annotated

from cyclopts import Parameter

from everyformer.cli.own_parts import Imports, import_parts
from everyformer.cli.terminal import console, error_console

HOST = "127.0.0.1"


def explore(
    *,
    port: int = 0,
    browser: Annotated[bool, Parameter(show_default=False)] = True,
    imports: Imports = (),
) -> int:
    """Open a local page that shows the family, attention patterns, and what runs and models compute.

    Only this machine can reach it. Ctrl-C ends it.

    Parameters
    ----------
    port
        The port of the page. Default: a free one.
    browser
        Open the page in the browser. Default: yes.
    """
    import_parts(imports)
    try:
        from everyformer.serve.server import open_socket, serve_forever
    except ImportError as error:
        raise ValueError(f"the page needs {error.name}; install it with pip install 'everyformer[explore]'") from None
    from everyformer.explore.app import Explorer

    opened = open_socket(HOST, port)
    try:
        url = f"http://{HOST}:{opened.getsockname()[1]}"

        def started() -> None:
            console().print(f"the page is at {url}", soft_wrap=True)
            error_console().print("Ctrl-C ends it", style="dim")
            if browser:
                webbrowser.open(url)

        serve_forever(Explorer(), opened, started)
    finally:
        opened.close()
    return 0
