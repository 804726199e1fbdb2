"""Chooses between the compiled kernels and the codecs' reference, for where none were compiled.

``KVRAG_ISA=reference`` in the environment takes the reference although there are compiled ones.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

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
