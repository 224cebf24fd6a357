"""The page of mutation testing, from its logs, and the lists of mutants that no test notices."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from everyformer.train.provenance import read_header

EQUIVALENT = Path(__file__).parent / "equivalent_mutants.txt"  # they change no result
SURVIVING = Path(__file__).parent / "surviving_mutants.txt"  # they change a result
LOGS = Path(__file__).parent.parent / "docs" / "results" / "logs"
LEFT_OUT = ("attention/kernels/programs.py",)  # Triton programs: in its interpreter a test of one takes minutes
LOGGED = re.compile(r"^(killed|timeout|survived|unreached|equivalent) (\S+?):\d+ ")
UNEXPLAINED = "not explained"
PAGE = """# Mutation testing

Of the small errors that `bench/mutation.py` puts into the source one at a time, the tests of the time noticed {firsts}.
Then tests were added for those that had survived: of the same samples they notice {lasts}; {tested} errors in all.
Written by `python -m bench.mutation --page` from the logs below.

A mutant is a module with one changed comparison, operator, constant, condition, order of arguments or removed statement. It is killed
if a test that reaches it fails or takes far longer than usual; its tests run until their usual time adds up to a few seconds, so one
that survives may still fail a test that was not run. The score is killed / (tested - equivalent).

What is sampled: the modules of `attention`, `network` and `infer`, the objectives and targets of `task`, and optimizer, schedule and
gradient watch of `train`, that is the mathematics, the sampling, the metrics and the optimizer. One mutant of each module is drawn in
turn, so that small modules have the same weight as large ones. The samples with `core` in their names are all mutants of the modules that
their command names, but for those of the other samples: there every mutant was tested. These modules have the equations, the sampling, the
metrics and the optimizer. Of the fast kernels, of decoding, caches, agents and limits there is a sample only. Data, command line,
checkpoints and the rest of `train` are not mutated. The Triton programs are left out too: in the interpreter a test of one takes minutes.

`bench/equivalent_mutants.txt` lists each mutant that changes no result, with the reason: most change only the speed, or an error
message. `bench/surviving_mutants.txt` explains those that change a result and survive: they count against the score. Each line is one
mutant; none excuses the rest of a function. {checked}

{again}

{samples}
"""
AGAIN = """After tests were added, those that survived in a sample were run again; those that were killed were not ([{name}](logs/{name})):

{facts}"""
SAMPLE = """## The sample of {log}

Its log begins with:

{facts}

The score was {first} in the sample itself, and is {last} after tests were added and code was simplified.

{table}

{alive}

{equivalent}"""


def listed(file: Path) -> dict[str, str]:
    """The mutants of a list, each with its reason: a line with the mutant as the log has it, without its line number, then indented
    lines with the reason."""
    found: dict[str, str] = {}
    waiting: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            for key in waiting:
                found[key] = f"{found[key]} {line.strip()}".strip()
        elif line and not line.startswith("#"):
            if waiting and found[waiting[-1]]:
                waiting = []
            waiting.append(line)  # mutants that follow one another share a reason
            found[line] = ""
    return found


def page(logs: Path) -> str:
    """docs/results/mutation.md, from the logs of the samples and those of the mutants that survived and were run again."""
    again = sorted(logs.glob("mutation_again*.txt"), key=lambda log: read_header(log)["date"])  # a later run decides
    both = [(one, *again) for one in sorted(logs.glob("mutation*.txt")) if one not in again]
    found = [(outcomes(_lines(one[0])), outcomes(_lines(*one))) for one in both]
    return PAGE.format(
        firsts=_listed(f"{score(first)} of a sample of {len(first)}" for first, _ in found),
        lasts=_listed(score(last) for _, last in found),
        tested=f"{sum(len(last) for _, last in found):,}",
        checked=_checked(_lines(*again)),
        again="\n\n".join(AGAIN.format(name=one.name, facts=_facts(*_lines(one))) for one in again),
        samples="\n\n".join(_sample(*one) for one in both),
    )


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _lines(*logs: Path) -> list[list[str]]:
    return [one.read_text(encoding="utf-8").splitlines() for one in logs]


def _facts(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for line in lines if line.startswith("# ") or " mutants in " in line)


def _checked(logs: list[list[str]]) -> str:
    """How many mutants of the lists were applied, in or out of a sample, and how many of them no test noticed."""
    found: dict[str, str] = {}
    for lines in logs:
        found |= outcomes([lines])
    lists = listed(EQUIVALENT).keys() | listed(SURVIVING).keys()
    applied = [found[mutant] for mutant in lists if mutant in found]
    alive = sum(outcome not in ("killed", "timeout") for outcome in applied)
    return f"Of the {len(lists)} on both lists, {len(applied)} were applied, in or out of a sample: no test noticed {alive}."


def _sample(log: Path, *again: Path) -> str:
    logs = _lines(log, *again)
    last = outcomes(logs)
    reasons = listed(SURVIVING)
    alive = {
        mutant: reasons.get(mutant, UNEXPLAINED) for mutant, is_ in last.items() if is_ in ("survived", "unreached")
    }
    same = {mutant: listed(EQUIVALENT)[mutant] for mutant, is_ in last.items() if is_ == "equivalent"}
    return SAMPLE.format(
        log=f"[{log.name}](logs/{log.name})",
        facts=_facts(logs[0]),
        first=score(outcomes(logs[:1])),
        last=score(last),
        table=table(last),
        alive=_named(f"### The {len(alive)} mutants that no test notices", alive),
        equivalent=_named(f"### The {len(same)} mutants that change no result", same),
    )


def _named(title: str, mutants: dict[str, str]) -> str:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for mutant, reason in sorted(mutants.items()):
        by_reason[reason].append(mutant)
    return "\n\n".join(
        [title, *("\n".join((f"{reason}:\n", "```text", *found, "```")) for reason, found in by_reason.items())]
    )


def outcomes(logs: list[list[str]]) -> dict[str, str]:
    """The last outcome of each mutant of the first log. The list says which of those that survived are equivalent, not the log."""
    found: dict[str, str] = {}
    known = listed(EQUIVALENT)
    for number, lines in enumerate(logs):
        for line in lines:
            if line.startswith("gone "):  # the source, or what is mutated, has changed
                found.pop(line.removeprefix("gone "), None)
            if (match := LOGGED.match(line)) and match[2] not in LEFT_OUT:
                key = f"{match[2]} {line.split(' ', 2)[2]}"
                if number == 0 or key in found:
                    outcome = "survived" if match[1] == "equivalent" else match[1]
                    found[key] = "equivalent" if outcome in ("survived", "unreached") and key in known else outcome
    return found


def score(found: dict[str, str]) -> str:
    count = Counter(found.values())
    return f"{100 * (count['killed'] + count['timeout']) / max(1, len(found) - count['equivalent']):.1f} %"


def table(found: dict[str, str]) -> str:
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for mutant, outcome in found.items():
        for name in (mutant.partition(" ")[0].rpartition("/")[0], "all"):
            groups[name][mutant] = outcome
    rows = ["| modules | tested | killed | equivalent | survived | reached by no test | score |", "| --- " * 7 + "|"]
    for name in sorted(groups, key=lambda name: (name == "all", name)):
        count = Counter(groups[name].values())
        killed = count["killed"] + count["timeout"]
        cells = (
            name,
            count.total(),
            killed,
            count["equivalent"],
            count["survived"],
            count["unreached"],
            score(groups[name]),
        )
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)
