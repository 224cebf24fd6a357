"""Options that several commands have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

AsJson = Annotated[bool, Parameter("--json", negative=(), show_default=False, help="Print JSON.")]
Device = Annotated[str, Parameter(help="cpu, cuda or auto.")]
Step = Annotated[
    int | Literal["best"] | None,
    Parameter(help="The checkpoint, a number or best. Default: the last one.", show_choices=False),
]
RunData = Annotated[
    str | None,
    Parameter(
        allow_leading_hyphen=True,
        help="Where the data of the run are now, or other data. Default: the data that the run was trained on.",
    ),
]
Data = Annotated[
    str | None,
    Parameter(
        allow_leading_hyphen=True,  # - is standard input
        help="A file, a folder, the name of a data set, or - for standard input. "
        "Default: the data set embedded for the task.",
    ),
]
