"""Train, evaluate, generate, resume and plan, as a user types them."""

from __future__ import annotations

import io
import json
import shlex
import signal
from shutil import rmtree

import pytest
from PIL import Image

from everyformer.cli.main import main
from everyformer.study.spans import Spans, draw_spans
from everyformer.train.loop import Loop
from everyformer.train.record import report_write_errors
from tests.cli.small_run import SMALL, train

pytestmark = pytest.mark.usefixtures("place")


def test_a_run_is_trained_evaluated_sampled_and_resumed(place, capsys):
    assert train("--out", "run") == 0
    shown, told = capsys.readouterr()
    assert shown.count("\nstep 6  valid: bits per byte") == 1  # on 4 windows
    assert shown.count("\nfinal, step 6  valid: bits per byte") == 1  # on all
    assert "next: everyformer generate run" in told
    for name in ("recipe.json", "model.json", "records.jsonl", "curves.png", "checkpoints/00000006/model.safetensors"):
        assert (place / "run" / name).is_file()

    assert main(["evaluate", "run", "--stride", "1", "--limit", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stride"] == 1 and found["window"] == 64 and found["step"] == 6 and 0 < found["bits_per_byte"] < 9

    assert main(["evaluate", "run", "--step", "best", "--limit", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] in (3, 6)

    texts = []
    for words in (["1"], ["1"], ["1", "--stream"], ["2"]):
        assert main(["generate", "run", "--prompt", "to be", "--tokens", "20", "--seed", *words]) == 0
        texts.append(capsys.readouterr().out.removesuffix("\n"))
    assert texts[0] == texts[1] != texts[3] and texts[0].startswith("to be")
    assert texts[0] == texts[2]
    for words, told in (
        (["generate", "run", "--stream", "--beam", "2"], "--beam returns the whole text"),
        (["evaluate", "run", "--memory", "9"], "task.memory is 9, but the model has no segment memory"),
        (["evaluate", "run", "--precision", "fp16", "--device", "cpu"], "fp16 on a CPU"),
        (["evaluate", "run", "--limit", "0"], "--limit 0"),
        (["generate", "run", "--tokens", "-1"], "--tokens -1 is negative"),
        (["generate", "run", "--beam", "0"], "--beam 0 is less than 1"),
    ):
        assert main(words) == 2 and told in capsys.readouterr().err

    assert main(["generate", "run", "--prompt", "-x", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("-x")

    assert main(["resume", "run", "--steps", "8"]) == 0
    assert (place / "run" / "checkpoints" / "00000008").is_dir()
    assert "starts from step 0" not in capsys.readouterr().out
    rmtree(place / "run" / "checkpoints")
    assert main(["resume", "run", "--steps", "2"]) == 0
    assert "run has no checkpoint, so it starts from step 0" in capsys.readouterr().out


def test_an_agent_is_trained_evaluated_and_recorded(place, capsys):
    small = ["--size", "tiny", "--task", "control", "run.steps=2", "run.batch=2", "task.copies=2", "task.segment=8"]
    assert main(["train", "lstm", *small, "run.evaluate=0", "task.episodes=4", "--out", "run"]) == 0
    shown, told = capsys.readouterr()
    assert " return " in shown and "  episodes 4" in shown
    assert "next: everyformer generate run --out episode.gif" in told
    assert main(["evaluate", "run", "--limit", "3", "--split", "test", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["low"] <= found["return"] <= found["high"] and found["episodes"] == 3 and found["length"] == 6
    assert main(["generate", "run"]) == 0
    assert "an episode of 6 steps" in capsys.readouterr().out
    assert (place / "run" / "episode.gif").is_file() and (place / "run" / "curves.png").is_file()
    for words in (["--images", "2"], ["--out", "episode.png"], ["--prompt", "to"]):
        assert main(["generate", "run", *words]) == 2
    assert main(["plan", "lstm", *small, "--no-measure"]) == 0
    assert "next: everyformer train lstm --size tiny --task control run.steps=2" in capsys.readouterr().err


@pytest.mark.spec(97)
def test_spans_are_printed_drawn_and_evaluated(place, capsys):
    """By layer and head, with what they save."""
    words = [
        "--size",
        "tiny",
        "--data",
        "text.txt",
        "run.steps=1",
        "run.batch=2",
        "run.evaluate=0",
        "model.initial_span=0.25",
        "optim.lr=1e-5",
    ]
    assert main(["train", "adaptive-span", *words, "--out", "run"]) == 0
    capsys.readouterr()
    assert main(["show", "spans", "run", "--out", "spans.png"]) == 0
    shown = capsys.readouterr().out
    assert "head 3" in shown and "24.0 of 64 that a head could attend to (37." in shown and "operations" in shown
    assert (place / "spans.png").read_bytes().startswith(b"\x89PNG")
    assert main(["show", "spans", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(one) for one in found["each"]] == [4, 4] and found["flops"] < found["most_flops"]
    assert all(abs(z - 16) < 0.1 for one in found["each"] for z in one)  # 64 / 4, and a step
    assert main(["evaluate", "run", "--limit", "1"]) == 0
    assert "  span 16" in capsys.readouterr().out


def test_each_head_has_its_own_point_inside_the_axes():
    each = [[16.0, 16.0, 16.0], [64.0, 0.0, 64.0]]
    (plot,) = draw_spans(Spans(each, keys=1.0, most=1.0, flops=1, most_flops=1)).axes
    points = [tuple(map(float, one)) for layer in plot.collections for one in layer.get_offsets()]
    assert len(set(points)) == 6 and [z for _, z in points] == each[0] + each[1]
    assert [round(x) for x, _ in points] == [0, 0, 0, 1, 1, 1] and plot.get_ylim()[1] > 64


def test_the_default_text_is_cropped_to_what_the_model_can_read(place, capsys):
    assert train("--out", "run", "task.context=16", "run.steps=1") == 0
    capsys.readouterr()
    assert main(["show", "attention", "run", "--out", "a.svg"]) == 0
    assert main(["show", "attention", "run", "--out", "a.svg", "--text", "Shall I compare thee"]) == 2
    assert "past the 16 positions" in capsys.readouterr().err


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
def test_a_stopped_run_can_be_resumed(place, capsys, monkeypatch, number, code):
    original = Loop._step

    def step(loop, at, records):
        if at in (4, 5):
            signal.raise_signal(number)
        original(loop, at, records)

    monkeypatch.setattr(Loop, "_step", step)
    assert train("--out", "a run") == code
    shown, told = capsys.readouterr()
    assert "stopped at step 5" in shown and "\nnext: everyformer resume 'a run'\n" in told
    assert shown.count("perplexity") == 1  # of step 3, where it was evaluated
    assert main(["resume", "a run", "run.steps=8"]) == code
    monkeypatch.undo()
    monkeypatch.chdir(place)
    assert main(["resume", "a run"]) == 0
    assert "next: everyformer generate 'a run' --prompt 'Once'\n" in capsys.readouterr().err


def test_a_failed_write_names_the_last_checkpoint(place):
    def full():
        with report_write_errors(place / "run"):
            raise OSError("no space")

    with pytest.raises(ValueError, match=r"free some space there, then start again: it has no checkpoint$"):
        full()
    (place / "run" / "checkpoints" / "00000003").mkdir(parents=True)
    with pytest.raises(ValueError, match="resume the run: its last checkpoint is intact"):
        full()


@pytest.mark.parametrize("verb", ["train byte-language --size tiny", "demo"])
@pytest.mark.parametrize("out", ["text.txt", "text.txt/run"])
def test_a_run_cannot_be_written_to_a_file(verb, out, capsys):
    assert main([*verb.split(), "--out", out]) == 2
    message = f"text.txt is a file, so the run cannot be written to {out}; give another folder with --out"
    assert message in capsys.readouterr().err


def test_an_invalid_run_leaves_no_folder(place, capsys):
    assert train("--out", "run", "run.batch=100000") == 2
    assert "is larger than the data set" in capsys.readouterr().err and not (place / "run").exists()
    assert train("--out", "run", "run.steps=1") == 0


def test_a_run_cannot_be_resumed_to_an_earlier_step_or_from_a_broken_recipe(place, capsys):
    assert train("--out", "run") == 0
    for words in (["--steps", "2"], ["run.steps=2"]):
        assert main(["resume", "run", *words]) == 2
        assert "run is at step 6, past run.steps=2; raise run.steps" in capsys.readouterr().err
    assert '"steps": 6' in (place / "run" / "recipe.json").read_text()
    (place / "run" / "recipe.json").write_text("{")
    assert main(["evaluate", "run"]) == 2
    assert "run/recipe.json was changed after it was written; restore it" in capsys.readouterr().err


def test_data_can_come_from_standard_input(place, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((place / "text.txt").read_bytes())))
    assert main(["train", "byte-language", "--size", "tiny", "--data", "-", *SMALL, "run.steps=1", "--out", "run"]) == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    assert main(["generate", "run", "--tokens", "3"]) == 0


@pytest.mark.parametrize("tokenizer", ["bytes", "characters"])
def test_a_run_generates_without_its_data(place, capsys, tokenizer):
    assert train("--out", "run", f"task.tokenizer={tokenizer}") == 0
    (place / "text.txt").unlink()
    assert main(["generate", "run", "--prompt", "to be", "--tokens", "3"]) == 0
    assert "to be" in capsys.readouterr().out
    assert main(["evaluate", "run"]) == 2


def test_a_changed_training_text_is_said_and_training_on_it_needs_the_option(place, capsys):
    assert train("--out", "run") == 0
    with (place / "text.txt").open("a") as file:
        file.write("more")
    capsys.readouterr()
    assert main(["evaluate", "run"]) == 0
    note = (
        "note: the splits train, valid differ from those that the run was trained on, so the held-out part may contain"
    )
    assert note in capsys.readouterr().err.replace("\n", " ")
    assert main(["resume", "run", "--steps", "9"]) == 2
    told = capsys.readouterr().err
    assert (
        "text.txt) have changed since the run began (train, valid differ); restore them, or give --data (in Python data=) to"
        in told
    )
    assert '"steps": 6' in (place / "run" / "recipe.json").read_text()
    assert main(["generate", "run", "--tokens", "3"]) == 0
    capsys.readouterr()
    assert main(["resume", "run", "--steps", "9", "--data", "text.txt"]) == 0
    assert "the data differ from those before this step: train, valid" in capsys.readouterr().out
    assert main(["resume", "run", "--steps", "10"]) == 0 and main(["evaluate", "run"]) == 0
    assert "note:" not in capsys.readouterr().err
    assert main(["generate", "run", "--out", "samples.png"]) == 2
    assert (
        "--out is not an option of this run; leave it out (the options are --prompt, --tokens, --beam, --ignore-end, --temperature"
        in capsys.readouterr().err
    )


def test_moved_data_and_other_data_are_given_by_an_option(place, capsys):
    assert train("--out", "run") == 0
    assert main(["evaluate", "run", "--json"]) == 0
    before = json.loads(capsys.readouterr().out.splitlines()[-1])
    (place / "text.txt").rename(place / "moved.txt")
    for verb in ("evaluate", "resume"):
        assert main([verb, "run"]) == 2
        assert f"there is no {place / 'text.txt'}; give their new place with --data" in capsys.readouterr().err
    assert main(["evaluate", "run", "--data", "moved.txt", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == before and err == ""
    assert main(["generate", "run", "--data", "moved.txt", "--tokens", "3"]) == 0
    assert main(["resume", "run", "--data", "moved.txt", "--steps", "7"]) == 0
    assert main(["resume", "run", "--steps", "8"]) == 0  # the recipe has the new place
    (place / "other.txt").write_text("a quite different text.\n" * 60)
    capsys.readouterr()
    assert main(["evaluate", "run", "--data", "other.txt", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["changed"] == ["train", "valid"] and "differ from those that the run was trained on" in err


def test_a_longer_test_file_changes_nothing_for_training(place, capsys):
    (place / "data").mkdir()
    for split in ("train", "valid", "test"):
        (place / "data" / f"{split}.txt").write_text((place / "text.txt").read_text())
    assert main(["train", "byte-language", "--size", "tiny", "--data", "data", *SMALL, "--out", "run"]) == 0
    with (place / "data" / "test.txt").open("a") as file:
        file.write("one line more\n")
    capsys.readouterr()
    assert main(["evaluate", "run", "--split", "test"]) == 0
    out, err = capsys.readouterr()
    assert "note: the split test changed since the run began; train did not" in err and "step 6  test: bits" in out
    assert main(["resume", "run", "--steps", "7"]) == 0
    assert "the data differ from those before this step: test" in capsys.readouterr().out


def test_other_examples_must_have_the_classes_of_the_run(place, capsys):
    for name, classes in (("data", "ab"), ("fewer", "b"), ("more", "bc")):
        rows = [{"text": f"a text {number}", "label": classes[number % len(classes)]} for number in range(20)]
        rows += [{"text": "x", "label": "a"}] * (name != "data")
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["byte-classifier", "--size", "tiny", "--data", "data.jsonl", *SMALL, "run.steps=1", "run.batch=2"]
    assert main(["train", *words, "--out", "run"]) == 0
    assert main(["evaluate", "run", "--data", "fewer.jsonl"]) == 0
    capsys.readouterr()
    assert main(["evaluate", "run", "--data", "more.jsonl"]) == 2
    assert "the data have the class 'c', but run was trained on others" in capsys.readouterr().err


def test_a_run_is_resumed_with_another_learning_rate(place, capsys):
    assert train("--out", "run", "optim.warmup=0", "optim.schedule=constant", "optim.lr=0.01", "run.steps=3") == 0
    assert main(["resume", "run", "optim.lr=0.002", "optim.schedule=linear", "optim.min_lr=0", "--steps", "7"]) == 0
    lines = [json.loads(line) for line in (place / "run" / "records.jsonl").read_text().splitlines()]
    rates = [line["lr"] for line in lines if line["kind"] == "step"]
    assert rates == pytest.approx([0.01] * 3 + [0.002 * (1 - step / 6) for step in (3, 4, 5, 6)])
    capsys.readouterr()
    for setting in ("optim.name=muon", "model.width=32"):
        assert main(["resume", "run", setting]) == 2
        assert (
            f"{setting} cannot change when a run is resumed, only run.* and optim.* (without" in capsys.readouterr().err
        )


def test_a_model_in_a_json_file_can_replace_a_member(place, capsys):
    assert main(["family", "gpt2", "--size", "tiny", "--json"]) == 0
    (place / "mine.json").write_text(capsys.readouterr().out.replace('"causal"', '"full"', 1))
    given = ["mine.json", "--data", "text.txt", "run.steps=2", "run.batch=2", "run.evaluate=0"]
    assert main(["train", *given]) == 2
    assert (
        "the pattern full attends to the future" in capsys.readouterr().err and not (place / "runs" / "mine-1").exists()
    )
    (place / "mine.json").write_text((place / "mine.json").read_text().replace('"full"', '"causal"'))
    assert main(["contracts", "mine.json", "--only", "future"]) == 0
    assert main(["plan", *given, "--no-measure"]) == 0
    assert "train mine.json --data text.txt" in capsys.readouterr().err
    assert main(["train", *given]) == 0 and main(["generate", "runs/mine-1", "--tokens", "3"]) == 0
    assert main(["show", "attention", "runs/mine-1", "--beside", "runs/mine-1"]) == 0


def test_an_option_that_a_run_does_not_support_is_refused(place, capsys):
    assert train("--out", "text") == 0
    (place / "pairs.jsonl").write_text('{"en": "a b", "de": "b a"}\n' * 40)
    small = ["run.steps=1", "run.batch=2", "run.evaluate=0"]
    assert main(["train", "transformer", "--size", "tiny", "--data", "pairs.jsonl", *small, "--out", "pairs"]) == 0
    assert main(["train", "byte-classifier", "--size", "tiny", *small, "--out", "classes"]) == 0
    capsys.readouterr()
    for run, option, reason in (
        (
            "text",
            ["--beam=2", "--temperature=1"],
            "--beam searches for the most probable text, so temperature would have no effect",
        ),
        ("text", ["--stream", "--beam=2"], "--beam returns the whole text at once"),
        (
            "pairs",
            ["--tokens=3"],
            "--tokens is not an option of this run; leave it out (the options are --prompt, --beam)",
        ),
        ("pairs", ["--top-k=3"], "--top-k is not an option"),
        ("pairs", ["--stream"], "does not generate text token by token, so stream does not apply; it has generate"),
        ("classes", ["--seed=3"], "--seed is not an option of this run; leave it out (the options are --prompt)"),
    ):
        assert main(["generate", run, "--prompt=a b", *option]) == 2
        assert reason in capsys.readouterr().err
    assert (
        main(["plan", "byte-language", "--size", "tiny", "--data", "text.txt", "--init-from", "text", "--no-measure"])
        == 0
    )
    assert "--init-from text" in capsys.readouterr().err


@pytest.mark.spec(98, 101, 102)
def test_images_of_a_folder_are_trained_on_generated_and_completed(place, capsys):
    (place / "photos").mkdir()
    for number in range(12):
        colour = (20 * number, 255 - 20 * number, 7)
        Image.new("RGB", (9 + number, 12), colour).save(place / "photos" / f"{number}.png")
    small = ("task.size=4", "task.levels=4", "model.pattern=local2d(12, 2, 6, 7, 7)", "run.steps=2", "run.batch=4")
    small += ("optim.lr=1e-3", "optim.warmup=100")
    words = ["image-transformer", "--size", "tiny", "--data", "photos", *SMALL, *small]
    assert main(["plan", *words, "--no-measure"]) == 0
    assert main(["train", *words, "--out", "run"]) == 0
    assert "next: everyformer generate run --out samples.png" in capsys.readouterr().err
    assert main(["evaluate", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["images"], found["targets"]) == (1, 48) and 0 < found["bits_per_dimension"] < 4

    sheets = []
    for seed in ("1", "1", "2"):
        assert main(["generate", "run", "--out", "new.png", "--images", "2", "--seed", seed]) == 0
        sheets.append((place / "new.png").read_bytes())
    assert sheets[0] == sheets[1] != sheets[2]
    assert main(["generate", "run", "--given", "0.5", "--images", "1"]) == 0
    with Image.open(place / "run" / "samples.png") as sheet:
        assert sheet.size == (84 + 8, 3 * 88 + 4)
    capsys.readouterr()
    for option, reason in {
        "--prompt=a": "--prompt is not an option of this run; leave it out (the options are --out, --images, --given, --temperature",
        "--out=new.jpg": "cannot write images to new.jpg; give a .png file in a folder that exists",
        "--images=0": "images is 0 and given is 0.0: give 1 image or more",
        "--given=1": "give 1 image or more, and a share of 0 or more, below 1",
        "--given=0.1": "is less than one block of 2 rows of 4; give more",
    }.items():
        assert main(["generate", "run", option]) == 2
        assert reason in capsys.readouterr().err

    assert main(["train", *words, "task.shrink=2", "--out", "larger"]) == 0
    assert main(["generate", "larger", "--out", "larger.png", "--images", "1"]) == 0
    assert "given an image 2 times smaller, generated, true" in capsys.readouterr().out
    assert main(["train", *words, "task.levels=257", "--out", "no"]) == 2
    assert "task.levels=257" in capsys.readouterr().err

    (place / "photos").rename(place / "elsewhere")
    assert main(["generate", "run", "--out", "new.png", "--images", "2", "--seed", "1"]) == 0
    assert (place / "new.png").read_bytes() == sheets[0]
    capsys.readouterr()
    for words in (["generate", "run", "--given", "0.5"], ["generate", "larger"], ["evaluate", "run"]):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert "there is no " in err and f"{place / 'photos'}; " in err


def test_runs_without_a_name_get_the_next_number(place, capsys):
    assert train("run.steps=1") == 0 and train("run.steps=1") == 0
    assert (place / "runs" / "byte-language-1").is_dir() and (place / "runs" / "byte-language-2").is_dir()


def test_a_plan_shows_what_a_run_takes_and_what_to_change(capsys):
    assert main(["plan", "gpt2", "--size", "tiny", "--no-measure", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 120_576 and found["fits"]
    assert main(["plan", "gpt2", "--size", "tiny", "--no-measure", "--memory", "0.3", "run.batch=256"]) == 0
    assert "to fit" in capsys.readouterr().out


def test_a_plan_proposes_a_command_quoted_for_the_shell(place, capsys):
    (place / "text.txt").rename(place / "a text.txt")
    words = ["gpt2", "--size", "tiny", "--data", "a text.txt", "run.batch=4", "run.batch_schedule=[[2, 8]]"]
    assert main(["plan", *words, "--no-measure"]) == 0
    assert shlex.split(capsys.readouterr().err.partition("next: ")[2]) == ["everyformer", "train", *words]
