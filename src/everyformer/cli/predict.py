"""`everyformer predict`: the classes, numbers or translations of new examples, as a table."""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from everyformer.cli.options import Device, Step
from everyformer.cli.own_parts import Imports, import_parts
from everyformer.cli.terminal import console, next_command

if TYPE_CHECKING:
    from everyformer.train.trained import TrainedRun

CHUNK = 256  # examples that are read, predicted and written at a time
FORMATS = (".csv", ".tsv", ".jsonl", ".txt")


def predict(
    run: Path,
    /,
    *,
    data: Annotated[str, Parameter(allow_leading_hyphen=True)] = "-",
    out: Path | None = None,
    column: str | None = None,
    limit: int | None = None,
    step: Step = None,
    device: Device = "auto",
    imports: Imports = (),
) -> int:
    """Predict the classes, numbers or translations of new examples.

    Parameters
    ----------
    run
        The folder of a run.
    data
        Records (.csv, .tsv, .jsonl, .json, .parquet), a text file with one example per line, an image, a folder of
        images, texts or records, the JSON file of a graph, or - for the lines of standard input.
    out
        The table to write: .csv, .tsv or .jsonl with the columns of the data and the predictions, or .txt with the
        predictions alone. Default: CSV on standard output.
    column
        The column of records with the input. Default: as in training.
    limit
        The number of examples. Default: all.
    """
    import_parts(imports, run)
    from everyformer.train.trained import load

    if out is not None and out.suffix.lower() not in FORMATS:
        raise ValueError(f"--out {out} is not a table; give a file that ends in {', '.join(FORMATS)}")
    if out is not None and not out.expanduser().parent.is_dir():
        raise ValueError(f"--out {out} is in a folder that does not exist; create it, or give another file")
    if out is not None and out.exists() and data != "-" and out.resolve() == Path(data).expanduser().resolve():
        raise ValueError(f"--out {out} is the file with the data, which would be lost; give another file")
    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit} is less than 1; give the number of examples to predict")
    trained = load(run, step=step, device=device, data=False)
    count = _predict(trained, data, column, out, limit)
    if out is not None:
        screen = console()
        screen.print(f"{count:,} prediction{'s' * (count != 1)}: {out}")
        next_command(screen, "evaluate", run)
    return 0


def _predict(trained: TrainedRun, data: str, column: str | None, out: Path | None, limit: int | None) -> int:
    """Predict in chunks and write each at once. Returns the number of predictions."""
    inputs, count = trained.task.inference.read_inputs(data, column), 0
    total = inputs.total if limit is None or inputs.total is None else min(limit, inputs.total)
    rows = islice(inputs.rows, limit)
    first = list(islice(rows, 1))
    if not first:
        raise ValueError(f"{inputs.name} has no examples; give at least one")
    nodes = iter(trained.predict(data).rows()) if trained.task.inference.takes_graph else None
    with _table(out) as write, _progress(total, to_terminal=out is None and sys.stdout.isatty()) as advance:
        every = chain(first, rows)
        while chunk := list(islice(every, CHUNK)):
            predicted = islice(nodes, len(chunk)) if nodes else trained.predict([one for _, one in chunk]).rows()
            for (cells, _), prediction in zip(chunk, predicted, strict=True):
                write(cells | prediction)
            count += len(chunk)
            advance(len(chunk))
    return count


@contextmanager
def _table(out: Path | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that writes a row. A file gets its name only when it is complete."""
    if out is None:
        yield _row_writer(sys.stdout, ".csv")
        return
    part = out.with_name(f"{out.name}.part")
    try:
        with part.open("w", encoding="utf-8", newline="") as file:
            yield _row_writer(file, out.suffix.lower())
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def _row_writer(file: TextIO, suffix: str) -> Callable[[dict[str, Any]], None]:
    """Returns a function that writes a row in a format. The columns of a table are those of its first row."""
    columns: list[str] = []
    writer = csv.writer(file, lineterminator="\n")

    def line(cells: Sequence[Any]) -> None:
        texts = [cell if isinstance(cell, str) else "" if cell is None else _as_text(cell) for cell in cells]
        if suffix == ".csv":
            writer.writerow(texts)
        else:  # TSV has no quotes, so a cell can have no tab and no line end
            file.write("\t".join(" ".join(text.splitlines()).replace("\t", " ") for text in texts) + "\n")

    def write(row: dict[str, Any]) -> None:
        if suffix == ".jsonl":
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            return
        if suffix == ".txt":
            line([row["prediction"]])
            return
        if not columns:
            columns.extend(row)
            line(columns)
        line([row.get(name) for name in columns])

    return write


def _as_text(cell: Any) -> str:
    return json.dumps(cell, ensure_ascii=False, default=str) if isinstance(cell, list | dict) else str(cell)


@contextmanager
def _progress(total: int | None, to_terminal: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that counts examples: on a bar in a terminal, unless the predictions appear there, else in lines of text."""
    screen = Console(stderr=True, highlight=False)
    if screen.is_terminal:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("examples"), TimeRemainingColumn())
        with Progress(*columns, console=screen, transient=True, disable=to_terminal) as bar:
            task = bar.add_task("", total=total)
            yield lambda count: bar.advance(task, count)
        return
    from everyformer.train.progress import EVERY

    done, last = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        if time.monotonic() - last > EVERY:
            last = time.monotonic()
            sys.stderr.write(f"{done:,} of {total:,} examples\n" if total else f"{done:,} examples\n")

    yield advance
