"""The requests of a `Batcher`, and the events of a step: the next token of each request, with its probability."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from everyformer.infer.draw import Sampling, draw, draws
from everyformer.infer.sample import choose
from everyformer.network.cache import Cache

AHEAD = 64  # random numbers that are drawn at once


@dataclass(frozen=True)
class Event:
    """One token of a request. Example: `Event(number=1, token=65).ended is None`.

    number    of the request, as `submit` returned it
    token     the token; None if a request ends without one, because 0 tokens were asked for
    logprob   the logarithm of its probability at temperature 1; None for the first token of an echo, and with `logprobs=None`
    top       the most likely tokens here with their logprobs, as many as `logprobs`
    ended     with the last event of a request "stop" or "length", or "error" if its logits are NaN or infinite
    echo      whether this is a token of the prompt
    """

    number: int
    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    ended: str | None = None
    echo: bool = False


@dataclass(eq=False)
class Request:
    """A prompt with its options, and what has become of it."""

    number: int
    text: list[int]
    prompt: int  # its length
    left: int
    sampling: Sampling
    generator: Generator
    stop: frozenset[int]
    logprobs: int | None
    echo: bool
    drawn: deque[float] = field(default_factory=deque)
    cache: Cache | None = None  # of a request that is decoded alone
    gone: bool = False

    def uniform(self) -> float:
        """The next random number of this request; drawn ahead they are the same as one at a time."""
        if not self.drawn:
            self.drawn.extend(torch.rand(AHEAD, generator=self.generator, dtype=torch.float64).tolist())
        return self.drawn.popleft()


def draw_events(requests: list[Request], logits_BTV: Tensor, fused: bool) -> Iterator[Event]:
    """The next token of each request, drawn from its last logits, after the tokens of an echo."""
    last_BV = logits_BTV[:, -1]
    if fused and last_BV.is_cuda and all(draws(request.sampling) for request in requests):
        drawn, finite = _drawn_by_programs(requests, last_BV)
    else:
        finite, drawn = last_BV.amax(-1).isfinite().tolist(), _drawn(requests, last_BV)
    wanted = [row for row, request in enumerate(requests) if request.logprobs is not None]
    most = max((requests[row].logprobs or 0 for row in wanted), default=0)
    listed = dict(zip(wanted, _logprobs(last_BV[wanted], [drawn[row] for row in wanted], most), strict=True))
    for row, request in enumerate(requests):
        if request.echo:
            yield from _echo(request, logits_BTV[row])
        if request.gone:
            continue
        if not finite[row]:
            request.gone = True
            yield Event(request.number, None, ended="error")
            continue
        token, (logprob, top) = drawn[row], listed.get(row, (None, ()))
        request.text.append(token)
        request.left -= 1
        ended = "stop" if token in request.stop else "length" if request.left == 0 else None
        request.gone = ended is not None
        yield Event(request.number, token, logprob, top[: request.logprobs], ended)


def _echo(request: Request, logits_TV: Tensor) -> Iterator[Event]:
    """The tokens of the prompt, each with the logprob after those before it."""
    request.echo = False
    listed: list[tuple[float | None, tuple[tuple[int, float], ...]]] = [(None, ())] * len(request.text)
    if request.logprobs is not None and len(request.text) > 1:
        before_TV = logits_TV[-len(request.text) : -1]
        listed[1:] = _logprobs(before_TV, request.text[1:], request.logprobs)
    request.gone = request.left == 0
    for index, (token, (logprob, top)) in enumerate(zip(request.text, listed, strict=True), start=1):
        ended = "length" if request.gone and index == len(request.text) else None
        yield Event(request.number, token, logprob, top, ended, echo=True)


def _drawn(requests: list[Request], logits_BV: Tensor) -> list[int]:
    """The next token of each request, by its own options and its own random numbers."""
    same: dict[Sampling, list[int]] = {}
    for row, request in enumerate(requests):
        same.setdefault(request.sampling, []).append(row)
    token_B = torch.empty(len(requests), dtype=torch.long, device=logits_BV.device)
    for sampling, rows in same.items():
        some_BV = logits_BV if len(same) == 1 else logits_BV[rows]
        u_B1: Tensor | None = None
        if sampling[0]:
            numbers = [[requests[row].uniform()] for row in rows]
            u_B1 = torch.tensor(numbers, dtype=torch.float64, device=logits_BV.device)
        token_B[rows] = choose(some_BV, u_B1, *sampling)
    drawn: list[int] = token_B.tolist()
    return drawn


def _drawn_by_programs(requests: list[Request], logits_BV: Tensor) -> tuple[list[int], list[int]]:
    """The same by the programs of draw.py, and for each row whether its logits are finite."""
    numbers = [[request.sampling[0], request.uniform() if request.sampling[0] else 0.0] for request in requests]
    temperature_B, uniform_B = torch.tensor(numbers, dtype=torch.float64).T.contiguous().to(logits_BV.device)
    result_2B = torch.ones(2, len(requests), dtype=torch.long, device=logits_BV.device)
    draw(logits_BV, uniform_B, result_2B.new_zeros(1), temperature_B, result_2B[0], result_2B[1])
    drawn, finite = result_2B.tolist()
    return drawn, finite


def _logprobs(logits_NV: Tensor, tokens: list[int], count: int) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """The log probability of a token after each row of logits, and the `count` most likely tokens with theirs."""
    if not tokens:
        return []
    log_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)).log_softmax(-1)
    of_token = log_NV.gather(1, torch.tensor(tokens, device=log_NV.device)[:, None])[:, 0].tolist()
    values, ids = (x.tolist() for x in log_NV.topk(min(count, log_NV.shape[1])))
    return [(log, tuple(zip(*top, strict=True))) for log, *top in zip(of_token, ids, values, strict=True)]
