"""The table of a comparison: a line for each entry, computed from what is frozen and from the outcomes."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from everyformer.study.compare.frozen import Entry, Frozen, Row, Settings
from everyformer.study.compare.jobs import Outcome, Outcomes, final_jobs, rate, state
from everyformer.study.compare.statistics import Interval, holm, interval, paired_p

Verdict = Literal["better", "worse", "inconclusive", "baseline", "failed"]
SIGNIFICANT = 0.05


@dataclass
class Line:
    """One entry on one data set."""

    row: Row
    entry: Entry
    chosen: Settings | None  # the settings of the best trial
    trials: list[tuple[Settings, list[Outcome]]]  # each with its outcomes, the longest last
    finals: dict[int, Outcome]  # by seed
    result: Interval | None = None
    difference: Interval | None = None  # to the baseline, of equal seeds
    p: float = math.nan  # corrected
    verdict: Verdict = "inconclusive"
    reasons: list[str] = field(default_factory=list)  # why runs diverged or failed

    @property
    def metrics(self) -> dict[int, float]:
        """The final figure of each seed that has one."""
        found = {seed: outcome["test"] for seed, outcome in self.finals.items() if outcome["status"] == "done"}
        return {seed: test[self.row.metric] for seed, test in found.items() if math.isfinite(test[self.row.metric])}

    @property
    def outcomes(self) -> list[Outcome]:
        """Of each run, as far as it came."""
        return [some[-1] for _, some in self.trials if some] + list(self.finals.values())

    def count(self, status: str) -> int:
        return sum(outcome["status"] == status for outcome in self.outcomes)

    def mean(self, name: str) -> float | None:
        """The mean of a fact over the final runs that came to their end."""
        values = [outcome[name] for outcome in self.finals.values() if outcome["status"] == "done"]
        return sum(values) / len(values) if values else None

    @property
    def memory(self) -> int:
        return max((outcome["memory"] for outcome in self.finals.values()), default=0)

    @property
    def command(self) -> str:
        """The command of a final run; another seed makes another one."""
        settings = (*(self.chosen or ()), *(f"run.seed={seed}" for seed in list(self.finals)[:1]))
        return shlex.join(["everyformer", "train", *replaced(self.entry.command, settings)])

    @property
    def rate(self) -> float | None:
        return rate(self.chosen)[1] if self.chosen else None


def replaced(words: Settings, settings: Settings) -> Settings:
    """The words of a command with other settings, each once."""
    paths = {setting.partition("=")[0] for setting in settings}
    return (*(word for word in words if word.partition("=")[0] not in paths), *settings)


def lines(frozen: Frozen, outcomes: Outcomes) -> list[Line]:
    """Returns the lines of all tables, in order."""
    found = [_line(frozen, row, entry, outcomes) for row in frozen.rows for entry in row.entries]
    p: dict[str, float] = {}
    for line in found:
        base = next(one for one in found if one.row is line.row and one.entry.name == frozen.baseline)
        if line is not base:
            common = [seed for seed in line.metrics if seed in base.metrics]
            differences = [line.metrics[seed] - base.metrics[seed] for seed in common]
            line.difference = interval(differences)
            p[_key(line)] = paired_p(differences)
    corrected = holm(p)
    for line in found:
        line.p = corrected.get(_key(line), math.nan)
        line.verdict = _verdict(line, line.entry.name == frozen.baseline)
    return found


def _key(line: Line) -> str:
    return f"{line.row.name} {line.entry.name}"


def _line(frozen: Frozen, row: Row, entry: Entry, outcomes: Outcomes) -> Line:
    now = state(frozen, row, entry, outcomes)
    trials = []
    for number, settings in enumerate(now.trials, 1):
        begin = f"{row.name}.{entry.name}.trial-{number}."
        some = {int(name.removeprefix(begin)): one for name, one in outcomes.items() if name.startswith(begin)}
        trials.append((settings, [some[until] for until in sorted(some)]))
    chosen = None if now.chosen is None else now.trials[now.chosen]
    jobs = [] if chosen is None else final_jobs(frozen, row, entry, chosen)
    finals = {seed: outcomes[job.name] for seed, job in zip(frozen.seeds, jobs, strict=False) if job.name in outcomes}
    line = Line(row, entry, chosen, trials, finals)
    line.result = interval(list(line.metrics.values()))
    ends = [(f"trial {number}", some[-1]) for number, (_, some) in enumerate(trials, 1) if some]
    ends += [(f"seed {seed}", outcome) for seed, outcome in finals.items()]
    line.reasons = [f"{name} {one['status']}: {one['reason']}" for name, one in ends if one["status"] != "done"]
    return line


def _verdict(line: Line, is_baseline: bool) -> Verdict:
    """Better or worse only if the corrected p says so and no final run is missing."""
    if not line.metrics:
        return "failed"
    if is_baseline:
        return "baseline"
    if line.difference is None or not line.p < SIGNIFICANT or len(line.metrics) < len(line.finals):
        return "inconclusive"
    return "better" if (line.difference.mean > 0) == line.row.higher_is_better else "worse"


HEAD = (
    "entry", "{metric}, {split}", "difference", "p", "verdict", "parameters", "FLOPs a token", "tokens", "seconds", "peak memory", "rate",
    "diverged",
)  # fmt: skip


def head(row: Row) -> list[str]:
    return [cell.format(metric=row.metric.replace("_", " "), split=row.split) for cell in HEAD]


def cells(line: Line) -> list[str]:
    """The cells of a line, as text."""
    entry, seconds = line.entry, line.mean("seconds")
    runs = f"{line.count('diverged')} of {len(line.outcomes)}" if line.outcomes else ""
    failed = line.count("failed")
    return [
        entry.name,
        plus_minus(line.result),
        "" if line.difference is None else plus_minus(line.difference, sign="+"),
        "" if math.isnan(line.p) else f"{line.p:.2g}",
        line.verdict,
        f"{entry.parameters:,}{_mismatch(entry, 'parameters')}",
        f"{entry.flops / entry.tokens:.3g}{_mismatch(entry, 'flops')}",
        f"{entry.steps * entry.tokens:,}",
        "" if seconds is None else f"{seconds:.3g}",
        f"{line.memory / 2**20:,.0f} MiB{_mismatch(entry, 'memory')}" if line.memory else "",
        "" if line.rate is None else f"{line.rate:g}",
        runs + (f", {failed} failed" if failed else ""),
    ]


def plus_minus(found: Interval | None, sign: str = "") -> str:
    """A mean with half its interval."""
    if found is None:
        return ""
    half = found.high - found.mean
    return f"{found.mean:{sign}.4f}" + ("" if math.isnan(half) else f" ± {half:.4f}")


def _mismatch(entry: Entry, name: str) -> str:
    share = dict(entry.mismatch).get(name, 0.0)
    return "" if abs(share) < 5e-4 else f" ({share:+.1%})"


def records(found: Sequence[Line]) -> list[dict[str, Any]]:
    """The lines as plain data, for records.jsonl."""
    return [_record(line) for line in found]


def _record(line: Line) -> dict[str, Any]:
    entry = line.entry
    return {
        "row": line.row.name, "entry": entry.name, "data": line.row.data, "metric": line.row.metric, "split": line.row.split,
        "parameters": entry.parameters, "flops_a_token": entry.flops / entry.tokens, "steps": entry.steps,
        "tokens": entry.steps * entry.tokens, "seconds": line.mean("seconds"), "peak_memory": line.memory,
        "mismatch": dict(entry.mismatch), "chosen": line.chosen, "values": {str(seed): value for seed, value in line.metrics.items()},
        **_interval("", line.result), **_interval("difference_", line.difference), "p": _finite(line.p), "verdict": line.verdict,
        "diverged": line.count("diverged"), "failed": line.count("failed"), "runs": len(line.outcomes), "reasons": line.reasons,
        "trials": [{"settings": settings, "curve": some[-1]["curve"] if some else [], "status": some[-1]["status"] if some else None}
                   for settings, some in line.trials],
        "curves": {str(seed): outcome["curve"] for seed, outcome in line.finals.items()}, "command": line.command,
    }  # fmt: skip


def _interval(prefix: str, found: Interval | None) -> dict[str, float | None]:
    names = ("mean", "low", "high")
    return {f"{prefix}{name}": None if found is None else _finite(getattr(found, name)) for name in names}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
