"""From a request to what is frozen: opens the data, makes the entries equal, measures a few steps, and decides how long runs are."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from everyformer.network.size import parameters_without_embeddings
from everyformer.study.compare.frozen import (
    LEAST,
    SHARES,
    Entry,
    Frozen,
    Row,
    code_hash,
)
from everyformer.study.compare.jobs import search_runs
from everyformer.study.compare.match import model_of, quantity, width_settings
from everyformer.study.compare.request import EntryRequest, Request, RowRequest
from everyformer.study.compare.search import trials
from everyformer.study.plan import Plan, plan
from everyformer.task.table import task_for
from everyformer.task.task import MAX_TARGETS, Task, TaskData
from everyformer.train.provenance import provenance
from everyformer.train.recipe import Recipe

EVALUATIONS = 8  # in a run; also the number of its checkpoints
LEAST_STEPS = 16
LEAST_ROWS, MOST_ROWS = 16, 200  # examples of an evaluation during training
START = 1.5  # seconds that a job takes besides its steps and evaluations
EVALUATING = 0.2  # share of the time of the steps that evaluations during training take, at most
FINAL = 0.1  # share that the final evaluation takes, and the one on the test split
OVERLAP = (
    2 / 3
)  # the time of evaluating a row, of that of training on one: a forward pass over windows that overlap by half
WIDER = 0.5  # trials beyond the range that a budget allows for each entry
SPARE = 0.85  # of a budget that is planned


@dataclass(frozen=True)
class Candidate:
    """An entry whose steps are not decided yet."""

    request: EntryRequest
    words: tuple[str, ...]  # settings of the command line
    recipe: Recipe
    data: TaskData
    planned: Plan
    mismatch: tuple[tuple[str, float], ...] = ()

    @property
    def seconds(self) -> float:
        assert self.planned.seconds is not None
        return self.planned.seconds

    @property
    def tokens(self) -> int:
        """Of a step, at most: rows times the context, or its targets where rows are no tokens."""
        context, batch = self.data.context, self.recipe.run.batch
        return self.planned.targets if context is None else context * batch


def freeze(request: Request, workers: int) -> Frozen:
    """Returns what is fixed before the first run. Raises ValueError if the request is not possible."""
    rows = [[*_candidates(request, row)] for row in request.rows]
    whole = (
        rows if request.budget is None else [[one for row in rows for one in row]]
    )  # a budget is for all rows together
    lengths = {key: steps for some in whole for key, steps in _lengths(request, some, workers).items()}
    given = request.entries[0].settings
    seed = next((int(one.partition("=")[2]) for one in reversed(given) if one.startswith("run.seed=")), 0)
    facts = provenance(seed)
    names = _row_names(request)
    frozen_rows = [
        _row(request, asked, name, [(one, lengths[id(one)]) for one in row])
        for asked, name, row in zip(request.rows, names, rows, strict=True)
    ]
    return Frozen(
        request=request,
        rows=tuple(frozen_rows),
        seeds=tuple(range(seed + 1, seed + 1 + request.seeds)),
        search_seed=seed,
        code=code_hash(request.imports),
        commit=facts["commit"],
        machine=facts["machine"],
        versions=facts["versions"],
    )


def _candidates(request: Request, row: RowRequest) -> list[Candidate]:
    """The entries on one data set, made equal to the baseline."""
    named = {entry.name: entry for entry in request.entries}
    base = named[request.baseline]
    tasks: dict[str, Task] = {}
    for entry in request.entries:
        with _errors_of(entry):
            tasks[entry.name] = task_for(entry.member, entry.size, request.task, row.data)
    for name, task in tasks.items():
        if type(task) is not type(tasks[base.name]):
            kinds = [type(one).__name__.lower() for one in (tasks[base.name], task)]
            raise ValueError(
                f"{base.name} has the task {kinds[0]} and {name} the task {kinds[1]}; give one with --task, or other members"
            )
    common = _common(request, row, base)
    words = {name: (*common, *row.settings, *entry.settings) for name, entry in named.items()}
    opened = {name: _open(request, row, entry, words[name]) for name, entry in named.items()}
    for name in named:
        _check_same_measure(base.name, *opened[base.name], name, *opened[name])
    matches = [match for match in request.match if match in ("parameters", "flops", "memory")]
    with _errors_of(base):
        target = {match: quantity(match, *opened[base.name]) for match in matches}
    found = []
    for name, entry in named.items():
        recipe, data = opened[name]
        for match in matches if name != base.name else ():
            with _errors_of(entry):
                words[name] = (*words[name], *width_settings(match, recipe, data, target[match]))
            recipe, data = _open(request, row, entry, words[name])
        with _errors_of(entry):
            mismatch = tuple((match, quantity(match, recipe, data) / target[match] - 1) for match in matches)
            planned = plan(recipe, measure=True)  # measures a few steps
            if not planned.fits:
                raise ValueError(
                    f"it does not fit into the memory: {planned.lines()['memory']}; give a smaller --size or batch"
                )
        found.append(Candidate(entry, words[name], recipe, data, planned, mismatch))
    return found


@contextmanager
def _errors_of(entry: EntryRequest) -> Iterator[None]:
    """Errors inside begin with the name of the entry."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{entry.name}: {error}") from error


