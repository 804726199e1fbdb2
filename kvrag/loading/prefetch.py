"""Loads the layers of several records in the background, in order."""

from __future__ import annotations

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
        Threads, at least 1, but not more than there are lanes. A thread that must wait for the
        caller is released meanwhile, since another prompt may need it.
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
        self._next = [0] * num_lanes
        self._idle = set(range(num_lanes)) if num_layers else set()
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
        self._busy_seconds = 0.0
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

    def wait(self, layer_index: int) -> Mapping[int, Exception]:
        """Wait until a layer is loaded in all lanes, or a lane has failed.

        Returns
        -------
        mapping
            Lanes that have failed so far, and why. Empty if the layer and all before it are loaded.
        """
        with self._changed:
            self._ask(layer_index)
            self._changed.wait_for(lambda: self._failures or not self._num_left[layer_index])
            return dict(self._failures)

    def is_loaded(self, layer_index: int) -> bool:
        """Ask for a layer, and return whether `wait` would return at once."""
        with self._changed:
            self._ask(layer_index)
            return bool(self._failures) or not self._num_left[layer_index]

    def drain(self) -> Mapping[int, Exception]:
        """Wait until every lane is loaded or has failed; return those that failed, and why."""
        with self._changed:
            self._ask(self._num_layers)
            self._changed.wait_for(self._is_done)
            return dict(self._failures)

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
        num_lanes = sum(self._may_go_on(lane) for lane in self._idle)
        self._threads = [thread for thread in self._threads if not thread.done()]
        for _ in range(min(num_lanes, self._num_threads - self._num_running)):
            self._threads.append(threads.start(self._run))
            self._num_running += 1

    def _run(self) -> None:
        with torch.inference_mode(self._inference_mode), torch.no_grad():
            while (lane := self._take()) is not None:
                failure = None
                try:
                    self._work(lane, self._next[lane])
                except Exception as error:
                    failure = error
                self._put_back(lane, failure)

    def _take(self) -> int | None:
        """Return the idle lane with the fewest layers, for this thread; None to end the thread."""
        with self._changed:
            while not self._is_closed:
                lane = min(self._idle, key=lambda lane: (self._next[lane], lane), default=None)
                if lane is not None and self._may_go_on(lane):
                    self._idle.remove(lane)
                    if not self._num_busy:
                        self._busy_since = time.perf_counter()
                    self._num_busy += 1
                    return lane
                if not self._num_busy:
                    break
                # A busy lane will become idle.
                self._changed.wait()
            self._num_running -= 1
            return None

    def _is_done(self) -> bool:
        return not self._idle and not self._num_busy

    def _may_go_on(self, lane: int) -> bool:
        """Whether a lane is not too far ahead of the computation."""
        return self._next[lane] <= self._asked_layer + self._num_ahead

    def _put_back(self, lane: int, failure: Exception | None) -> None:
        with self._changed:
            self._num_busy -= 1
            if not self._num_busy:
                self._busy_seconds += time.perf_counter() - self._busy_since
            if failure is not None:
                self._failures[lane] = failure
            else:
                self._num_left[self._next[lane]] -= 1
                self._next[lane] += 1
                if self._next[lane] < self._num_layers:
                    self._idle.add(lane)
            self._changed.notify_all()
