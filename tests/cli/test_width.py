"""In a narrow terminal every verb folds its output between words, and nothing is cut off; a pipe gets one line per row."""

from __future__ import annotations

import subprocess
import sys

import pytest

from everyformer.cli.main import app, main
from everyformer.cli.terminal import write_error
from tests.cli.small_run import train

COMMANDS = {
    "family": ["family"],
    "one": ["family", "adaptive-span:tiny"],
    "diff": ["family", "--diff", "bert:tiny", "transformer-xl:tiny"],
    "contracts": ["contracts", "gpt2", "--only", "future,cache"],
    "bench": [
        "bench",
        "attention",
        "dense",
        "local",
        "--lengths",
        "32,64",
        "--heads",
        "1",
        "--width",
        "8",
        "--repeats",
        "1",
    ],
    "plan": ["plan", "gpt2", "--size", "tiny", "--no-measure", "run.batch=2", "task.valid=0.002", "run.device=cpu"],
}


@pytest.mark.parametrize("columns", [40, 60, 80])
@pytest.mark.parametrize("name", COMMANDS)
def test_tables_fit_the_terminal(name, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(COMMANDS[name]) == 0
    lines = [line for line in capsys.readouterr().out.partition("\nnext:")[0].splitlines() if not line.startswith("# ")]
    assert lines and max(map(len, map(str.rstrip, lines))) <= columns
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("name", ["family", "one", "diff", "contracts", "plan"])
def test_a_pipe_gets_one_line_per_row(name, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(COMMANDS[name]) == 0
    lines = capsys.readouterr().out.partition("\nnext:")[0].splitlines()
    assert {"family": 18, "one": 30, "diff": 15, "contracts": 2, "plan": 4}[name] <= len(lines)
    assert not any(line.startswith("    ") and line.strip() for line in lines[1:])


VERBS = [
    "",
    *(name for name in app if not name.startswith("-")),
    "show pattern",
    "show attention",
    "bench generate",
    "bench train",
]
OF_A_RUN = {
    "evaluate": ["evaluate", "runs/one", "--limit", "2"],
    "resume": ["resume", "runs/one"],
    "show": ["show", "attention", "runs/one", "--text", "to be", "--out", "attention.png"],
    "embed": ["embed", "runs/one", "--data", "text.txt", "--out", "vectors.npy"],
    "refused": ["export", "runs/one", "--to", "hf", "--out", "exported"],
    "settings": ["settings", "gpt2"],
    "pattern": ["show", "pattern", "causal & window(8)", "--length", "32"],
    "typo": ["train", "gptt2"],
    "nowhere": ["import", "nowhere"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("width")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "text.txt").write_text("to be, or not to be: that is the question.\n" * 60)
        assert train("--out", "runs/one") == 0
    return folder


def assert_folds_between_words(command, capsys, monkeypatch):
    """In 40 columns the words are those of a pipe, and only a line of one word is longer. A pipe has no escape codes."""
    texts = []
    for columns in (40, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        main(command)
        texts.append("".join(capsys.readouterr()).translate(dict.fromkeys(map(ord, "╭╮╰╯─│"), " ")))
    narrow, wide = texts
    assert narrow.strip() and set(narrow.split()) <= set(wide.split()) and "\x1b" not in narrow + wide
    lines = [line for line in narrow.splitlines() if not line.startswith(("# ", "next: ", "error: "))]
    assert all(len(line.split()) == 1 for line in lines if len(line.rstrip()) > 40)


@pytest.mark.parametrize("verb", VERBS)
def test_help_folds_between_words(verb, capsys, monkeypatch):
    assert_folds_between_words([*verb.split(), "--help"], capsys, monkeypatch)


@pytest.mark.parametrize("name", OF_A_RUN)
def test_every_verb_folds_between_words(name, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert_folds_between_words(OF_A_RUN[name], capsys, monkeypatch)


def test_paths_fold_behind_their_points(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["family", "gpt2:tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("body.layers[0].sublayers[0].heads.")
    assert "key_width" in lines[at + 1 : at + 3] and max(map(len, lines)) <= 40


def test_an_error_is_one_line_in_a_pipe_and_whole_words_in_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    message = "a_long_path/" * 5 + " does not exist;\ngive the path of a file that exists"
    write_error(message)
    whole = f"error: {' '.join(message.split())}"
    assert capsys.readouterr().err == f"{whole}\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    write_error(message)
    lines = capsys.readouterr().err.splitlines()
    assert " ".join(lines) == whole and len(lines) > 3 and sum(len(line) > 40 for line in lines) == 1


def test_the_reader_of_a_pipe_may_leave():
    command = [sys.executable, "-m", "everyformer", "settings", "gpt2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        process.stdout.close()
        assert process.stderr.read() in (b"", b"\nnext: everyformer train gpt2 model.width=1536\n")
    assert process.returncode == 1
