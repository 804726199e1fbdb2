"""The names of the precisions that a model can compute in."""

from __future__ import annotations

from kvrag.arguments import shown
from kvrag.errors import ParameterError

AUTO = "auto"
INT8 = "int8"
INT4 = "int4"
QUANTISED = (INT8, INT4)
"""What weights are copied in fewer bits for."""
COMPUTES = (AUTO, "float32", "bfloat16", *QUANTISED)
"""What can be asked for."""


def check_compute(compute: object) -> None:
    """Raise ParameterError unless `compute` is None or one of `COMPUTES`."""
    if compute is not None and compute not in COMPUTES:
        raise ParameterError(f"compute {shown(compute)}: expected one of {', '.join(COMPUTES)}")
