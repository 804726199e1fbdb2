"""Waiting for what other threads and processes do, on a machine that may be busy."""

import time
from collections.abc import Callable


def wait_until(is_so: Callable[[], object], seconds: float = 120.0) -> None:
    """Return once `is_so`; fail where it is not so for so long that something must be wrong."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
