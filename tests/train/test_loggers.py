"""TensorBoard and wandb log the records, each step once, however a run is interrupted."""

from __future__ import annotations

import struct
import sys
from types import SimpleNamespace

import pytest

from everyformer.train.loop import resume, train
from everyformer.train.record import read
from tests.train.small import recipe, text


def recorded(folder, name):
    """The numbers of a name in the records: step -> number."""
    side, name = name.split("/")
    kind = {"train": "step", "valid": "evaluate"}[side]
    return {line["step"]: line[name] for line in read(folder / "records.jsonl") if line["kind"] == kind}


def shown(folder, name):
    """What TensorBoard shows: files are sorted by name, and a session that starts at a step hides all later events."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    events: list[Event] = []
    for file in sorted((folder / "tensorboard").iterdir()):
        raw, offset = file.read_bytes(), 0
        while offset < len(raw):  # length, its checksum, an event, its checksum
            (length,) = struct.unpack("<Q", raw[offset : offset + 8])
            event = Event.FromString(raw[offset + 12 : offset + 12 + length])
            offset += 16 + length
            if event.session_log.status == SessionLog.START:
                events = [one for one in events if one.step < event.step]
            events.append(event)
    pairs = [(one.step, value.simple_value) for one in events for value in one.summary.value if value.tag == name]
    assert len(dict(pairs)) == len(pairs), "a step is logged twice"
    return dict(pairs)


NAMES = ("train/loss", "train/lr", "valid/bits_per_byte")


def test_tensorboard_shows_each_step_of_the_records_once(tmp_path):
    folder = tmp_path / "run"
    train(recipe(text(tmp_path), "run.loggers=tensorboard"), folder)
    first = {name: recorded(folder, name) for name in NAMES}
    assert len(first["train/loss"]) == 12 and len(first["valid/bits_per_byte"]) == 2
    for name in NAMES:
        assert shown(folder, name) == pytest.approx(first[name])
    resume(folder, step=6)  # as after a crash: steps 7 to 12 are repeated
    for name in NAMES:
        assert recorded(folder, name) == first[name] and shown(folder, name) == pytest.approx(first[name])


class FakeWandb:
    """Behaves like wandb: rows by step, which never decreases."""

    def __init__(self):
        self.rows, self.started, self.ended, self.step = {}, [], 0, 0

    def init(self, **options):
        self.started.append(options)
        return SimpleNamespace(log=self.log, finish=self.finish)

    def log(self, numbers, step):
        assert step >= self.step, "wandb drops a step that is before the last one"
        row = self.rows.setdefault(step, {})
        assert not row.keys() & numbers.keys(), "logged twice"
        row |= numbers
        self.step = step

    def finish(self):
        self.ended += 1


def test_wandb_logs_each_step_once_and_continues_its_run(tmp_path, monkeypatch):
    fake, folder = FakeWandb(), tmp_path / "run"
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(recipe(text(tmp_path), "run.loggers=wandb"), folder)
    resume(folder, step=6)
    resume(folder, steps=14)
    for name in NAMES:
        rows = {step: row[name] for step, row in fake.rows.items() if name in row}
        assert rows == recorded(folder, name)
    ids = {options["id"] for options in fake.started}
    assert len(fake.started) == fake.ended == 3 and ids == {(folder / "wandb.txt").read_text().strip()}
    assert {options["resume"] for options in fake.started} == {"allow"}
    assert fake.started[0]["config"]["run"]["batch"] == 4 and fake.started[0]["dir"] == str(folder)


def test_a_failure_of_wandb_is_reported_with_the_remedy(tmp_path, monkeypatch):
    def init(**options):
        raise RuntimeError("no API key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(ValueError, match=r"no API key.*WANDB_MODE=offline"):
        train(recipe(text(tmp_path), "run.loggers=wandb"), tmp_path / "run")


@pytest.mark.parametrize("name, module", [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_logger_that_is_not_installed_is_refused_before_anything_is_written(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"run.loggers={name} needs {module}.*pip install 'everyformer\[{name}\]'"):
        train(recipe(text(tmp_path), f"run.loggers={name}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_loggers_are_separated_by_commas_and_unknown_ones_refused(tmp_path):
    both = recipe("x", "run.loggers=tensorboard,wandb")
    assert (
        both.run.loggers == ("tensorboard", "wandb") == recipe("x", 'run.loggers=["tensorboard", "wandb"]').run.loggers
    )
    assert recipe("x", "run.loggers=[]").run.loggers == ()
    with pytest.raises(ValueError, match=r"run\.loggers=tensorbord"):
        recipe("x", "run.loggers=tensorbord")
