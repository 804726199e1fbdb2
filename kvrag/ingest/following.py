"""A thread that keeps the view of a shared index up to date."""

from __future__ import annotations

import logging
import threading

from kvrag.ingest.storage import Storage

logger = logging.getLogger("kvrag")


class Follower:
    """Refreshes an opened index, and its vectors, so that no question waits for that.

    Parameters
    ----------
    storage
        The index's storage.
    seconds
        The time between two refreshes.
    """

    def __init__(self, storage: Storage, seconds: float) -> None:
        self._storage = storage
        self._seconds = seconds
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvrag-follow", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; a refresh under way is finished."""
        self._is_ended.set()
        self._thread.join()

    def _run(self) -> None:
        version = self._storage.catalog.generation()
        has_failed = False
        while not self._is_ended.wait(self._seconds):
            try:
                found = self._storage.refresh()
                if found != version:
                    self._storage.vectors.get()
                version = found
                has_failed = False
            except Exception as error:  # a full disk too: this thread goes on
                if not has_failed:
                    logger.warning("answers stay at version %s of the index: %s", version, error)
                has_failed = True
