"""Work for the time in which nobody asks, such as the records of prompts' first places."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Protocol

from kvrag.ingest.index import Index
from kvrag.store.base import capability
from kvrag.store.file import FileStore
from kvrag.store.limited import LimitedStore

logger = logging.getLogger("kvrag")

_IDLE_SECONDS = 0.5


class InterruptedWorkError(Exception):
    """Somebody asks, or the end has come."""


class IdleJob(Protocol):
    """Work that may wait.

    Attributes
    ----------
    if_it_fails
        What is lost by an error, for the log.
    """

    if_it_fails: str

    @abstractmethod
    def work(self, idle: Idle) -> None:
        """Do what there is to do; ask `idle` often whether that is still wanted."""


class Idle:
    """Does jobs in a thread while nobody asks, from `with` to its end.

    Parameters
    ----------
    jobs
        What to do, one after another, each time that somebody has asked. One that fails is logged,
        and not tried again.
    """

    def __init__(self, *jobs: IdleJob) -> None:
        self.jobs = list(jobs)
        self._changed = threading.Condition()
        self._num_asking = 0
        self._num_asked = 0
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="kvrag-idle", daemon=True)

    def __enter__(self) -> Idle:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._thread.join()  # at most a layer of one chunk

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While this lasts, nothing is done: what was begun is dropped at its next layer."""
        with self._changed:
            self._num_asking += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._num_asking -= 1
                self._num_asked += 1
                self._changed.notify_all()

    def check(self) -> None:
        """Raise InterruptedWorkError if somebody asks, or the end has come."""
        if not self.is_wanted():
            raise InterruptedWorkError

    def is_wanted(self) -> bool:
        """Return whether nobody asks, and the end has not come."""
        return not (self._is_stopped or self._num_asking)

    def _run(self) -> None:
        while self.jobs and (num_asked := self._idle()) is not None:
            try:
                for job in [*self.jobs]:
                    job.work(self)
            except InterruptedWorkError:
                continue
            except Exception as error:  # no answer depends on it, and nobody waits for it
                logger.warning("%s: %s", job.if_it_fails, error)
                self.jobs.remove(job)
                continue
            with self._changed:  # only a request brings something new
                self._changed.wait_for(lambda: self._is_stopped or self._num_asked != num_asked)

    def _idle(self) -> int | None:
        """Wait until nobody has asked for a while; return how many have, or None at the end."""
        with self._changed:
            while not self._is_stopped:
                self._changed.wait_for(lambda: self._is_stopped or not self._num_asking)
                if not self._changed.wait_for(lambda: not self.is_wanted(), _IDLE_SECONDS):
                    return self._num_asked
            return None


# Each record takes as much room as the chunk's other one.
_MOST_BYTES = 1 << 30
_LEAST_FREE_BYTES = 2 << 30


class FirstPlaces(IdleJob):
    """Makes the first places of an index's chunks.

    Chunks that searches found most often come first. It writes at most 1 GiB, and nothing where
    that would push other records out of the store, or fill the disk.

    Parameters
    ----------
    index
        The index.
    """

    if_it_fails = "first places of prompts are not prepared"

    def __init__(self, index: Index) -> None:
        self._index = index
        self._done: set[str] = set()
        self._room = _MOST_BYTES

    def work(self, idle: Idle) -> None:
        """Make what is missing, as far as there is room. Raises as `OnDemand.make` does."""
        if not self._may_write:
            return
        for chunk_id in self._wanted(idle):
            if self._room <= 0 or shutil.disk_usage(self._index.path).free < _LEAST_FREE_BYTES:
                return
            self._room -= self._index.on_demand.make(chunk_id, idle.check)
            self._done.add(chunk_id)

    @cached_property
    def _may_write(self) -> bool:
        index = self._index
        if not index.config.has_kv or capability(index.store, LimitedStore) is not None:
            return False
        if (folder_store := capability(index.store, FileStore)) is not None:
            folder_store.check_writable()
        return True

    def _wanted(self, idle: Idle) -> Iterator[str]:
        """Yield the ids of chunks that nobody has looked at here, those asked for most first."""
        index = self._index
        asked = Counter(index.found_chunk_ids)
        yield from (one for one, _ in asked.most_common() if one not in self._done)
        for source in index.catalog.documents.digests():
            idle.check()
            yield from (one for one in index.catalog.chunk_ids_of(source) if one not in self._done)
