"""Turns an out-of-memory error into one line: how much was requested, and which settings `everyformer plan` proposes."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from everyformer.train.recipe import Recipe

T = TypeVar("T")
MESSAGES = (
    *("out of memory", "can't allocate memory", "Cannot allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"),
    *(
        "failed to map segment",
        "can't start new thread",
        "without exception set",
        "without setting an exception",
    ),  # ulimit -v
)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(message in str(error) for message in MESSAGES)


def amount_requested(error: BaseException) -> str:
    """In parentheses, if the error states it."""
    amount = re.search(r"allocate ([\d.]+ ?(?:bytes|[KMGT]iB))", str(error))
    return f" ({amount[1]} were requested)" if amount else ""


def explain_out_of_memory(recipe: Recipe, run: Callable[[], T]) -> T:
    """Returns what `run` returns. Raises ValueError with a remedy if `run` is out of memory."""
    try:
        return run()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        requested = amount_requested(error)
    gc.collect()  # the run's tensors are freed only after the error is
    raise ValueError(f"out of memory{requested}; {_advice(recipe)}")


def _advice(recipe: Recipe) -> str:
    from everyformer.study.plan import plan, size_of

    try:
        planned = plan(recipe)
        if planned.fits:  # other programs use the memory: halve the tensors
            planned = plan(recipe, limit=planned.process + planned.tensors // 2)
    except (ValueError, MemoryError, RuntimeError):
        return "choose a smaller member or a smaller run.batch"
    if not planned.changes:
        return "no setting that everyformer plan tried fits; choose a much smaller member, or a larger machine"
    return f"the run needs {size_of(planned.memory)}; add {' '.join(planned.changes)}"
