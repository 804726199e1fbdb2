"""Threads that are kept: what they make, and that nothing of it goes on behind the caller."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvrag.loading import LOAD_THREADS, threads
from kvrag.loading.prefetch import LayerPrefetch
from kvrag.store.base import Store
from kvrag.store.file import FileStore
from kvrag.store.memory import MemoryStore
from kvrag.store.objects import HttpStore
from kvrag.store.tiered import TieredStore
from tests.support.instructions import torch_threads


@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_each_keeps_the_order(num_threads: int) -> None:
    running: list[int] = []

    def work(number: int) -> int:
        running.append(number)
        assert len(running) <= num_threads
        time.sleep(0.002)
        running.remove(number)
        return number * number

    assert threads.each(work, range(20), num_threads) == [n * n for n in range(20)]
    assert threads.each(work, [], num_threads) == []


@pytest.mark.parametrize("broken", [0, 5])
def test_an_exception_comes_when_all_that_has_begun_has_ended(broken: int) -> None:
    running = []

    def work(number: int) -> None:
        running.append(number)
        time.sleep(0.01)
        running.remove(number)
        if number == broken:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        threads.each(work, range(6), 3)
    assert running == []


def test_where_no_thread_is_to_be_had_the_caller_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is about to end, and a thread of the user's still answers."""
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    monkeypatch.setitem(threads._pools, threads.LOADING, pool)
    assert threads.each(lambda n: n + 1, [1, 2, 3], 3) == [2, 3, 4]
    with pytest.raises(ZeroDivisionError):
        threads.each(lambda n: 1 // n, [1, 0, 3], 3)
    brought: list[tuple[int, int]] = []
    prefetch = LayerPrefetch(2, 12, lambda *at: brought.append(at), num_threads=2)
    assert not prefetch.wait(11)
    prefetch.close()
    assert sorted(brought) == [(lane, layer) for lane in range(2) for layer in range(12)]


@pytest.fixture
def two_threads() -> Iterator[None]:
    with torch_threads(2):
        yield


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("cores", "expected"), [(1, 0), (2, 0), (3, 1), (64, LOAD_THREADS)])
def test_a_local_store_is_read_by_idle_cores_alone(
    cores: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "num_cores", lambda: cores)
    folder = FileStore(tmp_path)
    local: list[Store] = [MemoryStore(), folder, TieredStore([MemoryStore(), folder])]
    cpu = torch.device("cpu")
    assert [threads.suitable(store, cpu) for store in local] == [expected] * 3
    # Whoever waits for a network, or leaves computing to a GPU, takes no core from it.
    far = HttpStore("http://127.0.0.1:9", must_answer=False)
    assert threads.suitable(far, cpu) == LOAD_THREADS
    assert threads.suitable(TieredStore([MemoryStore(), far]), cpu) == LOAD_THREADS
    assert threads.suitable(folder, torch.device("cuda")) == LOAD_THREADS


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    threads.start(lambda: None).result()
    child = os.fork()
    if not child:
        os._exit(0 if threads.each(lambda n: n + 1, [1, 2, 3], 3) == [2, 3, 4] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
