"""A device of queues that run in random order, and respect nothing but events."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_VIEWS = frozenset(
    ("view", "slice", "select", "transpose", "split", "alias", "detach", "unsqueeze", "expand")
)


class Event:
    """Happens when its queue comes to it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.has_happened = False

    def query(self) -> bool:
        return self.has_happened

    def synchronize(self) -> None:
        self._device.run(lambda: self.has_happened)


class Device:
    """Operations are started on the current queue, and run at any later time.

    Attributes
    ----------
    current
        The name of the queue that operations are started on.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._queues: dict[str, deque[Callable[[], object]]] = {}
        self.current = ""

    def start(self, work: Callable[[], object]) -> None:
        self._queues.setdefault(self.current, deque()).append(work)

    def record(self) -> Event:
        event = Event(self)
        self.start(lambda: setattr(event, "has_happened", True))
        return event

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run what was started, in random order among the queues, until something holds."""
        while not until():
            waiting = [one for one in self._queues.values() if one]
            if not waiting:
                return
            self._random.choice(waiting).popleft()()

    def run_some(self) -> None:
        """Run a random number of operations."""
        left = self._random.randrange(6)
        for _ in range(left):
            waiting = [one for one in self._queues.values() if one]
            if waiting:
                self._random.choice(waiting).popleft()()

    @contextmanager
    def starting(self, queue: str) -> Iterator[None]:
        """Start each operation on tensors in here, instead of carrying it out."""
        before, self.current = self.current, queue
        try:
            with _Starting(self):
                yield
        finally:
            self.current = before


class _Starting(TorchDispatchMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name in _VIEWS:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._device.start(lambda: func(*args, **kwargs))
            return args[0]
        made = func(*args, **kwargs)  # for its shape
        if isinstance(made, torch.Tensor) and made.is_floating_point():
            made.fill_(float("nan"))
            self._device.start(lambda: made.copy_(func(*args, **kwargs)))
        return made
