"""The pattern editor: the matrix of a pattern, its cost by kernel, and in which models it is legal."""

from __future__ import annotations

import math
import shlex
import threading
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from everyformer.attention.attend import KERNELS, choose
from everyformer.attention.kernels.request import Request
from everyformer.attention.parse import parse
from everyformer.attention.pattern import And, ByHead, Not, Or, Pattern
from everyformer.attention.projection import Standard
from everyformer.explore.answer import Answer, Ask
from everyformer.network.cache import SegmentMemory
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.layer import Layer
from everyformer.network.legal import illegal_reasons
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.output_head import Classify, Language, OutputHead
from everyformer.network.residual import PreNorm
from everyformer.study.pattern_images import check_size, example_context
from everyformer.value import named

MAX_LENGTH = 2048
HEAD_WIDTH = 16
Text = Annotated[str, Meta(max_length=2000)]


class PatternRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """A pattern as text, over `length` positions; the matrix is that of one head."""

    text: Text
    length: Annotated[int, Meta(ge=1, le=MAX_LENGTH)] = 64
    head: Annotated[int, Meta(ge=0, le=63)] = 0


class NoRequest(Struct, forbid_unknown_fields=True):
    """A request without fields."""


class Patterns:
    """Answers what the pattern editor asks."""

    def __init__(self, imports: Sequence[str] = ()) -> None:
        self.imports = imports
        self.lock = threading.Lock()  # an example of hashed keys is drawn from torch's generator
        self.asks = {
            "/api/pattern/names": Ask(NoRequest, self.names),
            "/api/pattern": Ask(PatternRequest, self.matrix),
            "/api/pattern/cost": Ask(PatternRequest, self.cost),
        }

    def names(self, request: NoRequest) -> Answer:
        """The patterns by name, with their fields and what they are."""
        kinds = {name: kind for name, kind in named(Pattern).items() if kind not in (And, Or, Not)}
        rows = [
            {"name": name, "fields": list(kind.__struct_fields__), "about": first_sentence(kind.__doc__)}  # type: ignore[attr-defined]
            for name, kind in kinds.items()
        ]
        return Answer({"patterns": rows})

    def matrix(self, request: PatternRequest) -> Answer:
        """Which pairs one head allows, one bit for each pair."""
        pattern, heads = read_pattern(request)
        head = request.head % heads
        with self.lock:
            context, notes = example_context(pattern, request.length)
            allowed_QK = pattern.mask(request.length, heads=heads, context=context)[head].numpy()
        data = {
            "pattern": str(pattern), "heads": heads, "head": head, "head_pattern": str(pattern.for_head(head)),
            "length": request.length, "allowed": int(allowed_QK.sum()), "notes": notes,
        }  # fmt: skip
        return Answer(data, [np.packbits(allowed_QK, axis=None, bitorder="little")])

    def cost(self, request: PatternRequest) -> Answer:
        """The share of the scores that each kernel computes, and in which models the pattern is legal."""
        pattern, heads = read_pattern(request)
        asked = Request.of(pattern, request.length, request.length, heads)
        kernels = [{"name": name} | _cost(name, asked) for name in KERNELS]
        chosen = next(name for name, kernel in KERNELS.items() if kernel is choose(asked, "auto"))
        uses = [
            {"use": use, "reasons": list(dict.fromkeys(illegal_reasons(model)))}
            for use, model in _uses(pattern, heads, request.length)
        ]
        data = {
            "pattern": str(pattern), "kernels": kernels, "auto": chosen, "uses": uses,
            "future": pattern.attends_to_future(heads=heads),
            "train": train_command(["sparse-transformer", "--size", "tiny", f"model.patterns={pattern}"], self.imports),
        }  # fmt: skip
        return Answer(data)


def train_command(words: Sequence[str], imports: Sequence[str]) -> str:
    """The command that trains a model, with the parts of one's own that it needs."""
    own = [word for name in imports for word in ("--import", name)]
    return shlex.join(["everyformer", "train", *words, *own, "--out", "runs/mine"])


def read_pattern(request: PatternRequest) -> tuple[Pattern, int]:
    """Returns the pattern, and as many heads as it distinguishes. Raises ValueError if the text is no pattern."""
    pattern = parse(request.text)
    heads = math.lcm(*(len(part.patterns) for part in pattern.walk() if isinstance(part, ByHead)))
    check_size(request.length, heads)
    return pattern, heads


def _cost(name: str, request: Request) -> dict[str, Any]:
    """What a kernel computes, as a share of all scores, or the reason why it does not support the pattern."""
    try:
        if reason := KERNELS[name].unsupported_reason(request):
            return {"reason": reason.replace(" on meta", "")}  # the device of a request without values
        return {"fraction": KERNELS[name].computed_fraction(request)}
    except ValueError as error:  # the pattern reads data, which a request without values does not have
        return {"reason": " ".join(str(error).split())}


def _uses(pattern: Pattern, heads: int, length: int) -> Iterator[tuple[str, Model]]:
    """Small models of each kind with this pattern in their layers."""
    width = HEAD_WIDTH * heads
    body = Stack(1, (Layer((Attention(Standard(heads), pattern), FeedForward(4 * width))),), PreNorm())

    def model(head: OutputHead, memory: SegmentMemory | None = None) -> Model:
        return Model(width=width, embed=Tokens(256), body=body, outputs=(head,), memory=memory)

    yield "a language model", model(Language())
    yield "a language model with a segment memory", model(Language(), SegmentMemory(length))
    yield "a classifier", model(Classify(2))


def first_sentence(text: str | None) -> str:
    paragraph = " ".join((text or "").partition("\n\n")[0].partition("Example:")[0].split())
    return paragraph
