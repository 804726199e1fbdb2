"""The number of examples that property tests draw, set by the hypothesis profile."""

from __future__ import annotations

from hypothesis import settings

_FULL = 100

# No time limit, since machines may be busy. Loaded before any test is imported (`conftest.py`),
# unless the command line names another profile: `pytest --hypothesis-profile=full`.
settings.register_profile("quick", deadline=None, max_examples=_FULL // 5)
settings.register_profile("full", deadline=None, max_examples=_FULL)
settings.load_profile("quick")


def examples(number: int) -> int:
    """Return `number` under the profile ``full``, a fifth of it under ``quick``."""
    return max(number * settings().max_examples // _FULL, 1)
