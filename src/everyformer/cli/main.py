"""The entry point: reads the verb, and turns what goes wrong into one line and an exit code.

Exit codes: 0 done, also where Ctrl-C left nothing out but the last evaluation; 1 a contract is broken or was named and not checked, or the
reader of a pipe has gone; 2 a wrong name, number or option; 130 stopped by Ctrl-C, 143 by SIGTERM, though the run is saved.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any, get_args

from cyclopts import App, Parameter, Token, convert

from everyformer import __version__
from everyformer.cli.bench import bench
from everyformer.cli.contracts import contracts
from everyformer.cli.demo import demo
from everyformer.cli.evaluate import evaluate
from everyformer.cli.family import family
from everyformer.cli.generate import generate
from everyformer.cli.plan import plan
from everyformer.cli.show import show
from everyformer.cli.terminal import to_nowhere
from everyformer.cli.train import resume, train

# Threads that wait let others work: beside another program a spinning one makes each step several times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is first imported, which is later


def exactly(kind: Any, tokens: Sequence[Token]) -> Any:
    """What cyclopts makes of words, but a fraction is not rounded to a whole number."""
    for token in tokens:
        if int in (kind, *get_args(kind)) and "." in token.value and not float(token.value).is_integer():
            raise ValueError(f"{token.value} is not a whole number; give one")
    return convert(kind, tokens)


app = App(
    name="everyformer",
    help="Every Transformer of the family as a short value over one small proven core. Begin with: everyformer demo",
    help_format="plaintext",
    version=__version__,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(converter=exactly),
)
app.command(plan)
app.command(train)
app.command(resume)
app.command(evaluate)
app.command(generate)
app.command(family)
app.command(show)
app.command(contracts)
app.command(bench)
app.command(demo)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and give its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows ? and goes on
    try:
        code = app(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return int(code or 0)
    except BrokenPipeError:  # as after `| head -1`
        to_nowhere()
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("stopped at once; a run that has a checkpoint goes on from it with resume\n")
        return 130
    except (ValueError, OSError) as error:
        sys.stdout.flush()
        said = str(error)
        if isinstance(error, PermissionError) and error.filename is not None:
            said = f"cannot use {error.filename} ({error.strerror}); choose another place, or make it yours to read and write"
        sys.stderr.write(f"error: {' '.join(said.split())}\n")  # in one piece: other processes write there too
        return 2
