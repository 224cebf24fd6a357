"""`everyformer.tune`: finds a learning rate in a few short runs, by the search of a comparison with one entry."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from everyformer.study.compare.api import make_request, run
from everyformer.study.compare.frozen import Settings
from everyformer.study.compare.jobs import rate
from everyformer.study.compare.request import Request, absolute_data
from everyformer.study.compare.table import Line, replaced
from everyformer.train.recipe import Recipe

OUT = "runs/tune"
SHORTER = 4  # times, than the run that is tuned for
LEAST_STEPS = 16
WARMUP = "optim.warmup"


@dataclass(frozen=True)
class Tuned:
    """The result of `tune`: `isinstance(tune("gpt2", "run.steps=2000", size="tiny", data="my.txt"), Tuned)`.

    `settings` were found for a run of the whole length, which `command` trains; `line` has the trials with their curves, each of
    `steps` steps, and `folder` their runs.
    """

    folder: Path
    line: Line
    settings: Settings
    command: str
    steps: int

    @property
    def rate(self) -> float:
        """The learning rate that was found."""
        return rate(self.settings)[1]


def tune(
    member: str,
    *settings: str,
    data: str | Path | None = None,
    size: str | None = None,
    task: str | None = None,
    trials: int = 5,
    search: Sequence[str] = (),
    imports: Sequence[str | Path] = (),
    out: str | Path = OUT,
    workers: int | None = None,
    progress: bool = False,
) -> Tuned:
    """Find a learning rate: `tune("gpt2", "run.steps=2000", size="tiny", data="my.txt").rate`.

    `member`, the settings, `data`, `size`, `task` and `imports` are those of the run that is tuned for. Each of the `trials` is a run
    with other settings on a quarter of its steps; `search` names more settings to try. With the same `out` an interrupted search
    continues. `workers` and `progress` are as in `compare`. Returns a `Tuned`, with the rate and the command of that run.
    """
    request, whole, short = tuning_request(
        member, *settings, data=data, size=size, task=task, trials=trials, search=search, imports=imports
    )
    comparison = run(request, Path(out), workers, progress)
    (line,) = comparison.lines
    if line.chosen is None:
        raise ValueError(f"no trial came to its end: {'; '.join(line.reasons)}; give a lower optim.lr to start from")
    found = tuple(_lengthened(setting, whole / short) for setting in line.chosen)
    options = {"--size": size, "--data": absolute_data(None if data is None else str(data)), "--task": task}
    words = [member, *(word for name, text in options.items() if text for word in (name, text))]
    words += [word for name in imports for word in ("--import", str(name))]
    command = shlex.join(["everyformer", "train", *replaced((*words, *settings), found)])
    return Tuned(comparison.folder, line, found, command, short)


def tuning_request(
    member: str,
    *settings: str,
    data: str | Path | None,
    size: str | None,
    task: str | None,
    trials: int,
    search: Sequence[str],
    imports: Sequence[str | Path],
) -> tuple[Request, int, int]:
    """The request of a search, the steps of the run that is tuned for, and those of a trial."""
    if trials < 2:
        raise ValueError(f"trials is {trials}; a search needs at least 2")
    whole = Recipe.of(member, *settings, size=size, data=data, task=task).run.steps
    short = max(min(whole, LEAST_STEPS), whole // SHORTER)
    words = (member, *replaced(settings, (f"run.steps={short}",)))
    request = make_request(
        words, data=data, size=size, task=task, match="none", trials=trials, seeds=0, search=search, imports=imports
    )
    return request, whole, short


def _lengthened(setting: str, times: float) -> str:
    """A setting of a short run as that of a long one: the warm-up is so many times as long."""
    path, _, value = setting.partition("=")
    return f"{WARMUP}={math.ceil(int(value) * times)}" if path == WARMUP else setting
