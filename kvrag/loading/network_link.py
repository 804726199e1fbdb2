"""What requests know about the link that they share: its speed, and the other requests on it."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvrag.loading.stream_plan import LinkState

# The time of a smaller transfer says more about the request than about the link.
_LEAST_BYTES = 2048
# A measurement's weight falls to about a third after so much further transfer time. A speed that
# was measured earlier starts with a weight of _PRIOR_SECONDS.
_MEMORY_SECONDS = 1.0
_PRIOR_SECONDS = 0.2


class Share:
    """One request on a link.

    Attributes
    ----------
    num_left
        Chunks that it still has to fetch.
    """

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left


class NetworkLink:
    """The link to one store, shared by all requests of an engine. Thread-safe.

    Its estimated speed is the harmonic mean of two speeds: that of the last chunk (CacheGen §5.3),
    and that of all recent chunks, so that one slow moment does not decide alone.

    Parameters
    ----------
    clock
        A monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._shares: list[Share] = []
        self._bytes_carried = 0
        self._last_speed: float | None = None
        self._lately_bytes = self._lately_seconds = 0.0
        self._request_seconds: float | None = None
        self._levels: Counter[str] = Counter()
        self._deadlines: Counter[str] = Counter()

    def expect(self, bytes_per_second: float) -> None:
        """Use a speed that was measured earlier, if none is known yet."""
        with self._lock:
            if self._last_speed is None:
                self._last_speed = bytes_per_second
                self._lately_bytes = bytes_per_second * _PRIOR_SECONDS
                self._lately_seconds = _PRIOR_SECONDS

    def note_request(self, seconds: float) -> None:
        """Record how long a request for almost no bytes took."""
        with self._lock:
            self._request_seconds = seconds

    @contextmanager
    def shared(self, num_chunks: int) -> Iterator[Share]:
        """Register a request for `num_chunks` chunks on the link while the block runs."""
        share = Share(num_chunks)
        with self._lock:
            self._shares.append(share)
        try:
            yield share
        finally:
            with self._lock:
                self._shares.remove(share)

    @property
    def state(self) -> LinkState:
        """What is currently known about the link."""
        with self._lock:
            left = [share.num_left for share in self._shares]
            speed = None
            if self._last_speed is not None:
                speed = 2.0 / (1.0 / self._last_speed + self._lately_seconds / self._lately_bytes)
            return LinkState(
                speed,
                self._request_seconds or 0.0,
                lambda ahead: max(1, sum(one > ahead for one in left)),
            )

    @contextmanager
    def carrying(self, num_bytes: int) -> Iterator[None]:
        """Measure the link while the block fetches `num_bytes` bytes.

        Bytes that other requests receive meanwhile count too, so the result is the throughput of
        the link, not this request's share of it.
        """
        with self._lock:
            before, started = self._bytes_carried, self._clock()
        yield
        with self._lock:
            self._bytes_carried += num_bytes
            seconds = self._clock() - started
            # The request's latency is not part of the speed. It is known only roughly.
            seconds -= min(self._request_seconds or 0.0, 0.5 * seconds)
            carried = self._bytes_carried - before
            # A small transfer is only a lower bound of the speed.
            is_telling = num_bytes >= _LEAST_BYTES or self._last_speed is None
            if is_telling and seconds > 0.0:
                self._last_speed = carried / seconds
                kept = math.exp(-seconds / _MEMORY_SECONDS)
                self._lately_bytes = self._lately_bytes * kept + carried
                self._lately_seconds = self._lately_seconds * kept + seconds

    def count(self, levels: Mapping[str, int], is_met: bool) -> None:
        """Count a request's chunks by level, and whether it met its deadline."""
        with self._lock:
            self._levels.update(levels)
            self._deadlines["met" if is_met else "missed"] += 1

    def counts(self) -> Mapping[str, Any]:
        """Return the counts of chunks by level (``text``, ``1/3`` ...), and of deadlines."""
        with self._lock:
            return {"levels": dict(self._levels), "deadlines": dict(self._deadlines)}