def _common(request: Request, row: RowRequest, base: EntryRequest) -> tuple[str, ...]:
    """Settings that all entries share because the baseline has them: a test split, and the tokens that are read at once."""
    given = (*row.settings, *base.settings)
    recipe, data = _open(request, row, base, given)
    fields, common = getattr(recipe.task, "__struct_fields__", ()), tuple[str, ...]()
    if "test" in fields and "test" not in data.fingerprints:
        common = (f"task.test={recipe.task.valid:g}",)  # type: ignore[attr-defined]
    if "context" in fields and data.context is not None:
        common = (*common, f"task.context={data.context}")
    return common


def _open(request: Request, row: RowRequest, entry: EntryRequest, words: tuple[str, ...]) -> tuple[Recipe, TaskData]:
    with _errors_of(entry):
        recipe = Recipe.of(entry.member, *words, size=entry.size, data=row.data, task=request.task)
        if recipe.data == "-":
            raise ValueError(
                "a comparison reads its data many times; write standard input to a file and give that as --data"
            )
        data = recipe.task.open(recipe.data)
        model_of(recipe, data)
    return recipe, data


def _check_same_measure(
    base: str, recipe: Recipe, data: TaskData, name: str, other: Recipe, other_data: TaskData
) -> None:
    """Raises ValueError if the figures of two entries could not be compared."""
    metrics = [one.fit(model_of(r, one)).objective.metric for r, one in ((recipe, data), (other, other_data))]
    if metrics[0] != metrics[1]:
        raise ValueError(f"{base} is measured in {metrics[0]} and {name} in {metrics[1]}; give them one tokenizer")


