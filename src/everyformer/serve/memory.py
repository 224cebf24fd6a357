"""Gives free memory back to the system, so that the memory of a service under load stays constant.

Prompts have many lengths, so blocks of many sizes are allocated and freed between those that stay. glibc keeps what lies between
them: the memory that is in use stays the same, and the free memory grows for hours.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

EVERY = 64  # steps; a call takes about as long as half a step
SHAPES = 64  # for which torch keeps what it compiled on a CPU; by default 1,024 in each of two caches
CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def limit_compiled_shapes() -> None:
    """Limits the caches of compiled operations. Has no effect once torch has computed something."""
    for name in CAPACITIES:
        os.environ.setdefault(name, str(SHAPES))


def memory_trimmer() -> Callable[[], object]:
    """Returns the function of the C library that gives free memory back, or one that does nothing where there is none."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return lambda: None
    return lambda: trim(0)
