"""Every instruction set of this processor, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvrag.native import instruction_set, instruction_sets, use_instruction_set


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = instruction_set()
    use_instruction_set(request.param)
    yield request.param
    use_instruction_set(before)
