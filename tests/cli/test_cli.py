"""The command line as a user sees it: in a terminal, in a pipe, with and without mistakes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from functools import reduce
from itertools import combinations
from pathlib import Path

import pytest
import torch

from everyformer import Model, from_json, member, members
from everyformer.cli import demo as demo_module
from everyformer.cli.complete import _commands, _options
from everyformer.cli.family import human
from everyformer.cli.main import app, main
from everyformer.cli.terminal import console, next_command
from everyformer.family.table import MEMBERS, parameters
from everyformer.study import contracts as contracts_module
from everyformer.study import sweep as sweep_module
from everyformer.study.contract_report import Report, Result
from everyformer.study.differences import differences
from everyformer.study.family_listing import compute_listing, read_listing

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
COMMANDS: tuple[list[str], ...] = (
    *([], ["plan"], ["train"], ["resume"], ["evaluate"], ["generate"], ["family"], ["contracts"], ["demo"]),
    *(["show"], ["show", "attention"], ["show", "spans"], ["show", "pattern"], ["bench"], ["bench", "attention"]),
)

CAUSAL = {
    "transformer",
    "byte-language",
    "gpt2",
    "llama",
    "mistral",
    "qwen3",
    "gemma",
    "gemma2",
    "speedrun",
    "t5",
    "transformer-xl",
    "gtrxl",
    "deep-character",
    "adaptive-span",
    "image-transformer",
    "sparse-transformer",
    "reformer",
    "universal-transformer",
    "lstm",
    "ablated-lstm",
    "act-rnn",
}  # members whose decoder, or only side, is causal


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(capsys):
    """Runs a command: exit code, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return run


