"""A run that finds no room: how much it asked for, and what the plan would change."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from everyformer.train.recipe import Recipe

T = TypeVar("T")
SURE = 0.8  # of the memory that there is: what did not fit once shall fit now
FAILED = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def with_room(recipe: Recipe, run: Callable[[], T]) -> T:
    """What `run` gives. Where memory does not suffice a ValueError says what would."""
    try:
        with _limited(recipe):
            return run()
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(sign in str(error) for sign in FAILED):
            raise
        asked = _asked(str(error))
    gc.collect()  # only now, without the error, is what the run held let go
    raise ValueError(f"out of memory{asked}; {_advice(recipe)}")


@contextmanager
def _limited(recipe: Recipe) -> Iterator[None]:
    """On a CPU a request for more memory than there is fails here, where Linux would grant it and end the process later."""
    from everyformer.train.distributed import find_device
    from everyformer.train.memory import total_memory

    device = find_device(recipe.run.device)
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (total_memory(device), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _asked(message: str) -> str:
    found = re.search(r"allocate ([\d.]+) ?(bytes|[KMGT]iB)", message)
    if found is None:
        return ""
    number, unit = found.groups()
    return f": {f'{int(number) / 2**20:,.0f} MiB' if unit == 'bytes' else f'{number} {unit}'} more were asked for"


def _advice(recipe: Recipe) -> str:
    import torch

    from everyformer.study.plan import plan, size_of
    from everyformer.train.distributed import find_device
    from everyformer.train.memory import total_memory

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        found = plan(recipe, limit=int(SURE * total_memory(find_device(recipe.run.device))))
        if found.fits:  # then others have taken the memory: get along with half of the tensors
            found = plan(recipe, limit=found.process + found.tensors // 2)
    except (ValueError, MemoryError, RuntimeError) as error:
        return f"no plan can be made either ({error}); take a smaller member"
    need = f"the plan needs {size_of(found.memory)} and looked for {size_of(found.limit)}"
    if found.changes is None:
        return f"{need}, but nothing that it tried fits: take a much smaller member, or a larger machine"
    return f"{need}: add {' '.join(found.changes)}"
