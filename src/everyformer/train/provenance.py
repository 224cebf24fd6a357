"""Where a result comes from: command, commit, machine, versions, seed and date.

    start_log(seed=0)                   # prints them as lines `# name: value`, as the beginning of a log
    read_header(Path("log.txt"))        # reads them back

A run has the same facts in its records. The commit is that of the checkout from which everyformer is imported, or the value of
EVERYFORMER_COMMIT where there is no git.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path

COMMIT = "EVERYFORMER_COMMIT"
NAMES = ("command", "commit", "machine", "versions", "seed", "date")
PACKAGES = ("torch", "triton", "everyformer")


def provenance(
    seed: int | Sequence[int] | None, commit: str | None = None, packages: Sequence[str] = ()
) -> dict[str, str]:
    """Returns the facts by name. `packages` are other packages whose versions matter; seed None: the program uses none."""
    versions = [f"{name} {_version(name)}" for name in (*PACKAGES, *packages) if _version(name)]
    facts = (
        _command(),
        commit or os.environ.get(COMMIT) or _commit(),
        _machine(),
        ", ".join([f"Python {platform.python_version()}", *versions]),
        "none" if seed is None else ", ".join(map(str, [seed] if isinstance(seed, int) else seed)),
        datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    return dict(zip(NAMES, facts, strict=True))


def header(facts: dict[str, str]) -> str:
    return "\n".join(f"# {name}: {facts[name]}" for name in NAMES)


def start_log(
    *, seed: int | Sequence[int] | None, commit: str | None = None, packages: Sequence[str] = ()
) -> dict[str, str]:
    """Print the header of a log. Sets torch's seed if one seed is given, so that the header cannot name another one."""
    if isinstance(seed, int):
        import torch

        torch.manual_seed(seed)
    facts = provenance(seed, commit, packages)
    print(header(facts), flush=True)
    return facts


def read_header(path: Path) -> dict[str, str]:
    """Returns the facts at the beginning of a log. Raises ValueError if one is missing."""
    facts = dict[str, str]()
    for line in path.read_text().splitlines():
        name, colon, value = line.removeprefix("# ").partition(": ")
        if not line.startswith("# ") or not colon:
            break
        facts[name] = value
    if missing := [name for name in NAMES if not facts.get(name)]:
        raise ValueError(f"{path} does not begin with its {', '.join(missing)}; write it again with start_log")
    return facts


def _command() -> str:
    """The command line as typed, on one line, without the folder of the program."""
    program, *words = sys.orig_argv
    if words and not words[0].startswith("-"):  # a script, for example everyformer or pytest
        program, *words = words
    threads = [f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS",) if name in os.environ]
    return " ".join([*threads, *shlex.join([Path(program).name, *words]).split()])


@cache
def _commit() -> str:
    source = Path(__file__).parents[2]
    if source.name != "src":
        return f"unknown (everyformer {_version('everyformer')} is not a checkout; set {COMMIT})"
    try:
        commit = _git(source, "rev-parse", "--short=7", "HEAD")
        changed = _git(source.parent, "status", "--porcelain", "--untracked-files=no", "--", "src", "bench", "tests")
    except (OSError, subprocess.CalledProcessError):
        return f"unknown (no git here; set {COMMIT})"
    return f"{commit} with uncommitted changes" if changed else commit


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@cache
def _machine() -> str:
    import torch  # here, because the command line imports this module before it knows whether it needs torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [_processor(), f"{cores} cores"]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        parts.append(f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB")
    threads = torch.get_num_threads()
    parts.append(f"{threads} thread{'s' * (threads > 1)}")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        parts += [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
        parts.append(f"CUDA {torch.version.cuda}")
    return ", ".join(parts)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


@cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
