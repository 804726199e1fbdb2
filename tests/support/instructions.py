"""Every instruction set of this processor, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvrag.native import instruction_set, instruction_sets, use_instruction_set


@contextmanager
def kept_instruction_set() -> Iterator[None]:
    """Let a block use others; afterwards the one before is in use again."""
    before = instruction_set()
    try:
        yield
    finally:
        use_instruction_set(before)


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test under each of them."""
    with kept_instruction_set():
        use_instruction_set(request.param)
        yield request.param
