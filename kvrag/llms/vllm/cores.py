"""The cores that this process may use, recorded before vLLM binds its threads to single cores.

The worker's module imports this module, and vLLM imports that before it binds any thread.
"""

from __future__ import annotations

import os

PROCESS_CORES: frozenset[int] = (
    frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
)
"""Numbers of the cores; empty if the system does not report them."""
