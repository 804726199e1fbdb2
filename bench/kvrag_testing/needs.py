"""Import of pytest for the suites."""

try:
    import pytest as pytest
except ImportError as error:
    raise ImportError("kvrag_testing's suites run under pytest: pip install pytest") from error
