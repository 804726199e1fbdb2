"""A thread that encodes and stores computed KV in order while the model goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

# Each waiting task holds the KV of one chunk. Two keep both sides busy and need little memory.
_MAX_WAITING = 4


class BackgroundWriter:
    """Runs tasks one after the other in a separate thread.

    After a task has failed, no other task runs, and the error is raised in the submitting
    thread. Leaving the context with an error drops the tasks that still wait. Leaving it without
    an error waits for all of them.
    """

    def __init__(self) -> None:
        self._tasks: queue.Queue[Callable[[], object] | None] = queue.Queue(_MAX_WAITING)
        self._error: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="kvrag-writer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped = kind is not None
        self._tasks.put(None)
        self._thread.join()
        if kind is None:
            self._raise()

    def submit(self, task: Callable[[], object]) -> None:
        """Queue a task. Blocks while the queue is full. Raises the error of an earlier task."""
        self._raise()
        self._tasks.put(task)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if self._error is not None or self._stopped:
                continue
            try:
                task()
            except BaseException as error:  # raised again by the submitting thread
                self._error = error
