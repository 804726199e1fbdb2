"""Libraries that only some stores need."""

from __future__ import annotations

import importlib
from typing import Any

from kvrag.errors import ParameterError


def require(module: str, extra: str) -> Any:
    """Import a library of an extra. Raises ParameterError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ParameterError(
            f"this needs the library {module.partition('.')[0]!r}, which is not installed: "
            f"pip install 'kvrag[{extra}]'"
        ) from error
