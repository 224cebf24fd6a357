"""The package that pip installs: a wheel with all that the program reads, which runs without the source tree."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import everyformer

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "everyformer"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {"PIL": "pillow"}  # the package of a module, where they have different names
BROUGHT = {"triton", "torch"}  # torch brings triton
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel, built from a copy of what the repository has."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(SOURCE, folder / "src" / "everyformer", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    (folder / "dist").mkdir()
    subprocess.run([sys.executable, "-c", BUILD, "dist"], cwd=folder, check=True, capture_output=True, timeout=120)
    (path,) = (folder / "dist").iterdir()
    return path


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        return message_from_bytes(archive.read(name))


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = (path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert names == {str(path.relative_to(SOURCE.parent)) for path in files}
    assert "everyformer/py.typed" in names
    assert wheel.name.endswith("py3-none-any.whl")  # no compiler was needed


def test_the_version_and_the_pythons_are_declared(wheel):
    read = metadata(wheel)
    assert (read["Version"], read["License-Expression"]) == (everyformer.__version__, "Apache-2.0")
    assert set(read["Requires-Python"].split(",")) == {">=3.11", "<3.14"}
    pythons = [one.rsplit(" ", 1)[1] for one in read.get_all("Classifier") if "Python :: 3." in one]
    assert pythons == ["3.11", "3.12", "3.13"]
    assert set(read.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])


def test_every_module_that_is_imported_is_a_dependency_or_in_an_extra():
    declared = [
        *PROJECT["dependencies"],
        *(one for extra in PROJECT["optional-dependencies"].values() for one in extra),
    ]
    packages = {one.split(";")[0].split(">")[0].strip().lower().replace("-", "_") for one in declared}
    imported = {
        name.split(".")[0]
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else [one.name for one in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    other = imported - set(sys.stdlib_module_names) - {"everyformer"} - BROUGHT
    assert {MODULES.get(name, name).lower() for name in other} <= packages


def test_the_module_is_run_like_the_command():
    command = [sys.executable, "-m", "everyformer", "--version"]
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=60).stdout
    assert shown.strip() == everyformer.__version__


@pytest.mark.slow
def test_the_wheel_is_installed_into_an_empty_environment_and_the_demo_runs_there(wheel, tmp_path):
    """Its dependencies are those of this environment, by a path file; no network, no compiler and no source tree."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    options = {"cwd": tmp_path, "env": {"HOME": str(tmp_path), "PATH": str(python.parent), "OMP_NUM_THREADS": "1"}}

    def run(*words: str) -> str:
        result = subprocess.run(list(words), capture_output=True, text=True, timeout=600, **options)
        assert result.returncode == 0, result.stderr
        return str(result.stdout)

    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(str(python), "-c", where).strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel))
    assert run(str(python), "-c", "import everyformer; print(everyformer.__file__)").startswith(str(packages))
    assert run("everyformer", "--version").strip() == everyformer.__version__
    shown = run("everyformer", "demo", "--steps", "5", "--out", "demo")
    assert "bits per byte of held-out text after" in shown and (tmp_path / "demo" / "attention.png").is_file()
    assert "ROMEO" in run(str(python), "-m", "everyformer", "generate", "demo", "--prompt", "ROMEO", "--tokens", "4")
