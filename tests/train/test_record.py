"""Records of a run are read back, and a damaged file is named."""

from __future__ import annotations

import pytest

from everyformer.train.record import Records, read


def test_records_that_are_not_text_are_named_with_the_remedy(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"kind": "begin", "step": 0}\n\xff\xfe')
    with pytest.raises(ValueError, match=r"records\.jsonl is not text in UTF-8: byte 29 .*; restore the file"):
        list(read(path))


def test_records_are_read_up_to_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "records.jsonl"
    Records(path).write("step", 1, loss=2.0)
    path.write_text(path.read_text() + '{"kind": "st')
    assert [line["loss"] for line in read(path)] == [2.0]


def test_a_resumed_run_removes_later_records_and_those_that_it_writes_again(tmp_path):
    path = tmp_path / "records.jsonl"
    records = Records(path)
    for kind, step in (("step", 1), ("evaluate", 1), ("step", 2), ("evaluate", 2), ("final", 2), ("step", 3)):
        records.write(kind, step)
    Records(path, after=2, again=("evaluate", "final"))
    assert [(line["kind"], line["step"]) for line in read(path)] == [("step", 1), ("evaluate", 1), ("step", 2)]
