"""The entry point: runs a command, and turns an error into one line and an exit code.

Exit codes: 0 success, also if Ctrl-C skipped only the last evaluation; 1 a contract failed or did not apply, or the reader of a
pipe exited; 2 a wrong name, value or option; 130 stopped by Ctrl-C, 143 by SIGTERM, with the run saved.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any, get_args

from cyclopts import App, Parameter, Token, convert
from rich.console import Console

from everyformer import __version__
from everyformer.cli.bench import bench
from everyformer.cli.compare import compare, tune
from everyformer.cli.complete import complete, completion
from everyformer.cli.contracts import contracts
from everyformer.cli.data import data
from everyformer.cli.demo import demo
from everyformer.cli.embed import embed
from everyformer.cli.evaluate import evaluate
from everyformer.cli.explore import explore
from everyformer.cli.export import export
from everyformer.cli.family import family
from everyformer.cli.generate import generate
from everyformer.cli.import_model import import_model
from everyformer.cli.options import refuse_empty
from everyformer.cli.out_of_memory import amount_requested, is_out_of_memory
from everyformer.cli.own_parts import imported
from everyformer.cli.plan import plan
from everyformer.cli.predict import predict
from everyformer.cli.serve import serve
from everyformer.cli.settings import settings
from everyformer.cli.show_run import show
from everyformer.cli.terminal import discard_output, write_error
from everyformer.cli.train import resume, train
from everyformer.cli.work import work

# Waiting threads sleep: beside another program, spinning threads make each step several times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch reads it when it is imported, later


def convert_exactly(kind: Any, tokens: Sequence[Token]) -> Any:
    """Convert as cyclopts does, but do not round a fraction to an integer, and do not take an empty value for none."""
    refuse_empty(tokens)
    for token in tokens:
        if int in (kind, *get_args(kind)) and "." in token.value and not float(token.value).is_integer():
            raise ValueError(f"{token.value} is not an integer; give one")
    return convert(kind, tokens)


app = App(
    name="everyformer",
    help="Train, evaluate, compare and inspect the Transformer family. Start with: everyformer demo",
    help_format="plaintext",
    version=__version__,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(converter=convert_exactly, negative_iterable=()),
)
for command, first in ((plan, "MEMBER"), (train, "MEMBER"), (resume, "RUN")):
    app.command(command, usage=f"Usage: everyformer {command.__name__} [OPTIONS] {first} [SETTING=VALUE...]")
app.command(compare, usage="Usage: everyformer compare [OPTIONS] MEMBER... [SETTING=VALUE...]")
app.command(tune, usage="Usage: everyformer tune [OPTIONS] MEMBER [SETTING=VALUE...]")
app.command(evaluate)
app.command(generate)
app.command(predict)
app.command(embed)
app.command(export)
app.command(import_model, name="import")
app.command(serve)
app.command(explore, usage="Usage: everyformer explore [OPTIONS] [RUN...]")
app.command(family, usage="Usage: everyformer family [OPTIONS] [MEMBER]")
app.command(show)
app.command(data, usage="Usage: everyformer data [OPTIONS] [NAME]")
app.command(contracts, usage="Usage: everyformer contracts [OPTIONS] [MEMBER]")
app.command(bench)
app.command(demo)
app.command(settings)
app.command(completion)
app.command(complete(app), name="complete", show=False)
app.command(work, show=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode prints ? instead
    try:
        imported.clear()
        code = app(
            sys.argv[1:] if arguments is None else arguments, console=Console()
        )  # of the width that is there now
        sys.stdout.flush()
        return int(code or 0)
    except BrokenPipeError:  # as after `| head -1`
        discard_output()
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("stopped; everyformer resume continues a run from its last checkpoint\n")
        return 130
    except (ValueError, OSError, MemoryError, RuntimeError, ImportError, SystemError) as error:
        message = str(error)
        if isinstance(
            error, UnicodeEncodeError
        ):  # a word of the command line with other bytes, which Python reads as surrogates
            message = f"{error.object[:80]!r} is not text in UTF-8; give a text in UTF-8"
        elif not isinstance(error, ValueError) and is_out_of_memory(error):
            message = f"out of memory{amount_requested(error)}; raise the limit (ulimit -v), or choose a smaller model"
        elif not isinstance(error, ValueError | OSError):
            raise
        sys.stdout.flush()
        if isinstance(error, PermissionError) and error.filename is not None:
            message = f"cannot use {error.filename} ({error.strerror}); choose another path, or change its permissions"
        write_error(message)
        return 2
