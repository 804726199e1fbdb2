"""Suggestions for a name that was not found, for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

_MOST = 3


def like(name: str, known: Iterable[str]) -> str:
    """Return " (is it ...?)" with the most similar names, or "" if none is similar."""
    return suggestion(nearest(name, alike(name, known)))


def alike(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that are most similar to one, best first."""
    return difflib.get_close_matches(name, list(known), n=_MOST)


def nearest(name: str, found: Sequence[str]) -> list[str]:
    """Return those of similar names that are about as similar as the most similar one."""
    ratios = [difflib.SequenceMatcher(None, one, name).ratio() for one in found]
    return [one for one, ratio in zip(found, ratios, strict=True) if ratio > max(ratios) - 0.1]


def suggestion(found: Sequence[str]) -> str:
    """Return " (is it ...?)" with the first of these names, or "" if there are none."""
    return f" (is it {' or '.join(map(repr, found[:_MOST]))}?)" if found else ""


def beside(path: Path) -> list[str]:
    """Return the names in a path's folder, or none if it cannot be read."""
    try:
        return sorted(entry.name for entry in path.absolute().parent.iterdir())
    except OSError:
        return []
