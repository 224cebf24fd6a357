"""The signals that stop a run: SIGINT (Ctrl-C) and SIGTERM."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SAME_SIGNAL = 5.0  # seconds in which a signal is taken for the first one: launchers send it to a process twice


@contextmanager
def stop_signals(stops: Callable[[], bool], stop: Callable[[str], None]) -> Iterator[None]:
    """Call `stop` with the reason at the first signal. A second one ends the process at once.

    `stops` returns whether the run has been asked to stop, for whatever reason.
    """
    first = math.inf

    def handle(number: int, frame: Any) -> None:
        nonlocal first
        if stops() and number == signal.SIGINT:
            raise KeyboardInterrupt
        if time.monotonic() > first + SAME_SIGNAL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        first = min(first, time.monotonic())
        stop(f"asked to stop by {signal.Signals(number).name}")

    previous: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, handle)
    except ValueError:  # not in the main thread, which alone may handle signals
        previous = {}
    try:
        yield
    finally:
        for name, handler in previous.items():
            signal.signal(name, handler)
