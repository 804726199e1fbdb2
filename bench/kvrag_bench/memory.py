"""Peak memory of a piece of work."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def peak_bytes(work: Callable[[], object]) -> int:
    """Return by how many bytes resident memory rose at the most while `work` ran.

    On Linux the kernel's high-water mark is reset first; elsewhere it cannot be, and only a rise
    above the process's earlier peak is seen.
    """
    gc.collect()
    if sys.platform == "linux":
        # Freed memory that the allocator keeps would hide what the work takes from it.
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR_REFS.write_text("5")
        before = _status_bytes("VmRSS")
        work()
        return max(0, _status_bytes("VmHWM") - before)
    scale = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    work()
    return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale - before)


def resident_bytes() -> int:
    """Return this process's resident memory, without what the allocator merely keeps (Linux)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in {_STATUS}")
