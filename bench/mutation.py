"""Mutation testing: the share of small errors in the source that the tests notice.

    python -m bench.mutation --processes 2 --seconds 600 --seed 0 --out mutation.log
    python -m bench.mutation --again mutation.log --out mutation_again.log     # only those that no test noticed
    python -m bench.mutation --listed                                          # only those of the two lists
    python -m bench.mutation --new mutation.log --only norm.py schedule.py     # the others of these modules
    python -m bench.mutation --page > docs/results/mutation.md

1. All tests are collected once, in this process, and run once with every line recorded that they reach; a test that fails is left out.
2. The mutants of the modules (see `bench/mutants.py`) are shuffled by the seed, and one of each module is taken in turn until the time is
   over, so that every module has the same weight.
3. For each mutant a fork of this process replaces the code of the mutated functions and runs the tests that reach the mutated lines, those
   that are short and reach few lines first, until one fails or their usual time adds up to `--budget`. A mutant of code that runs at
   import, or of a call of super(), is written to a copy of the source and tested in a new process.

A mutant is killed if a test fails, or takes more than a few times its usual time. One that changes no result is listed with the reason
in `bench/equivalent_mutants.txt`, one that changes a result and survives in `bench/surviving_mutants.txt`. The score is
killed / (tested - equivalent).
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from bench.mutants import Mutant, mutants, mutated
from bench.mutation_page import EQUIVALENT, LEFT_OUT, LOGS, SURVIVING, listed, outcomes, page

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "everyformer"
MODULES: tuple[str, ...] = ("attention/**/*.py", "network/*.py", "infer/*.py", "task/*objective.py", "task/target.py")
MODULES += ("train/optimizer.py", "train/schedule.py", "train/gradient_watch.py")
TESTS = ("attention", "network", "infer", "train", "task", "family", "peers", "contracts")

Tasks = list[tuple[Callable[[], Any], float]]  # what to do, and how long it may take


class Campaign:
    """A pytest plugin that runs the tests on mutants in place of the tests."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.started = options, time.monotonic()
        self.lines: dict[tuple[str, int], set[int]] = defaultdict(set)  # (module, line): the tests that reach it
        self.seconds: dict[int, float] = {}
        self.breadth: dict[int, int] = {}  # the number of lines that a test reaches
        self.functions: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
        self.log = open(options.out, "w", encoding="utf-8") if options.out else sys.stdout  # noqa: SIM115

    def pytest_configure(self) -> None:
        from hypothesis import settings

        settings.register_profile("mutation", database=None, derandomize=True, deadline=None)
        settings.load_profile("mutation")

    def pytest_runtestloop(self, session: Any) -> bool:
        self.session, self.items = session, session.items
        self._header()
        self.modules = [path for path in modules() if self._imports(path)]
        for function in [thing for thing in gc.get_objects() if type(thing) is FunctionType]:
            code = function.__code__
            if code.co_filename.startswith(str(PACKAGE)):
                self.functions[code.co_filename, code.co_qualname, code.co_firstlineno].append(function)
        gc.freeze()
        self._record()
        self._campaign()
        return True

    def _imports(self, path: str) -> bool:
        try:
            importlib.import_module(f"everyformer.{path.removesuffix('.py').replace('/', '.')}")
        except ImportError as error:
            self._write(f"left out: {path} ({error})")
            return False
        return True

    def _write(self, line: str) -> None:
        print(line, file=self.log, flush=True)

    def _header(self) -> None:
        from everyformer.train.provenance import start_log

        with redirect_stdout(self.log):
            start_log(seed=self.options.seed, commit=self.options.commit, packages=("pytest", "hypothesis"))

    def _record(self) -> None:
        """Run every test once and record its time and the lines that it reaches; `--record` keeps them between calls."""
        started, file = time.monotonic(), self.options.record
        record: dict[str, Any] = json.loads(file.read_text()) if file and file.exists() else {}
        names = [item.nodeid for item in self.items]
        new = [index for index, name in enumerate(names) if name not in record]
        chunks = [new[start : start + 4] for start in range(0, len(new), 4)]
        tasks: Tasks = [(partial(self._reached_by, chunk), 100.0) for chunk in chunks]
        for chunk, results in forked(tasks, self.options.processes):
            for place, index in enumerate(chunks[chunk]):
                record[names[index]] = results[place] if isinstance(results, list) else [False, 0.0, []]
        if file:
            file.write_text(json.dumps(record))
        failed = [name for name in names if not record[name][0]]
        for index, name in enumerate(names):
            if name not in failed:
                self.seconds[index], self.breadth[index] = record[name][1], len(record[name][2])
                for module, line in record[name][2]:
                    self.lines[module, line].add(index)
        self._write(f"{len(self.seconds)} tests in {time.monotonic() - started:.0f} s; left out: {failed or 'none'}")

    def _reached_by(self, indices: list[int]) -> list[tuple[bool, float, list[tuple[str, int]]]]:
        return [self._reached(index) for index in indices]

    def _reached(self, index: int) -> tuple[bool, float, list[tuple[str, int]]]:
        reached: set[tuple[str, int]] = set()
        prefix = f"{PACKAGE}{os.sep}"
        left_out = {f"{prefix}{path}" for path in LEFT_OUT}  # the interpreter of Triton is slow enough without a trace

        def local(frame: FrameType, event: str, _: object) -> Any:
            reached.add((frame.f_code.co_filename, frame.f_lineno))
            return local

        def trace(frame: FrameType, event: str, _: object) -> Any:
            if frame.f_code.co_filename.startswith(prefix) and frame.f_code.co_filename not in left_out:
                reached.add((frame.f_code.co_filename, frame.f_lineno))
                return local
            return None

        started = time.monotonic()
        sys.settrace(trace)
        ok = self._passes([index])
        sys.settrace(None)
        lines = [(name.removeprefix(prefix), line) for name, line in reached]
        return ok, time.monotonic() - started, lines

    def _passes(self, indices: list[int]) -> bool:
        before = self.session.testsfailed
        items = [self.items[index] for index in indices]
        for item, following in zip_longest(items, items[1:]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.session.testsfailed > before:
                return False
        return True

    def _campaign(self) -> None:
        known = listed(EQUIVALENT)
        every = {path: mutants(PACKAGE, path) for path in self.modules}
        only, again = self.options.only, self.options.again
        found = untested(sampled(every, self.options.seed), self.options.new)
        chosen = [mutant for mutant in found if not only or any(one in str(mutant) for one in only)]
        wanted: set[str] = set()
        for log in again:
            before = outcomes([log.read_text(encoding="utf-8").splitlines()])
            wanted |= {key for key, outcome in before.items() if outcome in ("survived", "unreached")}
        if self.options.listed:
            wanted |= known.keys() | listed(SURVIVING).keys()
            chosen.sort(key=lambda mutant: mutant.key in known)
            known = {}  # whether they are what they are said to be
        if again or self.options.listed:
            chosen = [mutant for mutant in chosen if mutant.key in wanted]
            for key in sorted(wanted - {mutant.key for found in every.values() for mutant in found}):
                self._write(f"gone {key}")
        self._write(f"{sum(map(len, every.values()))} mutants in {len([m for m in every.values() if m])} modules")
        tests = [self._tests_of(mutant) for mutant in chosen]
        tasks: Tasks = []
        for mutant, indices in zip(chosen, tests, strict=True):
            limit = 300 + 10 * sum(self.seconds[index] for index in indices)
            if mutant.key in known or not indices:
                tasks.append((lambda: True, 20.0))
            else:
                tasks.append((partial(self._survives, mutant, indices), limit))
        counted: Counter[str] = Counter()
        for index, result in forked(
            tasks, self.options.processes, self.options.seconds - time.monotonic() + self.started
        ):
            mutant = chosen[index]
            outcome = {True: "survived", False: "killed", None: "timeout"}.get(result, "killed")
            outcome = "equivalent" if mutant.key in known else "unreached" if not tests[index] else outcome
            counted[outcome] += 1
            self._write(f"{outcome} {mutant}")
        self._write(f"outcomes: {dict(counted)}")

    def _tests_of(self, mutant: Mutant) -> list[int]:
        """The tests that reach a mutant's lines, within the budget: first those that are short and reach little else."""
        reached = set().union(*(self.lines.get((mutant.path, at), set()) for at in range(mutant.line, mutant.end + 1)))
        if mutant.imported:
            # A test may read a default or a flag of a class without running a line of its module.
            name = mutant.function.partition(".")[0]
            reached = {index for index in self.seconds if name in words(self.items[index].path)} if name else set()
            reached = reached.union(*(found for (module, _), found in self.lines.items() if module == mutant.path))
        everywhere = self.seconds if mutant.imported else reached  # a limit of a type is used by any module
        ordered = sorted(everywhere, key=lambda i: (i not in reached, self.breadth[i] * self.seconds[i]))
        total, indices = 0.0, list[int]()
        for index in ordered:
            total += self.seconds[index]
            if total > self.options.budget and indices:
                break
            indices.append(index)
        return indices

    def _survives(self, mutant: Mutant, indices: list[int]) -> bool:
        tree = mutated(PACKAGE, mutant)
        file = str(PACKAGE / mutant.path)
        changed = [
            (function, code)
            for code in _codes(compile(tree, file, "exec", dont_inherit=True))
            for function in self.functions[file, code.co_qualname, code.co_firstlineno]
        ]
        # A function cannot take code with other free variables, as without a call of super().
        other = any(function.__code__.co_freevars != code.co_freevars for function, code in changed)
        if mutant.imported or other:
            return _survives_anew(mutant, tree, [self.items[index].nodeid for index in indices])
        for function, code in changed:
            function.__code__ = code
        return self._passes(indices)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _survives_anew(mutant: Mutant, tree: ast.Module, tests: list[str]) -> bool:
    """Test a mutant in a new process, from a copy of the source."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(PACKAGE, Path(folder) / "everyformer", ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / "everyformer" / mutant.path).write_text(ast.unparse(tree), encoding="utf-8")
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests[:200]]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=False).returncode == 0


@cache
def words(path: Path) -> set[str]:
    """The words of a file."""
    return set(re.findall(r"\w+", path.read_text(encoding="utf-8")))


def modules() -> list[str]:
    """The paths of the mutated modules."""
    found = {str(path.relative_to(PACKAGE)) for glob in MODULES for path in PACKAGE.glob(glob)}
    return sorted(path for path in found if not path.endswith("__init__.py") and path not in LEFT_OUT)


def sampled(every: dict[str, list[Mutant]], seed: int) -> list[Mutant]:
    """The mutants in a random order that takes one of each module in turn."""
    shuffled = [random.Random(f"{seed} {name}").sample(found, len(found)) for name, found in every.items()]
    return [mutant for turn in zip_longest(*shuffled) for mutant in turn if mutant is not None]


def untested(found: list[Mutant], logs: list[Path]) -> list[Mutant]:
    """The mutants that none of the logs has."""
    tested = {key for log in logs for key in outcomes([log.read_text(encoding="utf-8").splitlines()])}
    return [mutant for mutant in found if mutant.key not in tested]


def forked(tasks: Tasks, processes: int, seconds: float = float("inf")) -> Iterator[tuple[int, Any]]:
    """Run each task in a fork of this process; yields its index and what it returned: "died", or None for one past its limit."""
    end = time.monotonic() + seconds
    running: dict[int, tuple[int, float, Path]] = {}
    waiting = iter(range(len(tasks)))
    with tempfile.TemporaryDirectory() as folder:
        while True:
            while len(running) < processes and time.monotonic() < end:
                index = next(waiting, None)
                if index is None:
                    break
                work, limit = tasks[index]
                place = Path(folder) / str(index)
                with warnings.catch_warnings(action="ignore"):  # about threads, which the tests of a fork do not use
                    pid = os.fork()
                if pid == 0:
                    _child(work, place)
                running[pid] = index, time.monotonic() + limit, place
            if not running:
                return
            time.sleep(0.005)
            for pid, (index, limit, place) in list(running.items()):
                late = time.monotonic() > limit
                if late:
                    os.killpg(pid, signal.SIGKILL)
                if late or os.waitpid(pid, os.WNOHANG)[0]:
                    if late:
                        os.waitpid(pid, 0)
                    answer = place.with_suffix(".json")
                    result = json.loads(answer.read_text()) if answer.exists() else "died"
                    del running[pid]
                    shutil.rmtree(place, ignore_errors=True)
                    yield index, None if late else result


def _child(work: Callable[[], Any], place: Path) -> None:
    """In a fork: do the work in a session of its own, quietly and within a limit of memory, and write down its result."""
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
        os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.tempdir = str(place)
        place.mkdir()
        place.with_suffix(".json").write_text(json.dumps(work()))
    finally:
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=600.0, help="after this time no more mutants are started")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=20.0, help="the usual seconds of the tests of one mutant")
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--only", nargs="*", help="mutants whose line of the log has one of these texts")
    parser.add_argument(
        "--again", type=Path, nargs="*", default=[], help="only the mutants that survived in these logs"
    )
    parser.add_argument("--new", type=Path, nargs="*", default=[], help="only the mutants that none of these logs has")
    parser.add_argument(
        "--listed", action="store_true", help="only the mutants that are listed: is one killed after all?"
    )
    parser.add_argument("--tests", nargs="*", default=[f"tests/{folder}" for folder in TESTS])
    parser.add_argument(
        "--record", type=Path, help="a file that keeps which lines each test reaches; delete it when these change"
    )
    parser.add_argument("--out", help="the log")
    parser.add_argument("--page", action="store_true", help="print the page of the logs in docs/results/logs")
    options = parser.parse_args()
    if options.page:
        print(page(LOGS), end="")
        return
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONDONTWRITEBYTECODE="1", TRITON_INTERPRET="1")
    sys.path.insert(0, str(PACKAGE.parent))
    import pytest

    quiet = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "--continue-on-collection-errors"]
    tests = [path for path in options.tests if (ROOT / path.partition("::")[0]).exists()]
    pytest.main([*quiet, f"--rootdir={ROOT}", *tests], plugins=[Campaign(options)])


if __name__ == "__main__":
    main()
