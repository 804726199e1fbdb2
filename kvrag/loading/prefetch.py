"""Loads the layers of several records in the background, in order."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch

from kvrag.loading import threads

Work = Callable[[int, int], None]
"""Loads a layer of a lane, given the numbers of lane and layer."""

_LEAST_AHEAD = 2


class LayerPrefetch:
    """Loads every lane layer by layer in other threads, ahead of the thread that computes.

    A lane is one record. The layers of a lane are loaded one after the other, those of different
    lanes at the same time, the lowest layer first. Threads write each layer to its destination at
    once, so a thread holds only one block of one record in memory.

    Source: CacheBlend (arXiv 2405.16444) §5.2, which loads layer i + 1 while layer i is computed.
    Deviation: loading runs up to a quarter of the layers ahead. If a policy compares all tokens,
    its first layers take several times as long as others, and loading only one layer ahead would
    leave the store idle. Without a bound, the whole buffer would fill while these layers' hidden
    states are in memory.

    Parameters
    ----------
    num_lanes, num_layers
        How many lanes and layers there are.
    work
        Called by one thread at a time for each lane. An exception ends its lane.
    num_threads
        Threads, but not more than there are lanes. A thread that must wait for the caller is
        released meanwhile, since another prompt may need it. 0: the caller loads each layer when it
        waits for it.
    num_ahead
        How many layers may be loaded ahead of the one that is asked for, instead of a quarter.

    Notes
    -----
    Callers must call `close`. Afterwards no thread is at work.
    """

    def __init__(
        self,
        num_lanes: int,
        num_layers: int,
        work: Work,
        *,
        num_threads: int,
        num_ahead: int | None = None,
    ) -> None:
        self._work = work
        self._num_layers = num_layers
        # A heap of the next layer of each lane that no thread works on, and its number.
        self._idle = [(0, lane) for lane in range(num_lanes if num_layers else 0)]
        self._num_left = [num_lanes] * num_layers
        self._num_ahead = max(_LEAST_AHEAD, num_layers // 4) if num_ahead is None else num_ahead
        self._asked_layer = 0
        self._num_threads = min(num_threads, num_lanes)
        self._num_running = 0
        self._failures: dict[int, Exception] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._num_busy = 0
        self._busy_since = 0.0
        self._busy_seconds = self._waited_seconds = 0.0
        # Each thread has its own mode; the work runs in the caller's.
        self._inference_mode = torch.is_inference_mode_enabled()
        self._threads: list[Future[None]] = []
        with self._changed:
            self._start()

    @property
    def busy_seconds(self) -> float:
        """Wall seconds in which at least one thread was at work."""
        with self._changed:
            running = time.perf_counter() - self._busy_since if self._num_busy else 0.0
            return self._busy_seconds + running

    @property
    def hidden_seconds(self) -> float:
        """Wall seconds of work during which nobody waited; complete after `close`."""
        return max(0.0, self.busy_seconds - self._waited_seconds)

    def wait(self, layer_index: int) -> Mapping[int, Exception]:
        """Wait until a layer is loaded in all lanes; callers ask for each layer once, in order.

        Returns
        -------
        mapping
            Lanes that have failed, in this layer or later ones, and why: all of them, so that one
            restart is enough. Empty if the layer and all before it are loaded.
        """
        if not self._num_threads:
            return self._load_here(layer_index)
        busy_before = self.busy_seconds
        has_failed = self._wait_for(
            layer_index, lambda: self._failures or not self._num_left[layer_index]
        )
        self._waited_seconds += self.busy_seconds - busy_before
        return self.drain() if has_failed else {}

    def is_loaded(self, layer_index: int) -> bool:
        """Ask for a layer, and return whether `wait` would begin at once; if not, it is coming."""
        if not self._num_threads:
            return True
        with self._changed:
            self._ask(layer_index)
            return bool(self._failures) or not self._num_left[layer_index]

    def drain(self) -> Mapping[int, Exception]:
        """Wait until every lane is loaded or has failed; return those that failed, and why."""
        return self._wait_for(self._num_layers, lambda: not self._idle and not self._num_busy)

    def _wait_for(self, layer_index: int, is_here: Callable[[], object]) -> Mapping[int, Exception]:
        with self._changed:
            self._ask(layer_index)
            self._changed.wait_for(is_here)
            return dict(self._failures)

    def _load_here(self, last_layer: int) -> Mapping[int, Exception]:
        """Load layers up to one in this thread; after a failure all, to find all damage."""
        while self._idle and self._idle[0][0] <= last_layer:
            layer_index, lane = heapq.heappop(self._idle)
            try:
                self._work(lane, layer_index)
            except Exception as error:
                self._failures[lane], last_layer = error, self._num_layers
            else:
                if layer_index + 1 < self._num_layers:
                    heapq.heappush(self._idle, (layer_index + 1, lane))
        return self._failures

    def close(self) -> None:
        """Start no more work and wait for running work. Nothing is written afterwards."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        threads.end(self._threads)

    def _ask(self, layer_index: int) -> None:
        """Let the threads load as far ahead as is allowed when this layer is needed."""
        if layer_index > self._asked_layer:
            self._asked_layer = layer_index
            self._changed.notify_all()
            self._start()

    def _start(self) -> None:
        """Start threads for idle lanes that may continue, up to the limit."""
        num_lanes = sum(map(self._may_begin, self._idle))
        self._threads = [thread for thread in self._threads if not thread.done()]
        for _ in range(min(num_lanes, self._num_threads - self._num_running)):
            self._threads.append(threads.start(self._run))
            self._num_running += 1

    def _run(self) -> None:
        with torch.inference_mode(self._inference_mode), torch.no_grad():
            while (taken := self._take()) is not None:
                failure = None
                try:
                    self._work(taken[1], taken[0])
                except Exception as error:
                    failure = error
                self._put_back(*taken, failure)

    def _take(self) -> tuple[int, int] | None:
        """Return the lowest layer of an idle lane, for this thread; None to end the thread."""
        with self._changed:
            while not self._is_closed:
                if self._idle and self._may_begin(self._idle[0]):
                    if not self._num_busy:
                        self._busy_since = time.perf_counter()
                    self._num_busy += 1
                    return heapq.heappop(self._idle)
                if not self._num_busy:
                    break
                # A busy lane will become idle.
                self._changed.wait()
            self._num_running -= 1
            return None

    def _may_begin(self, one: tuple[int, int]) -> bool:
        """Whether a lane's layer is not too far ahead of the computation."""
        return one[0] <= self._asked_layer + self._num_ahead

    def _put_back(self, layer_index: int, lane: int, failure: Exception | None) -> None:
        with self._changed:
            self._num_busy -= 1
            if not self._num_busy:
                self._busy_seconds += time.perf_counter() - self._busy_since
            if failure is not None:
                self._failures[lane] = failure
            else:
                self._num_left[layer_index] -= 1
                if layer_index + 1 < self._num_layers:
                    heapq.heappush(self._idle, (layer_index + 1, lane))
            self._changed.notify_all()
