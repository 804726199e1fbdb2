"""The KV of ended answers, in bounded memory, for prompts that continue them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvrag.fusion.controller import Choice
from kvrag.fusion.kept import Kept, Overlap
from kvrag.fusion.layout import Layout
from kvrag.kvcache import FusedKV

_FEWEST_ROWS = 4
"""Fewer rows are not taken: computing them costs as little as copying them."""
SESSION_BYTES = 1 << 30
"""Memory for the KV of ended answers, by default."""


class Sessions:
    """Keeps the buffers of ended answers, and finds the one that a prompt may take most of.

    Prompts and answers are matched by their tokens. Several threads may use one object: a
    buffer that one takes is no other's until it is kept again.

    Parameters
    ----------
    max_bytes
        Memory for all of them; 0 keeps nothing. The least recently used ones are dropped first.
    release
        Takes the buffers that are dropped.
    """

    def __init__(self, max_bytes: int, release: Callable[[FusedKV], None]) -> None:
        self.max_bytes = max_bytes
        self._release = release
        self._lock = threading.Lock()
        self._kept: list[tuple[str | None, Kept]] = []  # the most recent one last

    @property
    def size_bytes(self) -> int:
        """Bytes that are kept now."""
        with self._lock:
            return sum(kept.size_bytes for _, kept in self._kept)

    def take(self, session: str | None, layout: Layout, choice: Choice) -> Overlap | None:
        """Return what a prompt may take, or None if there is nothing; the caller then owns it.

        Parameters
        ----------
        session
            Only what was kept under the same name is taken.
        layout
            The prompt.
        choice
            How it is to be repaired.
        """
        with self._lock:
            found = {
                number: kept.overlap(layout, choice)
                for number, (name, kept) in enumerate(self._kept)
                if name == session
            }
            # The most recent wins a draw.
            place = max(found, key=lambda number: (found[number].num_rows, number), default=None)
            if place is None or found[place].num_rows < _FEWEST_ROWS:
                return None
            del self._kept[place]
            return found[place]

    def keep(self, session: str | None, kept: Kept) -> None:
        """Keep an answer's KV, under a name or none."""
        with self._lock:
            self._kept.append((session, kept))
            size = sum(one.size_bytes for _, one in self._kept)
            dropped = []
            while size > self.max_bytes:
                dropped.append(self._kept.pop(0)[1])
                size -= dropped[-1].size_bytes
        for one in dropped:
            self._release(one.kv)
