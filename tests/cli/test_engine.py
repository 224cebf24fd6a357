"""Train, evaluate, generate, resume and plan as a user types them."""

from __future__ import annotations

import io
import json
import shlex
import signal
from pathlib import Path
from shutil import rmtree

import pytest
from PIL import Image

from everyformer.cli.main import main
from everyformer.study.look import draw_spans
from everyformer.study.spans import Spans
from everyformer.train.loop import Loop
from everyformer.train.record import report_write_errors

SMALL = ("run.steps=6", "run.batch=4", "run.evaluate=3", "run.examples=4", "run.save=3")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("to be, or not to be: that is the question.\n" * 60)
    return tmp_path


def train(*words):
    return main(["train", "byte-language", "--size", "tiny", "--data", "text.txt", *SMALL, *words])


def test_a_run_is_trained_evaluated_written_from_and_resumed(place, capsys):
    assert train("--out", "run") == 0
    shown = capsys.readouterr().out
    assert "bits per byte" in shown and "next: everyformer generate run" in shown
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
        texts.append(capsys.readouterr().out.split("\nnext:")[0].strip("\n"))
    assert texts[0] == texts[1] != texts[3] and texts[0].startswith("to be")
    assert texts[0] == texts[2]
    for words, told in (
        (["generate", "run", "--stream", "--beam", "2"], "--beam finds the whole text"),
        (["evaluate", "run", "--memory", "9"], "task.memory is 9, but the model has no segment memory"),
        (["evaluate", "run", "--precision", "fp16", "--device", "cpu"], "fp16 on a CPU"),
        (["evaluate", "run", "--limit", "0"], "--limit 0"),
        (["generate", "run", "--tokens", "-1"], "--tokens -1: give 0 or more"),
        (["generate", "run", "--beam", "0"], "--beam 0: give a beam of 1 or more"),
    ):
        assert main(words) == 2 and told in capsys.readouterr().err

    assert main(["generate", "run", "--prompt", "-x", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("-x")

    assert main(["resume", "run", "--steps", "8"]) == 0
    assert (place / "run" / "checkpoints" / "00000008").is_dir()
    assert "anew" not in capsys.readouterr().out
    rmtree(place / "run" / "checkpoints")
    assert main(["resume", "run", "--steps", "2"]) == 0
    assert "run has no checkpoint: it begins anew" in capsys.readouterr().out


def test_an_agent_is_trained_evaluated_and_shown(place, capsys):
    small = ["--size", "tiny", "--task", "control", "run.steps=2", "run.batch=2", "task.copies=2", "task.segment=8"]
    assert main(["train", "lstm", *small, "run.evaluate=0", "task.episodes=4", "--out", "run"]) == 0
    shown = capsys.readouterr().out
    assert (
        "  return " in shown and "  episodes 4" in shown and "next: everyformer generate run --out episode.gif" in shown
    )
    assert main(["evaluate", "run", "--limit", "3", "--split", "test", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["low"] <= found["return"] <= found["high"] and found["episodes"] == 3 and found["length"] == 6
    assert main(["generate", "run"]) == 0
    assert "an episode of 6 steps" in capsys.readouterr().out
    assert (place / "run" / "episode.gif").is_file() and (place / "run" / "curves.png").is_file()
    for words in (["--images", "2"], ["--out", "episode.png"], ["--prompt", "to"]):
        assert main(["generate", "run", *words]) == 2
    assert main(["plan", "lstm", *small, "--no-measure"]) == 0
    assert "next: everyformer train lstm --size tiny --task control run.steps=2" in capsys.readouterr().out


@pytest.mark.spec(97)
def test_spans_are_shown_drawn_and_told(place, capsys):
    """By layer and head, with what they save."""
    words = ["--size", "tiny", "--data", "text.txt", "run.steps=1", "run.batch=2", "run.evaluate=0", "model.start=0.25"]
    assert main(["train", "adaptive-span", *words, "--out", "run"]) == 0
    capsys.readouterr()
    assert main(["show", "spans", "run", "--out", "spans.png"]) == 0
    shown = capsys.readouterr().out
    assert "head 3" in shown and "24.0 of 64 that a head could see (37." in shown and "operations" in shown
    assert (place / "spans.png").read_bytes().startswith(b"\x89PNG")
    assert main(["show", "spans", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(one) for one in found["each"]] == [4, 4] and found["flops"] < found["most_flops"]
    assert all(abs(z - 16) < 0.1 for one in found["each"] for z in one)  # 64 / 4, and a step
    assert main(["evaluate", "run", "--limit", "1"]) == 0
    assert "  span 16" in capsys.readouterr().out


def test_each_head_has_a_point_of_its_own_within_the_picture():
    each = [[16.0, 16.0, 16.0], [64.0, 0.0, 64.0]]
    (plot,) = draw_spans(Spans(each, keys=1.0, most=1.0, flops=1, most_flops=1)).axes
    points = [tuple(map(float, one)) for layer in plot.collections for one in layer.get_offsets()]
    assert len(set(points)) == 6 and [z for _, z in points] == each[0] + each[1]
    assert [round(x) for x, _ in points] == [0, 0, 0, 1, 1, 1] and plot.get_ylim()[1] > 64


def test_a_text_that_nobody_gave_is_cut_to_what_the_model_can_read(place, capsys):
    assert train("--out", "run", "model.context=16", "run.steps=1") == 0
    capsys.readouterr()
    assert main(["show", "attention", "run", "--out", "a.svg"]) == 0
    assert main(["show", "attention", "run", "--out", "a.svg", "--text", "Shall I compare thee"]) == 2
    assert "past the 16 positions" in capsys.readouterr().err


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
def test_a_run_that_is_stopped_is_not_done(place, capsys, monkeypatch, number, code):
    original = Loop._step

    def step(loop, at, records):
        if at in (4, 5):
            signal.raise_signal(number)
        original(loop, at, records)

    monkeypatch.setattr(Loop, "_step", step)
    assert train("--out", "a run") == code
    shown = capsys.readouterr().out
    assert "stopped at step 5" in shown and "\nnext: everyformer resume 'a run'\n" in shown
    assert shown.count("perplexity") == 1  # of step 3, where it was evaluated
    assert main(["resume", "a run", "run.steps=8"]) == code
    monkeypatch.undo()
    monkeypatch.chdir(place)
    assert main(["resume", "a run"]) == 0
    assert "next: everyformer generate 'a run' --prompt 'Once'\n" in capsys.readouterr().out


def test_what_cannot_be_written_is_told_with_what_is_kept(place):
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
def test_a_file_is_no_folder_for_a_run(verb, out, capsys):
    assert main([*verb.split(), "--out", out]) == 2
    told = f"text.txt is a file, so that no run can be written to {out}; give another folder as --out"
    assert told in capsys.readouterr().err


def test_a_refused_run_leaves_its_name_free(place, capsys):
    assert train("--out", "run", "run.batch=100000") == 2
    assert "is larger than the data set" in capsys.readouterr().err and not (place / "run").exists()
    assert train("--out", "run", "run.steps=1") == 0


def test_a_run_does_not_go_back_by_its_steps_and_says_what_of_it_is_broken(place, capsys):
    assert train("--out", "run") == 0
    for words in (["--steps", "2"], ["run.steps=2"]):
        assert main(["resume", "run", *words]) == 2
        assert "run is at step 6, past run.steps=2; raise run.steps" in capsys.readouterr().err
    assert '"steps": 6' in (place / "run" / "recipe.json").read_text()
    (place / "run" / "recipe.json").write_text("{")
    assert main(["evaluate", "run"]) == 2
    assert "recipe.json cannot be read" in capsys.readouterr().err


def test_data_come_from_standard_input(place, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((place / "text.txt").read_bytes())))
    assert main(["train", "byte-language", "--size", "tiny", "--data", "-", *SMALL, "run.steps=1", "--out", "run"]) == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    assert main(["generate", "run", "--tokens", "3"]) == 0


@pytest.mark.parametrize("tokenizer", ["bytes", "characters"])
def test_a_run_writes_when_its_data_are_gone(place, capsys, tokenizer):
    assert train("--out", "run", f"task.tokenizer={tokenizer}") == 0
    (place / "text.txt").unlink()
    assert main(["generate", "run", "--prompt", "to be", "--tokens", "3"]) == 0
    assert "to be" in capsys.readouterr().out
    assert main(["evaluate", "run"]) == 2


def test_changed_data_are_not_evaluated_and_a_refused_setting_is_not_kept(place, capsys):
    assert train("--out", "run") == 0
    with (place / "text.txt").open("a") as file:
        file.write("more")
    for words in (["evaluate", "run"], ["resume", "run", "--steps", "9"]):
        assert main(words) == 2
        assert "have changed since the run began" in capsys.readouterr().err
    assert '"steps": 6' in (place / "run" / "recipe.json").read_text()
    assert main(["generate", "run", "--tokens", "3"]) == 0
    capsys.readouterr()
    assert main(["generate", "run", "--out", "samples.png"]) == 2
    assert (
        "--out is not an option of this run; leave it out (the options are --prompt, --tokens, --beam, --temperature"
        in capsys.readouterr().err
    )


def test_a_model_of_ones_own_stands_where_a_member_does(place, capsys):
    assert main(["family", "gpt2", "--size", "tiny", "--json"]) == 0
    (place / "mine.json").write_text(capsys.readouterr().out.replace('"causal"', '"full"', 1))
    given = ["mine.json", "--data", "text.txt", "run.steps=2", "run.batch=2", "run.evaluate=0"]
    assert main(["train", *given]) == 2
    assert "the pattern full sees the future" in capsys.readouterr().err and not (place / "runs" / "mine-1").exists()
    (place / "mine.json").write_text((place / "mine.json").read_text().replace('"full"', '"causal"'))
    assert main(["contracts", "mine.json", "--only", "future"]) == 0
    assert main(["plan", *given, "--no-measure"]) == 0
    assert "train mine.json --data text.txt" in capsys.readouterr().out
    assert main(["train", *given]) == 0 and main(["generate", "runs/mine-1", "--tokens", "3"]) == 0
    assert main(["show", "attention", "runs/mine-1", "--beside", "runs/mine-1"]) == 0


def test_what_means_nothing_to_a_run_is_refused_with_what_does(place, capsys):
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
        ("text", ["--stream", "--beam=2"], "--beam finds the whole text at once"),
        (
            "pairs",
            ["--tokens=3"],
            "--tokens is not an option of this run; leave it out (the options are --prompt, --beam)",
        ),
        ("pairs", ["--top-k=3"], "--top-k is not an option"),
        ("pairs", ["--stream"], "does not generate text token by token; leave --stream out"),
        ("classes", ["--seed=3"], "--seed is not an option of this run; leave it out (the options are --prompt)"),
    ):
        assert main(["generate", run, "--prompt=a b", *option]) == 2
        assert reason in capsys.readouterr().err
    assert (
        main(["plan", "byte-language", "--size", "tiny", "--data", "text.txt", "--init-from", "text", "--no-measure"])
        == 0
    )
    assert "--init-from text" in capsys.readouterr().out


@pytest.mark.spec(98, 101, 102)
def test_pictures_of_a_folder_are_learned_painted_and_completed(place, capsys):
    (place / "photos").mkdir()
    for number in range(12):
        colour = (20 * number, 255 - 20 * number, 7)
        Image.new("RGB", (9 + number, 12), colour).save(place / "photos" / f"{number}.png")
    small = ("task.size=4", "task.levels=4", "model.local=2d", "run.steps=2", "run.batch=4")
    words = ["image-transformer", "--size", "tiny", "--data", "photos", *SMALL, *small]
    assert main(["plan", *words, "--no-measure"]) == 0
    assert main(["train", *words, "--out", "run"]) == 0
    assert "next: everyformer generate run --out samples.png" in capsys.readouterr().out
    assert main(["evaluate", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["images"], found["dimensions"]) == (1, 48) and 0 < found["bits_per_dimension"] < 4

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


def test_runs_without_a_name_get_free_ones(place, capsys):
    assert train("run.steps=1") == 0 and train("run.steps=1") == 0
    assert (place / "runs" / "byte-language-1").is_dir() and (place / "runs" / "byte-language-2").is_dir()


def test_a_plan_says_what_a_run_takes_and_what_to_change(capsys):
    assert main(["plan", "gpt2", "--size", "tiny", "--no-measure", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 120_576 and found["fits"]
    assert main(["plan", "gpt2", "--size", "tiny", "--no-measure", "--memory", "0.3", "run.batch=256"]) == 0
    assert "to fit" in capsys.readouterr().out


def test_a_plan_proposes_a_command_that_a_shell_reads_as_it_was_given(place, capsys):
    (place / "text.txt").rename(place / "a text.txt")
    words = ["gpt2", "--size", "tiny", "--data", "a text.txt", "run.batch=4", "run.batch_schedule=[[2, 8]]"]
    assert main(["plan", *words, "--no-measure"]) == 0
    assert shlex.split(capsys.readouterr().out.partition("next: ")[2]) == ["everyformer", "train", *words]


@pytest.mark.parametrize(
    "words, message",
    [
        (["train", "gpt3"], "did you mean gpt2"),
        (["train", "gpt2", "--size", "tny"], "did you mean tiny"),
        (["train", "gpt2", "--task", "languge"], "did you mean language"),
        (["train", "gpt2", "--size", "tiny", "run.stps=3"], "did you mean steps"),
        (
            ["train", "gpt2", "--size", "tiny", "rum.steps=3"],
            "there is no setting 'rum.steps'; did you mean run.steps?",
        ),
        (["train", "gpt2", "--size", "tiny", "lr=3"], "there is no setting 'lr'; did you mean optim.lr?"),
        (["train", "gpt2", "--size", "tiny", "rum.stps=3"], "settings begin with run., optim., model. or task."),
        (["train", "gpt2", "--size", "tiny", "run.steps="], "run.steps= has no value; write one after the ="),
        (["train", "gpt2", "--size", "tiny", "model.widht=3"], "did you mean width"),
        (["train", "gpt2", "--size", "tiny", "run.steps=many"], "run.steps=many: expected int"),
        (["train", "gpt2", "--size", "tiny", "steps"], "write path=value"),
        (["train", "gpt2", "--size", "tiny", "--data", "nowhere"], "there is no file or folder nowhere"),
        (["train", "gpt2", "--size", "tiny", "--data", "text.txt", "model.context=9999"], "longer than"),
        (["train", "gpt2", "--size", "tiny", "run.precision=fp16", "run.device=cpu"], "fp16 on a CPU"),
        (["train", "gpt2", "--size", "tiny", "run.device=moon"], "the device moon"),
        (["train", "GPT2"], "did you mean gpt2"),
        (["train", "gpt2", "--size", "tiny", "model.width=64.5"], "model.width=64.5: expected int"),
        (
            ["train", "gpt2", "--size", "tiny", "task.valid=0"],
            "0 tokens for valid; give more text, or another task.valid",
        ),
        (["plan", "gpt2", "--size", "tiny", "--memory", "-3"], "--memory -3"),
        (["plan", "gpt2", "--size", "tiny", "--memory", "inf"], "--memory inf"),
        (["plan", "gpt2", "--size", "tiny", "--memory", "nan"], "--memory nan"),
        (["evaluate", "nothing"], "is not a run"),
        (["resume", "nothing"], "is not a run"),
        (["generate", "nothing"], "is not a run"),
    ],
)
def test_what_is_wrong_is_named(words, message, capsys):
    assert main(words) == 2
    assert message.lower() in capsys.readouterr().err.lower()


def test_a_fraction_is_not_rounded_to_a_whole_number(capsys):
    for words in (["resume", "run", "--steps", "2.6"], ["show", "pattern", "causal", "--length", "3.7"]):
        with pytest.raises(SystemExit):
            main(words)
        assert f"{words[-1]} is not a whole number" in capsys.readouterr().err


def test_what_may_not_be_read_or_written_is_named(place, monkeypatch, capsys):
    assert train("--out", "run") == 0

    def locked(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", locked)
    assert train("--out", "other") == 2
    assert "cannot use other (Permission denied); choose another place" in capsys.readouterr().err
    monkeypatch.setattr(Path, "read_text", locked)
    assert main(["evaluate", "run"]) == 2
    assert "recipe.json (Permission denied)" in capsys.readouterr().err


def test_a_run_that_lost_its_tokenizer_is_not_read_with_another(place, capsys):
    assert train("--out", "run", "task.tokenizer=characters") == 0
    (place / "run" / "characters.json").unlink()
    for verb in ("generate", "evaluate", "resume"):
        assert main([verb, "run"]) == 2
        assert (
            "run has no characters.json, which says what its tokens mean; bring the file back"
            in capsys.readouterr().err
        )


def test_the_recipe_of_a_run_tells_the_tokenizer_that_it_took_over(place, capsys):
    assert train("--out", "old", "task.tokenizer=characters") == 0
    assert train("--out", "new", "--init-from", "old") == 0
    assert json.loads((place / "new" / "recipe.json").read_text())["task"]["tokenizer"] == "characters"
    (place / "new" / "characters.json").unlink()
    assert main(["generate", "new"]) == 2
    assert "new has no characters.json" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["hashed", "chunked"])
def test_the_bits_of_a_model_that_leaks_say_so(place, capsys, form):
    given = ["train", "reformer", "--size", "tiny", "--data", "text.txt", "--out", "run", *SMALL, "run.steps=1"]
    assert main([*given, f"model.form={form}"]) == 0 and main(["evaluate", "run"]) == 0
    told = " ".join(capsys.readouterr().out.split())  # in one line, however wide the terminal is
    assert told.count("leaks the future") == (told.count("bits per byte") if form == "chunked" else 0)


def test_only_who_goes_on_needs_the_optimizer(place, capsys):
    assert train("--out", "run") == 0
    for file in (place / "run").rglob("optimizer.safetensors"):
        file.unlink()
    assert main(["evaluate", "run", "--step", "best"]) == 0 and main(["generate", "run", "--tokens", "3"]) == 0
    assert train("--out", "next", "--init-from", "run") == 0
    assert main(["resume", "run", "--steps", "7"]) == 2
    assert "has lost optimizer.safetensors" in capsys.readouterr().err


def test_pictures_that_do_not_fit_the_model_leave_no_run(place, capsys):
    for number in range(8):
        (place / "pictures" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("L", (10, 10), 9 * number).save(place / "pictures" / "ab"[number % 2] / f"{number}.png")
    given = ["train", "vit", "--size", "tiny", "--data", "pictures", "--out", "run", *SMALL, "run.batch=2"]
    assert main(given) == 2
    assert "set model.patch to what divides 10" in capsys.readouterr().err
    assert main([*given, "model.image=14"]) == 2
    assert (
        "have 10 x 10 pixels, which patches of 7 x 7 do not divide into the 5 tokens" in capsys.readouterr().err
        and not (place / "run").exists()
    )
    assert main([*given, "model.image=20", "model.patch=5"]) == 2
    assert "patches of 5 x 5 do not divide into the 17 tokens" in capsys.readouterr().err
    assert main([*given, "model.patch=5"]) == 0
    (place / "run" / "classes.json").write_text('{"kind": "im')
    assert main(["evaluate", "run"]) == 2
    assert "classes.json is broken" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_not_advised(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["train", "gpt2", "--size", "tiny", "run.device=moon"]) == 2
    assert capsys.readouterr().err.endswith("; try auto or cpu\n")


def test_a_folder_that_exists_is_left_alone(place, capsys):
    (place / "full").mkdir()
    (place / "full" / "mine.txt").write_text("keep me")
    assert train("--out", "full") == 2
    assert "already exists" in capsys.readouterr().err and (place / "full" / "mine.txt").read_text() == "keep me"
