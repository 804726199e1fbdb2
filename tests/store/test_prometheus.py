import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvrag.errors import ParameterError
from kvrag.store.memory import MemoryStore
from kvrag.store.prometheus import StoreCollector
from kvrag.store.registry import open_store
from kvrag_testing.store_contract import key_number, record_of, stored


def test_counts_of_tiers(tmp_path: Path) -> None:
    store = open_store(f"tiered:memory:?limit=2kB|file:{tmp_path}?limit=3kB")
    registry = CollectorRegistry()
    collector = StoreCollector(store)
    collector.register(registry)

    def value(name: str, tier: int, kind: str, **labels: str) -> float | None:
        return registry.get_sample_value(
            f"kvrag_store_{name}_total", {"tier": str(tier), "store": kind, **labels}
        )

    assert value("hits", 0, "memory") == 0
    for number in range(4):
        key = key_number(number)
        store.put(key, record_of(key))
    assert stored(store, key_number(3)) == record_of(key_number(3))
    assert store.open(key_number(0)) is None
    store.note_damage(key_number(9))
    assert value("evictions", 1, "file") == 1
    assert value("evicted_bytes", 1, "file") == 1000
    assert value("written_bytes", 1, "file") == 4000
    assert value("read_bytes", 1, "file") == 1000
    assert value("hits", 1, "file") == 1
    assert value("misses", 1, "file", reason="absent") == 1
    assert value("misses", 1, "file", reason="damaged") == 1
    assert value("misses", 0, "memory", reason="absent") == 3
    assert b"# TYPE kvrag_store_hits_total counter" in generate_latest(registry)
    collector.unregister(registry)
    assert value("hits", 1, "file") is None
    store.close()


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ParameterError, match=r"kvrag\[metrics\]"):
        StoreCollector(MemoryStore())
