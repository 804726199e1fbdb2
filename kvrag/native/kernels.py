"""Chooses between the compiled kernels and their reference, which runs where none were compiled.

``KVRAG_ISA=reference`` in the environment takes the reference although there are compiled ones.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

VARIABLE = "KVRAG_ISA"
REFERENCE = "reference"

if TYPE_CHECKING:
    from kvrag import _native as kernels
elif os.environ.get(VARIABLE) == REFERENCE:
    from kvrag.native import reference as kernels
else:
    try:
        from kvrag import _native as kernels
    except ImportError as error:
        # A module that is there but cannot be loaded is a fault to tell, not one to hide.
        if error.path is not None and error.path.endswith((".so", ".pyd")):
            raise
        from kvrag.native import reference as kernels

__all__ = ["REFERENCE", "VARIABLE", "kernels"]
