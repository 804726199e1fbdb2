"""Turns at a model that computes one batch at a time.

Texts to embed may be thousands, and a question is one. Each batch of them takes a turn, in the
order of arrival, so that a question waits for a batch of each of the others at most.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar


def _nothing() -> None:
    """Let work go on."""


before_turn: ContextVar[Callable[[], None]] = ContextVar("before_turn", default=_nothing)
"""Called before each batch of the work in this context; an error that it raises ends the work."""


class Turns:
    """A lock whose holders come in the order in which they asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._is_taken = False

    def __enter__(self) -> None:
        before_turn.get()()
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        try:
            mine.acquire()
        except BaseException:  # an interrupt
            with self._lock:
                is_mine = mine not in self._waiting
                if not is_mine:
                    self._waiting.remove(mine)
            if is_mine:
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False
