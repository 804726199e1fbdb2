"""Chooses between the compiled kernels and their reference, which runs where none were compiled.

``KVRAG_ISA=reference`` in the environment takes the reference although there are compiled ones.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

VARIABLE = "KVRAG_ISA"
REFERENCE = "reference"

if TYPE_CHECKING:
    from kvrag import _native as kernels
elif os.environ.get(VARIABLE) == REFERENCE or find_spec("kvrag._native") is None:
    from kvrag.native import reference as kernels
else:
    from kvrag import _native as kernels

__all__ = ["REFERENCE", "VARIABLE", "kernels"]