def test_help_does_not_import_torch():
    script = f"""
import sys
from everyformer.cli.main import main
for command in {COMMANDS!r}:
    assert main([*command, "--help"]) == 0
heavy = {{"torch", "matplotlib", "numpy"}} & sys.modules.keys()
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: everyformer") == len(COMMANDS)


@pytest.mark.parametrize("verb", ([], ["contracts"]), ids=str)
def test_help_takes_less_than_a_second(verb):
    command = [sys.executable, "-c", "from everyformer.cli.main import main; main()", *verb, "--help"]
    best = min(_seconds(command) for _ in range(3))
    assert best < 1.0  # 0.3 on a quiet machine


def _seconds(command: list[str]) -> float:
    """Processor time, which does not depend on the load of the machine."""
    before = os.times()
    subprocess.run(command, check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


@pytest.mark.parametrize("command", COMMANDS[1:], ids=" ".join)
def test_help_fits_a_terminal_of_80_columns(command, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(*command, "--help")
    assert code == 0 and max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("verb", [name for name in app if not name.startswith("-") and app[name].show])
def test_every_command_is_described(verb, run):
    code, out, err = run("--help")
    assert code == 0 and err == ""
    assert re.search(rf"{verb} +[A-Z]", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("famly", 'Did you mean "family"?'),
        ("family --sise tiny", "Did you mean --size?"),
        ("show patern full", 'Did you mean "pattern"?'),
        ("show pattern full --length many", 'unable to convert "many" into int'),
    ],
)
def test_wrong_commands_and_options_get_the_nearest_name(arguments, message, run):
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


VERBS = [(name,) for name in app if not name.startswith("-") and app[name].show]
VERBS = [(*verb, name) for verb in VERBS for name in [*_commands(app[verb[0]])] or [""]]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_typo_in_a_verb_or_in_its_options_is_answered_with_the_right_word(verb, run):
    verb = tuple(filter(None, verb))
    code, out, err = run(*verb[:-1], verb[-1][:-2] + verb[-1][:-3:-1])  # the last two letters exchanged
    assert (code, out) == (2, "") and f'Did you mean "{verb[-1]}"?' in said(err)
    options = [name for name in _options(reduce(lambda one, name: one[name], verb, app)) if len(name) > 6]
    for name in options:
        code, out, err = run(*verb, f"{name[:-2]}{name[-1]}=1")  # a letter less
        assert (code, out) == (2, "") and "Did you mean --" in said(err)


def said(text: str) -> str:
    """The sentence in a box."""
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["family", "gtp2"], "no member of the family is named 'gtp2'; did you mean gpt2?"),
        (["family", "gpt2", "--size", "tinny"], "gpt2 has no size 'tinny'; did you mean tiny?"),
        (["family", "gpt2:tiny", "--size", "xl"], "gpt2:tiny and --size xl both give a size"),
        (["family", "--size", "tiny"], "--size tiny needs a member"),
        (["family", "bert", "--diff", "bert", "gpt2"], "--diff takes two members"),
        (["family", "--diff", "bert", "gpt2:hug"], "gpt2 has no size 'hug'"),
        (
            ["show", "pattern", "casual & window(8)"],
            "no pattern is named 'casual' (in 'casual & window(8)'); did you mean causal or local",
        ),
        (["show", "pattern", "window(-1)"], "window.size is -1"),
        (["show", "pattern", "causal &"], "cannot read the pattern 'causal &'"),
        (["show", "pattern", "full", "--length", "0"], "length is 0"),
        (["show", "pattern", "full", "--length", "9999"], "1 to 4096 positions can be drawn"),
        (["show", "pattern", "full", "--length", "4096", "--heads", "4"], "1 to 2048 positions can be drawn"),
        (["show", "pattern", "full", "--heads", "0"], "heads is 0"),
        (["contracts", "gtp2"], "did you mean gpt2?"),
        (["contracts", "gpt2", "--only", "futre"], "no contract is named 'futre'; did you mean future"),
        (["contracts", "--only", "chache"], "did you mean cache"),
        (["contracts", "gpt2", "--all"], "--all checks combinations and cannot be used with gpt2"),
    ],
)
def test_an_error_is_one_line(arguments, message, run):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def _sizes() -> list[str]:
    """The sizes as the table shows them: `small 124M`."""
    return [f"{size} {human(parameters(one.value(size)))}" for one in MEMBERS.values() for size in one.sizes]


def test_the_family_in_a_pipe_is_one_line_per_member(run):
    code, out, err = run("family")
    assert code == 0 and not COLOUR.search(out) and "…" not in out
    for name, one in MEMBERS.items():
        (line,) = (line for line in out.splitlines() if line.startswith(f"{name} "))
        assert one.paper in line and all(f"{size} " in line for size in one.sizes)
    assert all(size in out for size in _sizes())
    assert "next: everyformer" in err and "next:" not in out  # a pipe gets only the result


@pytest.mark.parametrize("columns", (60, 80, 130))
def test_the_family_fits_a_terminal_with_all_its_words(columns, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, out, _ = run("family")
    assert code == 0 and COLOUR.search(out)
    text = COLOUR.sub("", out)
    assert max(map(len, text.splitlines())) <= columns and "…" not in text
    words = text.replace(",", " ").split()
    assert all(word in words for line in (*MEMBERS, *_sizes()) for word in line.split())


def test_the_stored_listing_of_the_family_is_up_to_date():
    assert read_listing() == json.loads(json.dumps(compute_listing())), (
        "run: python -m everyformer.study.family_listing"
    )


def test_the_family_is_listed_in_less_than_two_seconds():
    command = [sys.executable, "-c", "from everyformer.cli.main import main; main()", "family"]
    assert min(_seconds(command) for _ in range(3)) < 2.0  # 0.4 on a quiet machine, without torch


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("gpt2", "key-value cache"),
        ("transformer-xl", "segment memory of 512"),
        ("lstm", "recurrent state"),
        ("bert", "–"),
    ],
)
def test_the_family_shows_the_cache_of_a_member(name, cache, run):
    rows = {row["member"]: row for row in json.loads(run("family", "--json")[1])}
    assert rows[name]["cache"] == cache
    assert re.search(rf"^cache +{cache}$", run("family", name)[1], re.M)


def test_the_memory_of_transformer_xl_is_a_difference_of_architecture(run):
    result = json.loads(run("family", "--diff", "gpt2", "transformer-xl", "--json")[1])
    assert result["architecture"]["cache"] == ["key-value cache", "segment memory of 512"]
    result = json.loads(run("family", "--diff", "transformer-xl", "transformer-xl:tiny", "--json")[1])
    assert "cache" not in result["architecture"] and "cache" in result["sizes and rates"]


def test_the_family_as_json_has_exact_counts(run):
    code, out, _ = run("family", "--json")
    rows = {row["member"]: row for row in json.loads(out)}
    assert code == 0 and list(rows) == members()
    # The counts of the released GPT-2, and of torchvision's ViT-B/16.
    assert rows["gpt2"]["sizes"]["small"]["parameters"] == 124_439_808
    assert rows["vit"]["sizes"]["b16"]["parameters"] == 86_567_656
    assert rows["transformer"]["pattern"] == ["full", "causal"]
    assert {name for name, row in rows.items() if row["cache"] != "–"} == CAUSAL


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999"), (1000, "1k"), (124_439_808, "124M"), (1_557_611_200, "1.56B"), (999_999, "1M")]
)
def test_counts_are_shown_with_three_digits(count, text):
    assert human(count) == text


def test_a_member_as_json_is_its_value(run):
    code, out, _ = run("family", "gpt2:tiny", "--json")
    assert code == 0 and from_json(out, Model) == member("gpt2", "tiny")


def test_a_member_is_shown_field_by_field(run):
    code, out, _ = run("family", "gpt2", "--size", "tiny")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines() if "." in line.split(" ")[0])
    assert code == 0 and "120,576 parameters" in out
    assert lines["body.num_layers"] == "2" and lines["body.layers[0].sublayers[0].pattern"] == "causal"
    assert lines["embed.vocabulary"] == "256"


@pytest.mark.parametrize(("one", "two"), [*combinations(members(), 2)])
def test_a_difference_is_the_same_in_either_order(one, two):
    a, b = member(one), member(two)
    there, back = differences(a, b), differences(b, a)
    assert there and {path: pair[::-1] for path, pair in there.items()} == back
    assert all(left != right for left, right in there.values())
    assert differences(a, a) == {}


def test_bert_and_gpt2_differ_in_pattern_residual_and_segments(run):
    code, out, _ = run("family", "--diff", "bert", "gpt2", "--json")
    found = json.loads(out)
    assert code == 0 and found["members"] == ["bert:base", "gpt2:small"]
    architecture = found["architecture"]
    assert architecture["body.layers[0].sublayers[0].pattern"] == ["full", "causal"]
    assert architecture["body.residual"] == ["post_norm", "pre_norm"]
    assert architecture["segments"] == [2, None]
    assert found["sizes and rates"]["embed.vocabulary"] == [30522, 50257]
    assert "width" not in out  # both are 768 wide


def test_sizes_of_one_member_differ_in_numbers_only(run):
    found = json.loads(run("family", "--diff", "gpt2", "gpt2:xl", "--json")[1])
    assert found["architecture"] == {}
    assert found["sizes and rates"]["width"] == [768, 1600]


def test_a_decoder_is_compared_with_the_decoder(run):
    code, out, _ = run("family", "--diff", "gpt2", "transformer")
    rows = [line.split() for line in out.splitlines()]
    assert code == 0
    assert ["decoder.body.residual", "pre_norm", "post_norm"] in rows
    assert ["encoder", "–", "model"] in rows
    assert not any(row and row[0].startswith("encoder.") for row in rows)  # the encoder, which gpt2 lacks, is one line
    assert out.index("architecture") < out.index("sizes and rates") < out.index("decoder.width")


@pytest.mark.parametrize("arguments", ("show pattern causal --length 190", "family --json"))
def test_a_closed_pipe_ends_a_command_without_an_error(arguments):
    command = [sys.executable, "-c", "import sys; from everyformer.cli.main import main; sys.exit(main())"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, *arguments.split()], stdout=pipe, stderr=pipe) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


def test_training_continues_when_its_pipe_is_closed(tmp_path):
    script = "import sys; from everyformer.cli.main import main; sys.exit(main())"
    words = "train byte-language --size tiny run.steps=2 run.batch=2 run.evaluate=1 run.examples=1 task.valid=0.005 --out run"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", script, *words.split()], stdout=pipe, stderr=pipe, cwd=tmp_path
    ) as one:
        assert one.stdout and one.stderr
        one.stdout.close()
        assert one.stderr.read() == b"\nnext: everyformer generate run --prompt 'Once'\n"
        assert one.wait() == 0
    assert (tmp_path / "run" / "checkpoints" / "00000002").is_dir() and (tmp_path / "run" / "curves.png").is_file()


def test_a_proposed_command_is_quoted_for_the_shell(capsys):
    next_command(console(), "generate", Path("a b/it's"), "run.batch_schedule=[[2, 8]]", hint="--prompt 'Once more'")
    words = shlex.split(capsys.readouterr().err.partition("next: ")[2])
    assert words == ["everyformer", "generate", "a b/it's", "run.batch_schedule=[[2, 8]]", "--prompt", "Once more"]


def test_ctrl_c_ends_with_one_line(run, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(contracts_module, "contracts", interrupted)
    code, _, err = run("contracts", "gpt2")
    assert (code, err) == (130, "stopped; everyformer resume continues a run from its last checkpoint\n")


def test_contracts_of_a_member(run):
    code, out, err = run("contracts", "gpt2", "--only", "future,cache")
    assert (code, err) == (0, "\nnext: everyformer contracts\n")
    assert re.search(r"^future +1 +0\.0e\+00 +0e\+00 +passed$", out, re.M) and re.search(r"^cache +1 ", out, re.M)
    assert "all 2 checks passed" in out and "padding" not in out


def test_contracts_that_do_not_apply_to_a_member(run):
    code, out, _ = run("contracts", "vit", "--only", "future")  # it is not causal
    assert code == 1 and "nothing was checked" in out and "passed" not in out
    code, out, _ = run("contracts", "bert", "--only", "future,store")
    assert code == 1 and "passed" in out and "checks passed" not in out


def test_contracts_of_all_combinations_and_members(run, monkeypatch):
    some = sweep_module.cells()[::8]
    monkeypatch.setattr(sweep_module, "cells", lambda triples: some)
    wanted = sweep_module.sweep(some, ["future"])
    code, out, err = run("contracts", "--only", "future")
    checks = len(wanted.results) + len(CAUSAL)
    assert code == 0 and re.search(rf"^future +{checks} +0\.0e\+00 ", out, re.M)
    assert wanted.refused > 0 and f"{wanted.refused} combinations are illegal and were not built" in out
    assert err.count("combinations: ") == 10 and f"members: {len(members())} of {len(members())}\n\nnext: " in err


@pytest.mark.parametrize("error", (0.5, float("nan"), float("inf")))
def test_a_failed_contract_is_named(error, run, monkeypatch):
    report = Report([Result("future", "a model", error, 0.0), Result("cache", "a model", 1e-15, 1e-9)])
    monkeypatch.setattr(contracts_module, "contracts", lambda *_: report)
    code, out, _ = run("contracts", "gpt2")
    assert code == 1 and "FAILED: 1 of 2 checks" in out and "in a model" in out
    code, out, _ = run("contracts", "gpt2", "--json")
    result = json.loads(out, parse_constant=pytest.fail)
    assert code == 1 and not result["ok"]
    assert [row["passed"] for row in result["contracts"]] == [False, True]
    assert result["failures"][0] == {
        "contract": "future",
        "model": "a model",
        "error": error if error == 0.5 else None,
        "limit": 0.0,
    }


def test_the_demo_trains_samples_and_draws(run, monkeypatch, tmp_path):
    small = ("model.width=32", "model.heads=2", "model.layers=2", "task.context=32")
    monkeypatch.setattr(demo_module, "SETTINGS", (*demo_module.SETTINGS, *small, "run.evaluate=0", "task.valid=0.005"))
    monkeypatch.setattr(demo_module, "STEPS", 60)
    code, out, err = run("demo", "--out", str(tmp_path / "demo"))
    assert code == 0
    bits = re.search(r"([\d.]+) bits per byte of held-out text", out)
    assert bits and float(bits[1]) < 5.0
    assert "ROMEO:" in out and "next: everyformer generate" in err
    for name in ("curves", "attention"):
        assert f"{name}: {tmp_path}/demo/{name}.png" in out
        assert (tmp_path / "demo" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    options = ("--text", "To be", "--out", str(tmp_path / "a.svg"), "--beside", str(tmp_path / "demo"))
    code, out, _ = run("show", "attention", str(tmp_path / "demo"), *options)
    assert code == 0 and (tmp_path / "a.svg").read_text().count("<!-- layer 0 -->") == 2
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    code, out, _ = run("demo", "--steps", "2", "--out", str(tmp_path / "plain"))
    assert code == 0 and "no pictures: drawing needs matplotlib" in out


def test_the_number_of_threads_is_restored(run):
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run("contracts", "vit", "--only", "future")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
