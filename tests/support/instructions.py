"""Every instruction set of this processor, one after the other."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvrag.native.kernels import instruction_set, instruction_sets, use_instruction_set
from tests.support.properties import IS_EXHAUSTIVE


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Let PyTorch, and kernels with it, use this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def kept_instruction_set() -> Iterator[None]:
    """Let a block use others; afterwards the one before is in use again."""
    before = instruction_set()
    try:
        yield
    finally:
        use_instruction_set(before)


def _under(name: str) -> Iterator[str]:
    with kept_instruction_set():
        use_instruction_set(name)
        yield name


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test under each of them."""
    yield from _under(request.param)


@pytest.fixture(params=instruction_sets() if IS_EXHAUSTIVE else ("",), name="isa")
def isa_of_few(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test of what is built on kernels under the second or the last of them, by its name.

    The kernels themselves are tested under each (`isa`); this too if `EXHAUSTIVE`.
    """
    few = (instruction_sets()[:2][-1], instruction_sets()[-1])
    yield from _under(request.param or few[zlib.crc32(request.node.nodeid.encode()) % 2])
