"""The page of mutation testing, from its logs, and the list of mutants that change no result."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

EQUIVALENT = Path(__file__).parent / "equivalent_mutants.txt"
LEFT_OUT = ("attention/kernels/programs.py",)  # Triton programs: in its interpreter a test of one takes minutes
LOGGED = re.compile(r"^(killed|timeout|survived|unreached|equivalent) (\S+?):\d+ ")
PAGE = """# Mutation testing

Of the small errors that `bench/mutation.py` puts into the source one at a time, the tests notice the share that the last column
states. Written by `python -m bench.mutation --page` from {logs}, which begin with:

{facts}

The first log is a sample of all mutants, with the score {first}. The second one, if there is any, repeats those that survived, after
tests were added for them.

A mutant is a module with one changed comparison, operator, constant, condition, order of arguments or removed statement. It is killed
if a test that reaches it fails or takes far longer than usual; its tests run until their usual time adds up to a few seconds, so one
that survives may still fail a test that was not run. `bench/equivalent_mutants.txt` lists mutants that change no result, with the
reason; most change only the speed, or an error message. The Triton programs are left out: in the interpreter a test of one takes
minutes. Code that only a GPU runs is reached by no test here; `tests/device` has its tests.

{table}

## The {count} mutants that no test noticed

{alive}
"""


def equivalent() -> list[str]:
    """The mutants that change no result, as the file lists them: a line `key`, or the beginning of keys and a *, then indented lines
    with the reason."""
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith((" ", "#"))]


def is_listed(key: str, known: list[str]) -> bool:
    return any(key.startswith(one[:-1]) if one.endswith("*") else key == one for one in known)


def page(log: Path) -> str:
    """docs/results/mutation.md, from a log, and from a second one, if there is any, of its survivors after tests were added."""
    again = log.with_stem(f"{log.stem}_again")
    logs = [one.read_text(encoding="utf-8").splitlines() for one in (log, again) if one.exists()]
    facts = [[line for line in lines if line.startswith("# ") or " mutants in " in line] for lines in logs]
    last = outcomes(logs)
    alive = sorted(mutant for mutant, outcome in last.items() if outcome in ("survived", "unreached"))
    return PAGE.format(
        logs=" and ".join(f"[{one.name}](logs/{one.name})" for one in (log, again) if one.exists()),
        facts="\n\n".join("\n".join(f"    {line}" for line in lines) for lines in facts),
        first=table(outcomes(logs[:1])).splitlines()[-1].split("|")[-2].strip(),
        table=table(last),
        count=len(alive),
        alive="\n".join(f"    {mutant}" for mutant in alive),
    )


def outcomes(logs: list[list[str]]) -> dict[str, str]:
    """The last outcome of each mutant of the first log. What is equivalent is so whatever the log says."""
    found: dict[str, str] = {}
    known = equivalent()
    for number, lines in enumerate(logs):
        for line in lines:
            if line.startswith("gone "):  # the source, or what is mutated, has changed
                found.pop(line.removeprefix("gone "), None)
            if (match := LOGGED.match(line)) and match[2] not in LEFT_OUT:
                key = f"{match[2]} {line.split(' ', 2)[2]}"
                if number == 0 or key in found:
                    listed = match[1] in ("survived", "unreached") and is_listed(key, known)
                    found[key] = "equivalent" if listed else match[1]
    return found


def table(found: dict[str, str]) -> str:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant, outcome in found.items():
        for name in (mutant.partition(" ")[0].rpartition("/")[0], "all"):
            counts[name][outcome] += 1
    rows = ["| modules | tested | killed | equivalent | survived | reached by no test | score |", "| --- " * 7 + "|"]
    for name in sorted(counts, key=lambda name: (name == "all", name)):
        count = counts[name]
        killed, tested = count["killed"] + count["timeout"], count.total()
        score = 100 * killed / max(1, tested - count["equivalent"])
        cells = (name, tested, killed, count["equivalent"], count["survived"], count["unreached"], f"{score:.1f} %")
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)
