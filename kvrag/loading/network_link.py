"""What requests know of the link they share: how fast it is, and who else is on it."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvrag.loading.stream_plan import LinkState

# Less tells more of the request than of the link.
_LEAST_BYTES = 2048
# Seconds of carrying after which what was measured counts a third; and what prior knowledge counts.
_MEMORY_SECONDS = 1.0
_PRIOR_SECONDS = 0.2


class Share:
    """One request on a link.

    Attributes
    ----------
    num_left
        Chunks that it still has to bring.
    """

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left


class NetworkLink:
    """The way to one store, shared by all requests of an engine; safe to use from many threads.

    Its speed is taken for the harmonic mean of two: that of the chunk carried last (CacheGen
    §5.3), and that of all carried lately, so that one slow moment is not taken for the whole way.

    Parameters
    ----------
    clock
        Seconds, ever rising.
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
        """Take what was measured earlier for a speed that is not known yet."""
        with self._lock:
            if self._last_speed is None:
                self._last_speed = bytes_per_second
                self._lately_bytes = bytes_per_second * _PRIOR_SECONDS
                self._lately_seconds = _PRIOR_SECONDS

    def note_request(self, seconds: float) -> None:
        """Take note of what a request for next to nothing took."""
        with self._lock:
            self._request_seconds = seconds

    @contextmanager
    def shared(self, num_chunks: int) -> Iterator[Share]:
        """Have a share of the link for so many chunks."""
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
        """What is known now."""
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
        """Measure the link while the block brings so many bytes.

        What other requests have received meanwhile was carried as well: what is measured is the
        throughput of the link, not this request's share of it.
        """
        with self._lock:
            before, started = self._bytes_carried, self._clock()
        yield
        with self._lock:
            self._bytes_carried += num_bytes
            seconds = self._clock() - started
            # The request itself is not the link's speed; it is measured roughly.
            seconds -= min(self._request_seconds or 0.0, 0.5 * seconds)
            carried = self._bytes_carried - before
            # Little tells only that the link is no slower than that.
            is_telling = num_bytes >= _LEAST_BYTES or self._last_speed is None
            if is_telling and seconds > 0.0:
                self._last_speed = carried / seconds
                kept = math.exp(-seconds / _MEMORY_SECONDS)
                self._lately_bytes = self._lately_bytes * kept + carried
                self._lately_seconds = self._lately_seconds * kept + seconds

    def count(self, levels: Mapping[str, int], is_met: bool) -> None:
        """Count what a request got of each level, and whether it was in time."""
        with self._lock:
            self._levels.update(levels)
            self._deadlines["met" if is_met else "missed"] += 1

    def counts(self) -> Mapping[str, Any]:
        """Return chunks by level (``text``, ``1/3`` and so on) and deadlines met and missed."""
        with self._lock:
            return {"levels": dict(self._levels), "deadlines": dict(self._deadlines)}
