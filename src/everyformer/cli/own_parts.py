"""`--import FILE`: parts of your own (a pattern, a score modification, a residual, ...) on the command line.

A part is a class that inherits from its protocol and from `Value`; once its file is imported, JSON and patterns written as text
find it by its tag, the class name in snake_case. In Python a plain `import` does the same.

A run that was trained with --import keeps a copy of each file in its folder. The copies are not imported by themselves, because
a run may come from somebody else: name them with --import.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

HELP = "A Python file or module with parts of your own; it is imported first. May be repeated."
Imports = Annotated[tuple[str, ...], Parameter("--import", negative=(), show_default=False, help=HELP)]
FOLDER, NAMES = "imports", "imports.txt"
imported: list[str] = []  # what this command was given, for the command that it proposes next


def import_parts(names: Sequence[str], run: Path | None = None) -> None:
    """Import files and modules. Raises ValueError if one cannot be imported, or if the run needs some and none is given."""
    imported[:] = names
    for name in names:
        if name.endswith(".py"):
            _import_file(Path(name).expanduser().resolve())
        else:
            _import_module(name)
    if run is not None and not names and (run / NAMES).is_file():
        recorded = (run / NAMES).read_text(encoding="utf-8").split()
        needed = " ".join(f"--import {run / FOLDER / name if name.endswith('.py') else name}" for name in recorded)
        raise ValueError(f"{run} was trained with parts of your own; add {needed}")


def recorder(names: Sequence[str], folder: Path) -> Callable[[dict[str, Any]], None]:
    """A callback that records in a run's folder what was imported: copies of files, names of modules."""

    def listen(record: dict[str, Any]) -> None:
        if record["kind"] != "begin" or not names:
            return
        from everyformer.train.folder import add_files

        files = [NAMES]
        for name in names:
            if name.endswith(".py"):
                (folder / FOLDER).mkdir(exist_ok=True)
                copy = folder / FOLDER / Path(name).name
                if Path(name).expanduser().resolve() != copy.resolve():
                    shutil.copyfile(Path(name).expanduser(), copy)
                files.append(f"{FOLDER}/{copy.name}")
        lines = [Path(name).name if name.endswith(".py") else name for name in names]
        (folder / NAMES).write_text("\n".join(lines) + "\n", encoding="utf-8")
        add_files(folder, files)

    return listen


def _import_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"--import {path}: there is no such file; give a Python file, or the name of a module")
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return
    if loaded is not None or path.stem in sys.stdlib_module_names:
        raise ValueError(f"--import {path}: a module named {path.stem} exists already; rename the file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # annotations are looked up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[path.stem]
        raise ValueError(f"--import {path} fails with {type(error).__name__}: {error}; correct the file") from error


def _import_module(name: str) -> None:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        importlib.import_module(name)
    except Exception as error:
        raise ValueError(
            f"--import {name} fails with {type(error).__name__}: {error}; give a .py file, or a module that Python finds"
        ) from error
