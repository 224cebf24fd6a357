"""How much memory a run takes: of the device, or of this process on a CPU."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import torch


def peak(device: torch.device) -> int:
    """Bytes at the peak so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not getrusage: a process inherits that number from the one that began it.
    found = _field("VmHWM")
    if found is not None:
        return found
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident() -> int:
    """Bytes of this process in memory now."""
    return _field("VmRSS") or peak(torch.device("cpu"))


def there_is(device: torch.device) -> int:
    """Bytes that the device, or the machine or container, has for this process."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed = Path("/sys/fs/cgroup/memory.max")  # of a container
    text = allowed.read_text().strip() if allowed.is_file() else ""
    limits = [total, *([int(text)] if text.isdigit() else [])]
    with suppress(ImportError, AttributeError):  # not on every system
        import resource

        limits.append(resource.getrlimit(resource.RLIMIT_DATA)[0])
    return min(limit for limit in limits if limit > 0)  # below 0 is no limit


def _field(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), None)
