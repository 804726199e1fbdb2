"""Layers of lanes: in order, at the same time, and nothing after the end."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvrag.loading import threads
from kvrag.loading.prefetch import LayerPrefetch
from tests.support.waiting import wait_until


class Recorder:
    """Notes what is brought; lanes wait for their gates."""

    def __init__(self) -> None:
        self.brought: list[tuple[int, int]] = []
        self.gate = threading.Semaphore(0)
        self.running = 0
        self.most_running = 0
        self.lock = threading.Lock()

    def __call__(self, lane: int, layer: int) -> None:
        with self.lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        acquired = self.gate.acquire(timeout=30)
        with self.lock:
            self.running -= 1
            assert acquired
            self.brought.append((lane, layer))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_lanes_run_together_and_each_in_order(num_threads: int) -> None:
    work = Recorder()
    prefetch = LayerPrefetch(3, 4, work, num_threads=num_threads)
    wait_until(lambda: work.running == min(num_threads, 3))
    work.gate.release(100)
    assert not prefetch.drain()
    prefetch.close()
    assert sorted(work.brought) == [(lane, layer) for lane in range(3) for layer in range(4)]
    for lane in range(3):
        assert [layer for one, layer in work.brought if one == lane] == [0, 1, 2, 3]
    assert work.most_running == min(num_threads, 3)


def test_a_quarter_of_the_layers_is_brought_ahead() -> None:
    work = Recorder()
    work.gate.release(100)
    prefetch = LayerPrefetch(2, 16, work, num_threads=2)
    farthest = []
    for layer_index in (0, 1, 7):
        prefetch.wait(layer_index)
        wait_until(lambda ahead=layer_index + 5: len(work.brought) >= 2 * ahead)
        time.sleep(0.02)
        farthest.append(max(layer for _, layer in work.brought))
    assert farthest == [4, 5, 11]
    assert not prefetch.drain()
    prefetch.close()
    assert len(work.brought) == 2 * 16


def test_a_layer_is_there_once_all_lanes_have_it() -> None:
    gate = threading.Event()
    brought: list[tuple[int, int]] = []

    def work(lane: int, layer: int) -> None:
        assert lane == 0 or gate.wait(30)
        brought.append((lane, layer))

    prefetch = LayerPrefetch(2, 3, work, num_threads=2)
    waiter = threading.Thread(target=prefetch.wait, args=(0,))
    waiter.start()
    wait_until(lambda: (0, 2) in brought)
    waiter.join(0.05)
    assert waiter.is_alive()
    gate.set()
    waiter.join(30)
    assert not waiter.is_alive()
    assert (1, 0) in brought
    prefetch.close()


def test_who_may_not_go_on_leaves_the_threads_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(threads._pools, threads.LOADING, ThreadPoolExecutor(2))
    work = Recorder()
    work.gate.release(1000)
    waiting = LayerPrefetch(3, 16, work, num_threads=2)
    wait_until(lambda: len(work.brought) == 3 * 5)
    other = LayerPrefetch(3, 16, work, num_threads=2)
    computing = threading.Thread(target=other.wait, args=(15,))
    computing.start()
    computing.join(60)
    is_stuck = computing.is_alive()
    waiting.close()
    computing.join(30)
    other.close()
    assert not is_stuck


def test_without_threads_whoever_waits_brings_each_layer_and_finds_all_damage() -> None:
    brought: list[tuple[int, int]] = []

    def work(lane: int, layer: int) -> None:
        if layer == 2 * lane:
            raise ValueError("broken")
        brought.append((lane, layer))

    prefetch = LayerPrefetch(3, 5, work, num_threads=0)
    assert prefetch.is_loaded(0)
    assert brought == []
    assert list(prefetch.wait(0)) == [0, 1, 2]
    assert sorted(brought) == [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3)]
    prefetch = LayerPrefetch(2, 3, lambda *at: brought.append(at), num_threads=0)
    brought.clear()
    for layer in range(2):
        assert not prefetch.wait(layer)
        assert brought[-2:] == [(0, layer), (1, layer)]
    assert len(brought) == 4
    prefetch.close()
    assert prefetch.hidden_seconds == pytest.approx(0.0, abs=0.01)


def test_a_failure_ends_its_lane_alone_and_wakes_who_waits() -> None:
    def work(lane: int, layer: int) -> None:
        if (lane, layer) == (1, 1):
            raise ValueError("broken")
        brought.append((lane, layer))

    brought: list[tuple[int, int]] = []
    prefetch = LayerPrefetch(3, 3, work, num_threads=2)
    failures = prefetch.wait(2)
    assert list(failures) == [1]
    assert list(prefetch.drain()) == [1]
    prefetch.close()
    expected = [(lane, layer) for lane in (0, 2) for layer in range(3)]
    assert sorted(brought) == sorted([*expected, (1, 0)])


def test_closing_lets_nothing_begin_and_waits_for_what_has_begun() -> None:
    work = Recorder()
    prefetch = LayerPrefetch(2, 50, work, num_threads=2)
    wait_until(lambda: work.running == 2)
    closing = threading.Thread(target=prefetch.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    work.gate.release(100)
    closing.join(30)
    assert not closing.is_alive()
    assert sorted(work.brought) == [(0, 0), (1, 0)]
    assert work.running == 0


def test_threads_have_the_modes_of_the_caller() -> None:
    modes: list[tuple[bool, bool]] = []

    def note(*_: int) -> None:
        modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    for mode in (False, True):
        with torch.inference_mode(mode):
            prefetch = LayerPrefetch(1, 1, note, num_threads=1)
            prefetch.drain()
            prefetch.close()
    assert modes == [(False, False), (True, False)]
