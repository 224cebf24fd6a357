"""Memory in bytes: of a CUDA device, or of this process on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import torch


def peak_memory(device: torch.device) -> int:
    """Returns the largest amount of memory in use so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not getrusage, which includes the peak of the parent process.
    peak = _status_field("VmHWM")
    if peak is not None:
        return peak
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_memory() -> int:
    """Returns the resident memory of this process."""
    return _status_field("VmRSS") or peak_memory(torch.device("cpu"))


def _status_field(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), None)
