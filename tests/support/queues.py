"""A device of streams, whose work runs in any order that its events allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_VIEWS = frozenset(
    ("view", "slice", "select", "transpose", "split", "alias", "detach", "unsqueeze", "expand")
)


class QueueDevice:
    """Streams that do what was queued on them late, in random order, each in its own order.

    Parameters
    ----------
    seed
        Of the order, and of how far the device lags behind the host.
    haste
        How little it lags; None: as the seed says. With 0, nothing runs before somebody waits.
    """

    def __init__(self, seed: int, haste: float | None = None) -> None:
        self.random = Random(seed)
        self._haste = self.random.choice([0.0, 0.3, 0.7]) if haste is None else haste
        self._streams: list[Stream] = []
        self._current = self.stream()

    def stream(self, *_: object) -> Stream:
        made = Stream(self)
        self._streams.append(made)
        return made

    def current(self, *_: object) -> Stream:
        return self._current

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    @contextmanager
    def starting(self, stream: Stream) -> Iterator[None]:
        """Queue each operation on tensors in here, instead of carrying it out."""
        haste, self._haste = self._haste, 0.0
        try:
            with self.using(stream), _Starting(self):
                yield
        finally:
            self._haste = haste

    def queue(self, work: Callable[[], object]) -> None:
        """Queue work on the current stream."""
        self._current.work.append((None, work))
        self.wander()

    def wander(self) -> None:
        """Do some of the work that may be done now, perhaps none."""
        while self.random.random() < self._haste and self._step():
            pass

    def finish(self, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Do work until something has happened, or all of it."""
        while not is_enough() and self._step():
            pass

    def _step(self) -> bool:
        ready = [one for one in self._streams if one.is_ready()]
        if ready:
            self.random.choice(ready).work.popleft()[1]()
        return bool(ready)


class Stream:
    """Work in order; what waits for an event is (event, nothing to do)."""

    def __init__(self, device: QueueDevice) -> None:
        self.device = device
        self.work: deque[tuple[Event | None, Callable[[], object]]] = deque()

    def is_ready(self) -> bool:
        return bool(self.work) and (self.work[0][0] is None or self.work[0][0].is_done)

    def record_event(self) -> Event:
        event = Event(self.device)
        self.work.append((None, event.happen))
        self.device.wander()
        return event

    def wait_event(self, event: Event) -> None:
        self.work.append((event, lambda: None))

    def synchronize(self) -> None:
        self.device.finish(lambda: not self.work)

    def hurry(self, most: int | None = None) -> None:
        """Do what may be done now, or some of it, before all other streams."""
        while self.is_ready() and most != 0:
            self.work.popleft()[1]()
            most = None if most is None else most - 1


class Event:
    """Happens when the stream that recorded it comes to it."""

    def __init__(self, device: QueueDevice) -> None:
        self.device = device
        self.is_done = False

    def happen(self) -> None:
        self.is_done = True

    def query(self) -> bool:
        self.device.wander()
        return self.is_done

    def synchronize(self) -> None:
        self.device.finish(lambda: self.is_done)
        assert self.is_done, "the host waits for ever"


class _Starting(TorchDispatchMode):
    def __init__(self, device: QueueDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name in _VIEWS:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._device.queue(lambda: func(*args, **kwargs))
            return args[0]
        made = func(*args, **kwargs)  # for its shape
        if isinstance(made, torch.Tensor) and made.is_floating_point():
            made.fill_(float("nan"))
            self._device.queue(lambda: made.copy_(func(*args, **kwargs)))
        return made


def use(device: QueueDevice, patch: Any, num_readers: int = 1) -> None:
    """Let kvrag's code for cards run on a device; `patch` is pytest's MonkeyPatch."""
    from kvrag.codec import card as codec_card
    from kvrag.fusion import card, loader, staging
    from kvrag.loading import hot, threads
    from kvrag_bench.codec.played import play

    buffers = hot.PinnedBuffers(num_readers)
    streams = {"current_stream": device.current, "stream": device.using, "Stream": device.stream}
    for name, fake in streams.items():
        patch.setattr(torch.cuda, name, fake)
    copying = device.stream()
    for module in (card, staging):
        patch.setattr(module, "copy_stream", lambda _: copying)
        patch.setattr(module, "buffers", lambda: buffers)
        patch.setattr(
            module, "start_copy", lambda into, memory: device.queue(lambda: into.copy_(memory))
        )
    for module in (card, hot):
        patch.setattr(
            module, "page_locked", lambda size: torch.full((size,), 255, dtype=torch.uint8)
        )
    place = card.Placement.place
    patch.setattr(card.Placement, "place", lambda *given: device.queue(lambda: place(*given)))
    patch.setattr(loader, "_is_on_card", lambda _: True)
    decoding, decode, alive = device.stream(), codec_card.CardDecoding.decode, []
    patch.setattr(card, "decode_stream", lambda _: decoding)
    patch.setattr(staging, "can_decode", lambda *_: True)

    def started(_: object, name: str, grid: Any, *given: Any, **more: Any) -> None:
        device.queue(lambda: None if 0 in grid else play(name, *given, **more))

    def decoded(one: Any, *given: Any) -> None:
        alive.append((one, given))  # the work that is queued has addresses
        decode(one, *given)

    patch.setattr(codec_card.CardDecoding, "_start", started)
    patch.setattr(codec_card.CardDecoding, "decode", decoded)
    # Readers work when they are started, so that the order is the random one's alone.
    patch.setattr(threads, "start", _at_once)


def _at_once(work: Callable[[], Any], *_: object) -> Any:
    from concurrent.futures import Future

    done: Future[Any] = Future()
    done.set_result(work())
    return done
