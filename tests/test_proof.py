"""Mutation testing finds the errors it is meant to, and the pages of measured claims are those of their logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import claims, mutation, mutation_page
from bench.mutants import mutants, mutated

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = {"claims": claims.page, "mutation": mutation_page.page}
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


def test_every_equivalent_mutant_has_a_module_and_a_reason():
    lines = mutation_page.EQUIVALENT.read_text(encoding="utf-8").splitlines()
    for one in mutation_page.equivalent():
        assert one.split(" ", 1)[0] in mutation.modules() and lines[lines.index(one) + 1].startswith("  ")
    assert mutation_page.is_listed("infer/evaluate.py : 512 -> 513 in N = 512", mutation_page.equivalent())
    assert not mutation_page.is_listed("infer/evaluate.py window_nll: 1 -> 2", mutation_page.equivalent())


@pytest.mark.parametrize("name", [name for name in PAGES if (RESULTS / f"{name}.md").exists()])
def test_a_page_is_that_of_its_log(name):
    assert (RESULTS / f"{name}.md").read_text(encoding="utf-8") == PAGES[name](RESULTS / "logs" / f"{name}.txt")
