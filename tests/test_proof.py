"""Mutation testing finds the errors it is meant to, and the pages of measured claims are those of their logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import mutation, mutation_page
from bench.mutants import mutants, mutated

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = {"mutation": mutation_page.page}
MODULE = '''"""Text."""
LIMIT = 3

def f(a: int, b: list[int] = 1 + 1) -> int:
    """Text."""
    if a < b and not g(a, b):
        raise ValueError(f"{a} - {b}")
    self.x = -a
    return a + b
'''
EXPECTED = [
    (2, "constant", "3 -> 4 in LIMIT = 3"),
    (4, "arithmetic", "1 + 1 -> 1 - 1"),
    (4, "constant", "1 -> 2 in def f(a: int, b: list[int]=1 + 1) -> int:"),
    (4, "constant", "1 -> 2 in def f(a: int, b: list[int]=1 + 1) -> int: [2]"),
    (6, "boolean", "a < b and (not g(a, b)) -> a < b or not g(a, b)"),
    (6, "boolean", "a < b and (not g(a, b)) -> not (a < b and (not g(a, b)))"),
    (6, "comparison", "a < b -> a <= b"),
    (6, "boolean", "not g(a, b) -> g(a, b)"),
    (6, "swapped", "g(a, b) -> g(b, a)"),
    (7, "removed", "raise ValueError(f'{a} - {b}') -> (removed)"),
    (8, "removed", "self.x = -a -> (removed)"),
    (8, "arithmetic", "-a -> a"),
    (9, "arithmetic", "a + b -> a - b"),
]


def test_each_kind_of_mutant_is_made_once_and_is_a_program(tmp_path):
    (tmp_path / "module.py").write_text(MODULE)
    found = mutants(tmp_path, "module.py")
    assert [(mutant.line, mutant.kind, mutant.text) for mutant in found] == EXPECTED
    assert [mutant.imported for mutant in found] == [True] * 4 + [False] * 9
    for mutant in found:
        compile(mutated(tmp_path, mutant), "module.py", "exec")


def test_a_sample_takes_one_mutant_of_each_module_in_turn():
    every = {path: mutants(mutation.PACKAGE, path) for path in ("train/schedule.py", "infer/sample.py")}
    sample = mutation.sampled(every, seed=0)
    assert {mutant.path for mutant in sample[:2]} == set(every) and len(sample) == sum(map(len, every.values()))
    assert sample == mutation.sampled(every, seed=0) != mutation.sampled(every, seed=1)


def test_mutants_that_a_log_has_are_not_new(tmp_path):
    first, *others = mutants(mutation.PACKAGE, "network/norm.py")
    (tmp_path / "log.txt").write_text(f"killed {first}\n")
    assert mutation.untested([first, *others], [tmp_path / "log.txt"]) == others


def test_of_two_runs_of_a_mutant_the_later_one_counts(tmp_path):
    facts = "# command: c\n# commit: c\n# machine: m\n# versions: v\n# seed: 0\n# date: 2026-11-{} 01:00 UTC\n"
    for name, day, outcome in (("", 1, "survived"), ("_again_a", 20, "killed"), ("_again_b", 19, "survived")):
        (tmp_path / f"mutation{name}.txt").write_text(f"{facts.format(day)}{outcome} a.py:1 f: 1 -> 2\n")
    assert "they notice 100.0 %; 1 errors in all" in mutation_page.page(tmp_path)


def test_every_equivalent_mutant_has_a_module_and_a_reason():
    """Each is one mutant: none excuses the rest of a function."""
    for file in (mutation_page.EQUIVALENT, mutation_page.SURVIVING):
        for mutant, reason in mutation_page.listed(file).items():
            assert mutant.split(" ", 1)[0] in mutation.modules() and " -> " in mutant and len(reason) > 10, mutant


def test_a_listed_mutant_counts_as_equivalent_unless_a_test_notices_it(tmp_path, monkeypatch):
    (tmp_path / "list.txt").write_text(
        "a.py f: 1 -> 2\na.py g: 1 -> 2\n  They change\n  nothing.\n\na.py h: 1 -> 2\n  Nor this.\n"
    )
    monkeypatch.setattr(mutation_page, "EQUIVALENT", tmp_path / "list.txt")
    assert mutation_page.listed(tmp_path / "list.txt") == {
        "a.py f: 1 -> 2": "They change nothing.",
        "a.py g: 1 -> 2": "They change nothing.",
        "a.py h: 1 -> 2": "Nor this.",
    }
    log = [
        "killed a.py:1 f: 1 -> 2",
        "survived a.py:2 g: 1 -> 2",
        "equivalent a.py:3 i: 1 -> 2",
        "survived a.py:4 j: 1 -> 2",
    ]
    found = mutation_page.outcomes([log, ["killed a.py:9 j: 1 -> 2", "killed a.py:9 k: 1 -> 2", "gone a.py i: 1 -> 2"]])
    assert found == {"a.py f: 1 -> 2": "killed", "a.py g: 1 -> 2": "equivalent", "a.py j: 1 -> 2": "killed"}
    assert mutation_page.score(found) == "100.0 %"
    assert mutation_page.outcomes([log])["a.py i: 1 -> 2"] == "survived"  # the list has it no longer
    assert mutation_page.score(mutation_page.outcomes([log])) == "33.3 %"


@pytest.mark.parametrize("name", [name for name in PAGES if (RESULTS / f"{name}.md").exists()])
def test_a_page_is_that_of_its_log(name):
    logs = RESULTS / "logs"
    assert (RESULTS / f"{name}.md").read_text(encoding="utf-8") == PAGES[name](
        logs if name == "mutation" else logs / f"{name}.txt"
    )
