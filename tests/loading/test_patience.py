"""Records that a prompt waits for in vain."""

import threading

import pytest

from kvrag.loading.patience import Patience, SlowStoreError
from kvrag.store.base import RecordWrapper
from kvrag.store.memory import MemoryRecord
from kvrag_testing.records import key_number


class _Watched(RecordWrapper):
    def __init__(self) -> None:
        super().__init__(MemoryRecord(key_number(0), b"record"))
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


def test_a_record_that_is_opened_too_late_is_closed_and_no_other_is_waited_for() -> None:
    record, goes_on, patience = _Watched(), threading.Event(), Patience(0.01)

    def open_late() -> _Watched:
        assert goes_on.wait(30)
        return record

    with pytest.raises(SlowStoreError, match="took more than"):
        patience.open(open_late)
    with pytest.raises(SlowStoreError, match="given up before"):
        patience.open(lambda: record)
    goes_on.set()
    assert record.closed.wait(30)
