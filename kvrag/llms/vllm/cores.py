"""The cores that this process may use, noted before vLLM binds its threads to single ones.

The worker's module imports it, which vLLM does before it binds anything.
"""

from __future__ import annotations

import os

PROCESS_CORES: frozenset[int] = (
    frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
)
"""Numbers of the cores; empty where the system does not say."""
