"""How many examples property tests draw: the profile of hypothesis says."""

from __future__ import annotations

from hypothesis import settings

_FULL = 100

# Without a limit of time: machines are busy. Loaded before any test is imported (`conftest.py`),
# unless the command line names another: `pytest --hypothesis-profile=full`.
settings.register_profile("quick", deadline=None, max_examples=_FULL // 5)
settings.register_profile("full", deadline=None, max_examples=_FULL)
settings.load_profile("quick")


def examples(number: int) -> int:
    """Return `number` under the profile ``full``, a fifth of it under ``quick``."""
    return max(number * settings().max_examples // _FULL, 1)
