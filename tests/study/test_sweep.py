"""The sweep over combinations."""

from __future__ import annotations

from everyformer.study.sweep import cells, sweep


def test_several_processes_find_the_same_as_one():
    models = [model for model in cells() if model is not None][:4]
    one, two = (sweep([*models, None], ["future", "pattern", "store"], jobs=jobs) for jobs in (1, 2))
    assert one.results == two.results and len(one.results) > 4 and one.refused == two.refused == 1
