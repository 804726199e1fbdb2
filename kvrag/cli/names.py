"""Names like the one that was not found, for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

_MOST = 3


def like(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean ...?" in words, or "" where nothing is alike."""
    found = difflib.get_close_matches(name, list(known), n=_MOST)
    return f" (is it {' or '.join(map(repr, found))}?)" if found else ""


def beside(path: Path) -> list[str]:
    """Return the names in a path's folder, none where it cannot be read."""
    try:
        return sorted(entry.name for entry in path.absolute().parent.iterdir())
    except OSError:
        return []
