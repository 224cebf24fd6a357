"""What a comparison fixes before its first run: `compare.json` in its folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import everyformer
from everyformer.study.compare.request import Request
from everyformer.train.checksums import write_file
from everyformer.train.recipe import Recipe
from everyformer.value import Count, Few, Positive, Value, from_json, to_json

FILE = "compare.json"
SHARES = (0.25, 0.5, 1.0)  # of the steps, after which the worse half of the trials ends
LEAST = 2  # trials that go on to the end
MAX_WIDER = 3  # trials beyond the range of an entry

Settings = tuple[str, ...]  # path=value


class Entry(Value, frozen=True, kw_only=True):
    """One line of a table, and everything that its runs follow from."""

    name: str
    recipe: Recipe  # of all runs, apart from the settings of the trial and the seed
    command: Settings  # the words of `everyformer train` for this recipe
    trials: tuple[Settings, ...]  # the first one is the default
    parameters: int  # without embeddings
    flops: int  # of a training step
    tokens: int  # of a training step
    memory: int  # planned, in bytes
    seconds: Positive  # of a training step, as measured before the first run
    mismatch: tuple[tuple[str, float], ...] = ()  # what was to be equal, and its share above or below the baseline

    @property
    def steps(self) -> int:
        return self.recipe.run.steps

    def until(self, share: float) -> int:
        """The step after which a share of the run is done."""
        return max(1, round(share * self.steps))


class Row(Value, frozen=True, kw_only=True):
    """All entries on one data set."""

    name: str
    data: str | None
    metric: str
    higher_is_better: bool
    split: str  # that the final figures are of
    fingerprints: dict[str, str]  # of the splits of the data
    notes: tuple[str, ...]
    entries: tuple[Entry, ...]

    def entry(self, name: str) -> Entry:
        return next(entry for entry in self.entries if entry.name == name)


class Frozen(Value, frozen=True, kw_only=True):
    """Everything that decides the result of a comparison."""

    request: Request
    rows: tuple[Row, ...]
    seeds: tuple[Count, ...]  # of the final runs
    search_seed: Count  # of the trials
    shares: tuple[float, ...] = SHARES
    wider: Count = MAX_WIDER
    least: Few = LEAST
    code: str  # hash of the library and of the imported parts
    commit: str
    machine: str
    versions: str

    @property
    def baseline(self) -> str:
        return self.request.baseline


def write(frozen: Frozen, folder: Path) -> bool:
    """Write compare.json, unless there is one. Returns whether it was written."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{FILE}.{os.getpid()}"
    write_file(part, (to_json(frozen) + "\n").encode())
    try:
        os.link(part, folder / FILE)  # never replaces: of two commands that start at once, one wins
    except FileExistsError:
        return False
    finally:
        part.unlink()
    return True


def read(folder: Path) -> Frozen:
    """Raises ValueError if the folder has no comparison."""
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {FILE}; give the folder of a comparison, or members to start one")
    try:
        return from_json(path.read_text(), Frozen)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}); restore the file that compare wrote") from None


RUNS = ("*.py", *(f"{name}/**/*.py" for name in ("attention", "network", "family", "data", "infer", "task", "train")))
SEARCH = ("jobs.py", "run_job.py")


def code_hash(imports: tuple[str, ...]) -> str:
    """The hash of the source that decides what runs give, and of imported files."""
    root = Path(everyformer.__file__).parent
    digest = hashlib.sha256()
    paths = sorted({path for pattern in RUNS for path in root.glob(pattern)})
    paths += [Path(__file__).with_name(name) for name in SEARCH]
    files = [(str(path.relative_to(root)), path) for path in paths]
    for name, path in [*files, *((Path(name).name, Path(name)) for name in imports if name.endswith(".py"))]:
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