def _lengths(request: Request, candidates: list[Candidate], workers: int) -> dict[int, int]:
    """The steps of each entry, by its identity."""
    by_steps = next((match for match in request.match if match in ("training-flops", "seconds")), None)
    first = next(one for one in candidates if one.request.name == request.baseline)

    def unit(one: Candidate) -> float:  # what a step uses of what is to be equal
        return {"training-flops": float(one.planned.flops), "seconds": one.seconds}.get(by_steps or "", 1.0)

    if request.budget is None:
        whole = first.recipe.run.steps * unit(first)
    else:
        runs = search_runs(request.trials, SHARES, LEAST) + request.seeds + WIDER * (request.trials > 1)
        jobs = request.seeds + len(SHARES) * request.trials * 0.6
        most = len(candidates) * max(1, request.trials)  # workers that have something to do
        left = SPARE * request.budget * min(workers, most) - jobs * START * len(candidates)
        whole = left / (runs * (1 + EVALUATING + 2 * FINAL) * sum(one.seconds / unit(one) for one in candidates))
    lengths = {id(one): int(whole / unit(one)) for one in candidates}
    if request.budget is not None:
        lengths = {key: steps // EVALUATIONS * EVALUATIONS for key, steps in lengths.items()}
        if min(lengths.values()) < LEAST_STEPS:
            raise ValueError(
                f"a budget of {request.budget:.0f} s leaves fewer than {LEAST_STEPS} steps for a run; raise it, or lower --trials, "
                "--seeds or the size of the models"
            )
    return lengths


def _row(request: Request, asked: RowRequest, name: str, candidates: list[tuple[Candidate, int]]) -> Row:
    first = next(one for one, _ in candidates if one.request.name == request.baseline)
    objective = first.data.fit(model_of(first.recipe, first.data)).objective
    prints = first.data.fingerprints
    split = "test" if "test" in prints or "valid" not in prints else "valid"
    return Row(
        name=name,
        data=asked.data,
        metric=objective.metric,
        higher_is_better=objective.higher_is_better,
        split=split,
        fingerprints=prints,
        notes=()
        if split == "test"
        else ("the data have no test split: the figures are of the split that chose the trials",),
        entries=tuple(_entry(request, asked, one, steps, _rows(candidates)) for one, steps in candidates),
    )


def _rows(candidates: list[tuple[Candidate, int]]) -> tuple[int, int]:
    """The examples of an evaluation during training and of the final one: equal for all entries, and a small part of the shortest run."""
    trained = min(one.recipe.run.batch * steps for one, steps in candidates) / OVERLAP
    tokens = max(one.tokens // one.recipe.run.batch for one, _ in candidates)
    often = max(LEAST_ROWS, min(MOST_ROWS, int(EVALUATING * trained / EVALUATIONS)))
    return often, max(often, min(math.ceil(MAX_TARGETS / max(1, tokens)), int(FINAL * trained)))


def _entry(request: Request, asked: RowRequest, one: Candidate, steps: int, rows: tuple[int, int]) -> Entry:
    """The entry with its final number of steps, on which its warm-up, evaluations and checkpoints depend."""
    every = max(1, steps // EVALUATIONS)
    own = (
        f"run.evaluate={every}",
        f"run.save={every}",
        "run.keep=1",
        "run.sample=false",
        f"run.examples={rows[0]}",
        f"run.final_examples={rows[1]}",
    )
    words = (*own, *one.words, f"run.steps={steps}")  # settings of the user replace those that are chosen here
    words = tuple({word.partition("=")[0]: word for word in words}.values())
    options = {"--size": one.request.size, "--data": asked.data, "--task": request.task}
    recipe = Recipe.of(one.request.member, *words, size=one.request.size, data=asked.data, task=request.task)
    if request.trials > 1 and not recipe.run.evaluate:
        raise ValueError(
            f"{one.request.name}: run.evaluate is 0, but evaluations choose among trials; leave it out, or give --trials 1"
        )
    model = model_of(recipe, one.data)
    given = [word for name, text in options.items() if text for word in (name, text)]
    return Entry(
        name=one.request.name,
        recipe=recipe,
        command=(one.request.member, *given, *(x for name in request.imports for x in ("--import", name)), *words),
        trials=trials(recipe, model, request.trials, one.request.search),
        parameters=max(1, parameters_without_embeddings(model)),
        flops=max(1, one.planned.flops),
        tokens=one.tokens,
        memory=one.planned.memory,
        seconds=one.seconds,
        mismatch=one.mismatch,
    )


def _row_names(request: Request) -> list[str]:
    """A name of each row that can be that of a folder."""
    paths = [(row.data or "embedded").rstrip("/").rpartition("/")[2] for row in request.rows]
    names = [re.sub(r"[^\w-]+", "-", re.sub(r"\.\w+$", "", path)) or "data" for path in paths]
    seen = Counter[str]()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return result
