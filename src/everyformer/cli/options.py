"""Options that several commands have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from cyclopts import Parameter, Token

MAY_BE_EMPTY = ("--prompt", "--text")  # whether a text may be empty follows from the task


def refuse_empty(tokens: Sequence[Token]) -> None:
    """Raises ValueError if an option has the empty value, such as that of a shell's variable that is not set."""
    for token in tokens:
        if token.value == "" and token.keyword is not None and token.keyword not in MAY_BE_EMPTY:
            raise ValueError("it is empty; give a value, or leave the option out")


def number_or(word: str, number: str) -> Callable[[Any, Sequence[Token]], Any]:
    """Returns a converter of an option that is a number or one word."""

    def convert(kind: Any, tokens: Sequence[Token]) -> int | str:
        refuse_empty(tokens)
        given = tokens[0].value
        if given == word:
            return word
        if given.removeprefix("-").isdigit():
            return int(given)
        if given.isalpha():
            raise ValueError(f"{given} is neither {number} nor {word}; did you mean {word}?")
        raise ValueError(f"{given} is not an integer; give one, or {word}")

    return convert


AsJson = Annotated[bool, Parameter("--json", negative=(), show_default=False, help="Print JSON.")]
Device = Annotated[str, Parameter(help="cpu, cuda or auto.")]
Step = Annotated[
    int | Literal["best"] | None,
    Parameter(
        help="The checkpoint, a number or best. Default: the last one.",
        show_choices=False,
        converter=number_or("best", "a step"),
    ),
]
Limit = Annotated[int | Literal["all"] | None, Parameter(show_choices=False, converter=number_or("all", "a number"))]
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
Published = Annotated[
    Literal["paper"] | None,
    Parameter(
        show_choices=False, help="paper: the settings that the member's authors published; your own come after them."
    ),
]
