"""Stores of other distributions."""

import sys
import tomllib
from collections.abc import Callable
from contextlib import closing
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvrag.errors import ParameterError, StoreUnreachableError
from kvrag.plugins import Table
from kvrag.store.base import Store, capability, tiers_of
from kvrag.store.limited import LimitedStore
from kvrag.store.redis import RedisStore
from kvrag.store.registry import REMOTE, open_store
from kvrag.store.remote import GuardedStore, RemoteStore
from kvrag_testing.store_contract import key_number, stored
from tests.support.distributions import installed

LAKE = """
from kvrag.store.memory import MemoryStore
from kvrag.store.metrics import StoreMetrics
from kvrag.store.remote import RemoteStore, seconds

LAKES = {}


class LakeStore(RemoteStore):
    options = {"timeout": ("timeout_seconds", seconds)}

    def __init__(self, url, *, must_answer=True, timeout_seconds=3.0):
        self.url = url
        self.must_answer = must_answer
        self.timeout_seconds = timeout_seconds
        self.metrics = StoreMetrics("lake")
        self._lake = LAKES.setdefault(url, MemoryStore())

    def replace(self, key, record):
        self._lake.replace(key, record)

    def open(self, key):
        return self._lake.open(key)

    def contains(self, key):
        return self._lake.contains(key)

    def delete(self, key):
        return self._lake.delete(key)

    def sizes(self):
        return self._lake.sizes()

    def close(self):
        pass
"""


def test_a_store_of_another_distribution(tmp_path: Path) -> None:
    with installed(tmp_path, "lake_kv", LAKE, {"kvrag.stores: lake": "lake_kv:LakeStore"}):
        url = "lake://north/deep?timeout=7.5&limit=1000"
        with closing(open_store(url, must_answer=False)) as store:
            assert store.url == url
            with closing(open_store(store.url)) as again:
                assert again.url == url
            assert capability(store, LimitedStore) is store
            assert capability(store, GuardedStore) is not None
            lake = capability(store, RemoteStore)
            assert (lake.url, lake.must_answer, lake.timeout_seconds) == (
                "lake://north/deep",
                False,
                7.5,
            )
            store.put(key_number(0), b"record")
            assert stored(store, key_number(0)) == b"record"
            assert [counts.name for counts in store.counts()] == ["lake"]
        with closing(open_store(f"tiered:memory:|{url}")) as tiers:
            assert tiers_of(tiers)[1].url == url
            assert stored(tiers, key_number(0)) == b"record"
        with pytest.raises(ParameterError, match="no option 'depth'; it has timeout, limit, key"):
            open_store("lake://north?depth=2")
        with pytest.raises(ParameterError, match="timeout: expected a number of seconds"):
            open_store("lake://north?timeout=soon")


@pytest.mark.parametrize(
    ("module", "value", "message"),
    [
        ("import no_such_library", "broken:Store", "ModuleNotFoundError: .*no_such_library"),
        ("1/0", "broken:Store", "ZeroDivisionError"),
        ("", "broken:Store", "AttributeError"),
        ("", "absent_module:Store", "ModuleNotFoundError: .*absent_module"),
        ("Store = 5", "broken:Store", "subclass of kvrag.store.remote.RemoteStore, found 5"),
        ("class Store: pass", "broken:Store", "subclass of kvrag.store.remote.RemoteStore"),
    ],
)
def test_what_cannot_be_used_is_named(
    tmp_path: Path, module: str, value: str, message: str
) -> None:
    where = f"entry point 'kvrag.stores: lake = {value}' of broken 1.5: expected"
    with (
        installed(tmp_path, "broken", module, {"kvrag.stores: lake": value}),
        pytest.raises(ParameterError, match=f"{where} .*{message}.*uninstall it"),
    ):
        open_store("lake://north")


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("open", lambda store: store.open(key_number(0))),
        ("contains", lambda store: store.contains(key_number(0))),
        ("put", lambda store: store.put(key_number(0), b"record")),
        ("replace", lambda store: store.replace(key_number(0), b"record")),
        ("delete", lambda store: store.delete(key_number(0))),
        ("sizes", lambda store: list(store.sizes())),
        ("sizes", lambda store: list(store.keys())),
        ("collect_garbage", lambda store: store.collect_garbage()),
        ("__init__", lambda store: open_store("lake://north")),
    ],
)
def test_an_error_of_the_system_is_the_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, call: Callable[[Store], object]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TimeoutError("no answer for 3 s")

    with (
        installed(tmp_path, "lake_kv", LAKE, {"kvrag.stores: lake": "lake_kv:LakeStore"}),
        closing(open_store("lake://north")) as store,
    ):
        monkeypatch.setattr(REMOTE["lake"], method, fail)
        message = r"lake://north does not answer \(TimeoutError: no answer for 3 s\); check"
        with pytest.raises(StoreUnreachableError, match=message):
            call(store)
        is_read = method in ("open", "contains")
        assert store.counts()[0].misses == ({"unreadable": 1} if is_read else {})


def test_a_built_in_scheme_stays_kvrags_own(tmp_path: Path) -> None:
    with installed(tmp_path, "lake_kv", LAKE, {"kvrag.stores: redis": "lake_kv:LakeStore"}):
        assert REMOTE["redis"] is RedisStore


def test_two_of_one_name_are_none(tmp_path: Path) -> None:
    with (
        installed(tmp_path / "a", "lake_kv", LAKE, {"kvrag.stores: lake": "lake_kv:LakeStore"}),
        installed(tmp_path / "b", "pond_kv", LAKE, {"kvrag.stores: lake": "pond_kv:LakeStore"}),
        pytest.raises(ParameterError, match=r"(?=.*lake_kv 1.5)(?=.*pond_kv 1.5).*all but one"),
    ):
        open_store("lake://north")


def test_nothing_is_looked_for_where_a_name_is_kvrags(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise AssertionError("looked for entry points")

    monkeypatch.setattr("importlib.metadata.entry_points", fail)
    open_store("memory:").close()
    assert "s3" in REMOTE
    assert REMOTE["http"].__name__ == "HttpStore"
    with pytest.raises(ParameterError):
        open_store("x:y")


def test_a_table_lists_kvrags_own_and_then_the_others(tmp_path: Path) -> None:
    table: Table[object] = Table("kvrag.stores", {"own": "json:loads"})
    assert list(table) == ["own"]
    with installed(tmp_path, "lake_kv", LAKE, {"kvrag.stores: lake": "lake_kv:LakeStore"}):
        assert list(table) == ["own", "lake"]
        assert len(table) == 2
    with pytest.raises(KeyError):
        table["sea"]


def test_the_example_of_a_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name that its `pyproject.toml` registers, where its library is not installed."""
    example = Path(__file__).parents[2] / "examples" / "mooncake"
    monkeypatch.syspath_prepend(str(example))
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    place = project["entry-points"]["kvrag.stores"]["mooncake"]
    point = EntryPoint("mooncake", place, "kvrag.stores")
    monkeypatch.setitem(REMOTE._registered, "mooncake", point)
    for name in ("mooncake", "mooncake.store"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ParameterError, match="pip install"):
        open_store("mooncake://127.0.0.1:1")
