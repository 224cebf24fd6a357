"""The bodies of requests, read and checked. What this service does not do is refused, never left out silently."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from everyformer.network.output_head import Reading
from everyformer.serve.error import RequestError

Natural = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
AtLeastOne = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=1000)]
MAX_CHOICES, MAX_LOGPROBS, MAX_STOPS = 128, 20, 16


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class CompletionRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """What /v1/completions takes: OpenAI's fields, and top_k and min_p."""

    prompt: Any
    model: Text | None = None
    max_tokens: Natural | None = 16
    temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: AtLeastOne | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = 1
    best_of: AtLeastOne | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = False
    stop: str | list[str] | None = None
    seed: Seed | None = None
    user: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    suffix: str | None = None

    def check(self) -> None:
        """Raises RequestError for what this service does not do."""
        for name in ("presence_penalty", "frequency_penalty", "logit_bias", "suffix"):
            if getattr(self, name):
                raise RequestError(400, f"{name} is not supported by this service; leave it out", name)
        if self.best_of not in (None, self.n or 1):
            raise RequestError(
                400, f"best_of is {self.best_of}, but this service returns every choice; leave it out", "best_of"
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError(400, "stream_options are given without stream; set stream to true", "stream_options")
        stops = self.stops
        if len(stops) > MAX_STOPS or not all(0 < len(one) <= 1000 for one in stops):
            raise RequestError(
                400,
                f"stop has an empty or very long text, or more than {MAX_STOPS}; give up to {MAX_STOPS} texts",
                "stop",
            )

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class EmbeddingRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """What /v1/embeddings takes: OpenAI's fields, pooling and normalize."""

    input: Any
    model: Text | None = None
    encoding_format: str | None = "float"
    dimensions: AtLeastOne | None = None
    user: str | None = None
    pooling: Reading | None = None
    normalize: bool = True


class ClassifyRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """What /v1/classify takes."""

    input: Any
    model: Text | None = None
    user: str | None = None


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """What /tokenize takes, as lm-evaluation-harness sends it."""

    prompt: str
    model: Text | None = None
    add_special_tokens: bool = False


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """What /detokenize takes."""

    tokens: list[Natural]
    model: Text | None = None


T = TypeVar("T", bound=Struct)


def read_body(body: bytes, kind: type[T]) -> T:
    """Returns a body as a request of a kind. Raises RequestError with one sentence if it is none."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        path = where.strip("`").lstrip(".") or None
        if found := re.match(r"Object contains unknown field `(.*)`", message, re.S):
            known = ", ".join(kind.__struct_fields__)
            raise RequestError(
                400, f"there is no field {found[1][:100]!r}; the fields are {known}", found[1][:100]
            ) from None
        if found := re.match(r"Object missing required field `(.*)`", message):
            raise RequestError(400, f"the request has no {found[1]}; give one", found[1]) from None
        what = message.replace("`", "")
        raise RequestError(400, f"{path or 'the body'}: {what[0].lower()}{what[1:300]}", path) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        kinds = {RecursionError: "it is nested too deeply", UnicodeDecodeError: "it is not text in UTF-8"}
        reason = kinds.get(type(error), str(error))
        raise RequestError(400, f"the body is not valid JSON ({reason}); send one JSON object") from None


def inputs_of(value: Any, name: str) -> list[str | list[int]]:
    """Returns texts or lists of token ids: from one of either, or a list of them. Raises RequestError if it is none of these."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and value and (all(isinstance(one, str) for one in value) or all(map(_is_ids, value))):
        return value
    raise RequestError(
        400, f"{name} is neither a text, a list of texts, a list of token ids, nor a list of such lists", name
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int and 0 <= one < 1 << 31 for one in value)
