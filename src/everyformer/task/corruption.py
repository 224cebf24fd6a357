"""Takes random spans out of a window of tokens. Paper: Raffel et al. 2019, sections 3.1.4 and 3.3.4, and its code.

A window of L tokens loses n = round(share L) of them, in m = round(n / span) spans, both at least 1. The lengths of the m spans, and
those of the m parts before each of them, are drawn from all ways to write n, and L - n, as a sum of m numbers of at least 1:
    window   part_1 span_1 ... part_m span_m
    source   part_1 <1> ... part_m <m> [SEP]      what the encoder reads; <i> is the mark of span i, <extra_id_0> the first
    target   <1> span_1 ... <m> span_m [SEP]      what the decoder writes, after [CLS]
A tokenizer of T5 is read too: its <pad> starts the target, and its </s> ends both.
Departures: a figure of the paper has one more mark at the end of the target; its code has the end token alone.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Generator

from everyformer.data.tokenizer import Ids, Tokenizer

MARKS = [f"<extra_id_{number}>" for number in range(100)]


class SpanMarks:
    """The tokens that start and end a target, and the marks of the spans."""

    def __init__(self, tokenizer: Tokenizer, where: str):
        start, end = (_id(tokenizer, *names) for names in (("[CLS]", "<pad>"), ("[SEP]", "</s>")))
        self.spans = [id_ for name in MARKS if (id_ := tokenizer.special_id(name)) is not None]
        if start is None or end is None or not self.spans:
            raise ValueError(
                f"the tokenizer of {where} has no marks of spans ({MARKS[0]}, ...); give a run of the task denoise, or leave out "
                "--init-from"
            )
        self.start, self.end = start, end
        self.published = tokenizer.special_id("[CLS]") is None  # a tokenizer of T5
        self.number = {id_: number for number, id_ in enumerate(self.spans)}


def _id(tokenizer: Tokenizer, *names: str) -> int | None:
    """Returns the id of the first of these names that the tokenizer has."""
    return next((id_ for name in names if (id_ := tokenizer.special_id(name)) is not None), None)


def counts(length: int, share: float, span: float) -> tuple[int, int]:
    """Returns how many tokens a window loses, and in how many spans."""
    if length < 2:
        raise ValueError(f"a window of {length} tokens cannot lose one and keep one; give at least 2")
    missing = min(max(round(length * share), 1), length - 1)
    return missing, min(max(round(missing / span), 1), missing, length - missing)


def partition(total: int, parts: int, generator: Generator) -> list[int]:
    """Returns a random way to write a number as a sum of `parts` numbers of at least 1; all ways are equally likely."""
    ends = (torch.randperm(total - 1, generator=generator)[: parts - 1] + 1).sort().values.tolist()
    return [end - start for start, end in pairwise([0, *ends, total])]


def corrupt(token_T: Ids, marks: SpanMarks, share: float, span: float, generator: Generator) -> tuple[Ids, Ids]:
    """Returns the source and the target of a window."""
    missing, spans = counts(len(token_T), share, span)
    parts = partition(len(token_T) - missing, spans, generator)
    source: list[Any] = []
    target: list[Any] = []
    start = 0
    for mark, part, length in zip(marks.spans, parts, partition(missing, spans, generator), strict=False):
        source += [token_T[start : start + part], [mark]]
        target += [[mark], token_T[start + part : start + part + length]]
        start += part + length
    return np.concatenate([*source, [marks.end]]), np.concatenate([*target, [marks.end]])
