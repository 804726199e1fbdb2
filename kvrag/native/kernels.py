"""Chooses between the compiled kernels and the codecs' reference, for where none were compiled.

``KVRAG_ISA=reference`` in the environment takes the reference although there are compiled ones.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvrag.errors import ParameterError

VARIABLE = "KVRAG_ISA"
REFERENCE = "reference"

IS_COMPILED = os.environ.get(VARIABLE) != REFERENCE and find_spec("kvrag._native") is not None

if TYPE_CHECKING:
    from kvrag import _native as kernels
elif not IS_COMPILED:
    from kvrag.native import reference as kernels
else:
    from kvrag import _native as kernels

__all__ = ["IS_COMPILED", "REFERENCE", "VARIABLE", "kernels"]


# Chooses the instruction set of the kernels.


def instruction_set() -> str:
    """Return the name of the instruction set in use, as in ``KVRAG_ISA`` (`kvrag.native`)."""
    return kernels.instruction_set()


def instruction_sets() -> tuple[str, ...]:
    """Return the names of the instruction sets that this processor can run, slowest first."""
    return tuple(kernels.instruction_sets())


def use_instruction_set(name: str) -> None:
    """Use another instruction set from now on, in the whole process; for tests and benchmarks.

    Raises
    ------
    ParameterError
        If this processor, or this build, does not have it.
    """
    if not kernels.use_instruction_set(name):
        known = ", ".join(instruction_sets())
        raise ParameterError(f"instruction set: expected one of {known}, found {name!r}")


def _apply_environment() -> None:
    name = os.environ.get(VARIABLE)
    if not name:
        return
    try:
        use_instruction_set(name)
    except ParameterError as error:
        raise ParameterError(f"{VARIABLE}: {error}; unset it for the fastest one") from None


_apply_environment()
