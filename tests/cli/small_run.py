"""A small run on the text of the fixture `place`."""

from __future__ import annotations

from everyformer.cli.main import main

SMALL = ("run.steps=6", "run.batch=4", "run.evaluate=3", "run.examples=4", "run.save=3")


def train(*words: str) -> int:
    return main(["train", "byte-language", "--size", "tiny", "--data", "text.txt", *SMALL, *words])
