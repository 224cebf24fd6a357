"""Literal definitions of sampling, beam search and evaluation, without code of the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence

LogP = Callable[[tuple[int, ...]], Sequence[float]]  # log P of every next token after some tokens


def filtered(
    probability: Sequence[float], top_k: int | None, top_p: float | None, min_p: float | None
) -> dict[int, float]:
    """The remaining tokens with their probabilities: top-k, then the nucleus of those, then min-p."""
    kept = sorted(range(len(probability)), key=lambda token: (-probability[token], token))
    if top_k is not None:
        kept = kept[:top_k]
    if top_p is not None:
        whole = sum(probability[token] for token in kept)
        nucleus: list[int] = []
        while sum(probability[token] for token in nucleus) / whole < top_p and len(nucleus) < len(kept):
            nucleus.append(kept[len(nucleus)])
        kept = nucleus
    if min_p is not None:
        kept = [token for token in kept if probability[token] >= min_p * probability[kept[0]]]
    whole = sum(probability[token] for token in kept)
    return {token: probability[token] / whole for token in kept}


def score(total: float, length: int, alpha: float) -> float:
    """Wu et al. 2016, eq. 14: log P(Y|X) / lp(Y), lp(Y) = (5 + |Y|)^alpha / (5 + 1)^alpha."""
    return total / ((5 + length) ** alpha / (5 + 1) ** alpha)


def exhaustive(log_p: LogP, end: int, max_tokens: int, alpha: float) -> list[int]:
    """The best of all outputs that end."""
    finished: list[tuple[float, tuple[int, ...]]] = []

    def grow(output: tuple[int, ...], total: float) -> None:
        for token, log in enumerate(log_p(output)):
            if token == end:
                finished.append((score(total + log, len(output) + 1, alpha), output))
            elif len(output) + 1 < max_tokens:
                grow((*output, token), total + log)

    grow((), 0.0)
    return list(max(finished)[1])


def beam(log_p: LogP, end: int, size: int, max_tokens: int, alpha: float) -> list[int]:
    """One sentence, step by step, until there are `size` outputs or `max_tokens` is reached."""
    hypotheses: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    outputs: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, max_tokens + 1):
        longer = [
            (total + log, (*output, token)) for total, output in hypotheses for token, log in enumerate(log_p(output))
        ]
        longer.sort(reverse=True)
        outputs += [(score(total, length, alpha), output[:-1]) for total, output in longer[:size] if output[-1] == end]
        hypotheses = [(total, output) for total, output in longer if output[-1] != end][:size]
        if len(outputs) >= size:
            break
    return list(max(outputs)[1]) if outputs else list(hypotheses[0][1])


def greedy(log_p: LogP, end: int, max_tokens: int) -> list[int]:
    output: tuple[int, ...] = ()
    while len(output) < max_tokens:
        logs = log_p(output)
        token = max(range(len(logs)), key=lambda one: logs[one])
        if token == end:
            break
        output = (*output, token)
    return list(output)


def window_nll(log_p: LogP, text: list[int], window: int, stride: int) -> float:
    """-log p of every token but the first, each once, from windows that move by `stride`; the last ends with the text."""
    total, done, start = 0.0, 0, 0
    while done < len(text) - 1:
        end = min(start + window, len(text) - 1)  # the number of the window's last target
        start = max(0, end - window)
        for target in range(done + 1, end + 1):
            total -= log_p(tuple(text[start:target]))[text[target]]
        done, start = end, start + stride
    return total
