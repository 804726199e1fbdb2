"""The KV of ended answers, in bounded room, for prompts that continue them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvrag.fusion.controller import Choice
from kvrag.fusion.kept import Kept, Overlap
from kvrag.fusion.layout import Layout

FEWEST_ROWS = 4
"""Fewer rows are not taken: computing them costs as little as copying them."""


class Sessions:
    """Keeps the KV of ended answers, and finds what a prompt may take most of.

    Prompts and answers are matched by their tokens. Several threads may use one object: what
    one takes is no other's until it is kept again.

    Parameters
    ----------
    max_bytes
        Room for all of them; 0 keeps nothing. The least recently used ones are dropped first.
    drop
        Takes what is dropped, with its name.
    """

    def __init__(self, max_bytes: int, drop: Callable[[str | None, Kept], None]) -> None:
        self.max_bytes = max_bytes
        self._drop = drop
        self._lock = threading.Lock()
        self._kept: list[tuple[str | None, Kept]] = []  # the most recent one last

    @property
    def size_bytes(self) -> int:
        """Bytes that are kept now."""
        with self._lock:
            return sum(kept.size_bytes for _, kept in self._kept)

    def worth(self, session: str | None, layout: Layout, choice: Choice) -> float:
        """Return how many rows `take` would save at most; parameters as there."""
        with self._lock:
            offers = self._offers(session, layout, choice)
        return max((worth for worth, *_ in offers), default=0.0)

    def take(
        self,
        session: str | None,
        layout: Layout,
        choice: Choice,
        least: float = FEWEST_ROWS,
    ) -> Overlap | None:
        """Return what a prompt may take, or None if there is nothing; the caller then owns it.

        Parameters
        ----------
        session
            Only what was kept under the same name is taken.
        layout
            The prompt.
        choice
            How it is to be repaired.
        least
            How many rows it must save.
        """
        with self._lock:
            offers = self._offers(session, layout, choice)
            # The most recent wins a draw.
            worth, place, overlap = max(offers, default=(0.0, 0, None))
            if overlap is None or worth < least:
                return None
            del self._kept[place]
            return overlap

    def keep(self, session: str | None, kept: Kept) -> None:
        """Keep an answer's KV, under a name or none."""
        with self._lock:
            self._kept.append((session, kept))
        for one in self.shrink(self.max_bytes):
            self._drop(*one)

    def shrink(self, most: int) -> list[tuple[str | None, Kept]]:
        """Take out the least recently used ones until the others have at most `most` bytes."""
        with self._lock:
            size = sum(one.size_bytes for _, one in self._kept)
            out = []
            while self._kept and size > most:
                out.append(self._kept.pop(0))
                size -= out[-1][1].size_bytes
            return out

    def _offers(
        self, session: str | None, layout: Layout, choice: Choice
    ) -> list[tuple[float, int, Overlap]]:
        """Return what can be taken: the rows that it saves, and its place in the list."""
        found = []
        for place, (name, kept) in enumerate(self._kept):
            if name == session:
                overlap = kept.overlap(layout, choice)
                found.append((overlap.num_rows - kept.cost, place, overlap))
        return found
