"""Sampling, beam search and evaluation, literally: one number at a time, nothing shared with the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence

LogP = Callable[[tuple[int, ...]], Sequence[float]]  # log P of every next token after these


def kept(share: Sequence[float], top_k: int | None, top_p: float | None, min_p: float | None) -> dict[int, float]:
    """The tokens that are left with their probabilities: top-k, then the nucleus of those, then min-p."""
    left = sorted(range(len(share)), key=lambda token: (-share[token], token))
    if top_k is not None:
        left = left[:top_k]
    if top_p is not None:
        whole = sum(share[token] for token in left)
        nucleus: list[int] = []
        while sum(share[token] for token in nucleus) / whole < top_p and len(nucleus) < len(left):
            nucleus.append(left[len(nucleus)])
        left = nucleus
    if min_p is not None:
        left = [token for token in left if share[token] >= min_p * share[left[0]]]
    whole = sum(share[token] for token in left)
    return {token: share[token] / whole for token in left}


def worth(total: float, length: int, alpha: float) -> float:
    """Wu et al. 2016, eq. 14: log P(Y|X) / lp(Y), lp(Y) = (5 + |Y|)^alpha / (5 + 1)^alpha."""
    return total / ((5 + length) ** alpha / (5 + 1) ** alpha)


def exhaustive(log_p: LogP, end: int, longest: int, alpha: float) -> list[int]:
    """The best of all answers that end."""
    found: list[tuple[float, tuple[int, ...]]] = []

    def grow(answer: tuple[int, ...], total: float) -> None:
        for token, log in enumerate(log_p(answer)):
            if token == end:
                found.append((worth(total + log, len(answer) + 1, alpha), answer))
            elif len(answer) + 1 < longest:
                grow((*answer, token), total + log)

    grow((), 0.0)
    return list(max(found)[1])


def beam(log_p: LogP, end: int, size: int, longest: int, alpha: float) -> list[int]:
    """One sentence, step by step, until there are `size` answers or no step is left."""
    hypotheses: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    answers: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, longest + 1):
        longer = [
            (total + log, (*answer, token)) for total, answer in hypotheses for token, log in enumerate(log_p(answer))
        ]
        longer.sort(reverse=True)
        answers += [(worth(total, length, alpha), answer[:-1]) for total, answer in longer[:size] if answer[-1] == end]
        hypotheses = [(total, answer) for total, answer in longer if answer[-1] != end][:size]
        if len(answers) >= size:
            break
    return list(max(answers)[1]) if answers else list(hypotheses[0][1])


def greedy(log_p: LogP, end: int, longest: int) -> list[int]:
    answer: tuple[int, ...] = ()
    while len(answer) < longest:
        logs = log_p(answer)
        token = max(range(len(logs)), key=lambda one: logs[one])
        if token == end:
            break
        answer = (*answer, token)
    return list(answer)


def nats(log_p: LogP, text: list[int], window: int, stride: int) -> float:
    """-log p of every token but the first, each once, from windows that move by `stride`; the last ends with the text."""
    total, done, start = 0.0, 0, 0
    while done < len(text) - 1:
        end = min(start + window, len(text) - 1)  # the number of the window's last target
        start = max(0, end - window)
        for target in range(done + 1, end + 1):
            total -= log_p(tuple(text[start:target]))[text[target]]
        done, start = end, start + stride
    return total
