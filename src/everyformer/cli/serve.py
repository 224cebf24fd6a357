"""`everyformer serve`: a trained model as a service, for OpenAI's clients."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from everyformer.cli.options import Device, Step
from everyformer.cli.own_parts import Imports, import_parts
from everyformer.cli.terminal import console, error_console

KEY = "EVERYFORMER_API_KEY"


def serve(
    run: Path,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    name: str | None = None,
    rows: int = 32,
    queue: int = 256,
    max_tokens: int = 2048,
    max_prompt: int = 16384,
    body: int = 2097152,
    timeout: float = 300.0,
    step: Step = None,
    device: Device = "auto",
    imports: Imports = (),
) -> int:
    """Serve a run or a saved model over HTTP: completions, embeddings and classes, as OpenAI's clients ask for them.

    Ctrl-C or SIGTERM ends it after the requests that it has started. docs/serve.md describes the paths.

    Parameters
    ----------
    run
        The folder of a run, or of a saved model.
    host
        Where it listens. Any other machine can reach another host than 127.0.0.1 or ::1, which needs --api-key.
    port
        The port; 0 takes a free one.
    api_key
        The key that every request must send. Default: the environment variable EVERYFORMER_API_KEY, or none.
    name
        The name of the model. Default: the name of the folder.
    rows
        The number of sequences that are generated together.
    queue
        The number of sequences that may wait; more are answered with 429.
    max_tokens
        The largest number of new tokens of a sequence.
    max_prompt
        The largest number of tokens of a prompt.
    body
        The largest number of bytes of a request.
    timeout
        The seconds after which an answer is given up.
    """
    import_parts(imports, run)
    given = {"rows": rows, "queue": queue, "max_tokens": max_tokens, "max_prompt": max_prompt, "body": body}
    _serve(run, host, port, api_key or os.environ.get(KEY) or None, name, given | {"timeout": timeout}, step, device)
    return 0


def _serve(
    run: Path, host: str, port: int, key: str | None, name: str | None, limits: dict[str, Any], step: Step, device: str
) -> None:
    """Open the socket, then the model, and answer requests until a signal comes."""
    try:
        from everyformer.serve.memory import limit_compiled_shapes
        from everyformer.serve.server import open_socket, serve_forever
    except ImportError as error:
        raise ValueError(f"serving needs {error.name}; install it with pip install 'everyformer[serve]'") from None
    limit_compiled_shapes()
    from everyformer.serve.app import Service
    from everyformer.serve.engine import Limits
    from everyformer.serve.guard import is_local
    from everyformer.train.trained import load

    if not is_local(host) and key is None:
        raise ValueError(f"--host {host} can be reached from other machines; give --api-key, or leave --host out")
    checked = Limits(**limits)
    opened = open_socket(host, port)
    try:
        model = load(run, step=step, device=device)
        service = Service(model, name or run.resolve().name, checked, key, local=key is None)
        address = f"[{host}]" if ":" in host else host
        url = f"http://{address}:{opened.getsockname()[1]}"

        def started() -> None:
            console().print(f"{service.name} at {url}/v1: {', '.join(service.verbs)}")
            error_console().print(f"\nnext: curl {url}/v1/models   (Ctrl-C ends the service)", style="dim")

        serve_forever(service, opened, started)
    finally:
        opened.close()
