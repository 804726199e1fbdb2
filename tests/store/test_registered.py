"""Stores of other distributions."""

import importlib
from collections.abc import Callable
from contextlib import closing
from inspect import get_annotations
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvrag.errors import ParameterError, StoreUnreachableError
from kvrag.plugins import Table
from kvrag.store import base
from kvrag.store.base import Limits, Store, capability, tiers_of
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

    def put(self, key, record):
        self._lake.put(key, record)

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
    ("line", "message"),
    [
        ("path = 'bucket/x'", "path of lake_kv.Odd to be a pathlib.Path .*, found 'bucket/x'"),
        ("limit_bytes = None", "limit_bytes of lake_kv.Odd to be a number of bytes.*found None"),
        ("limit_bytes = True", "limit_bytes of lake_kv.Odd to be a number of bytes.*found True"),
        ("is_in_memory = 0", "is_in_memory of lake_kv.Odd to be True or False .*, found 0"),
        ("tiers = 'a|b'", "tiers of lake_kv.Odd to be a list or tuple of stores .*found 'a|b'"),
        ("derive = b'key'", "derive of lake_kv.Odd to be a method .*, found b'key'"),
        ("derive = lambda self, _: b'key'", "a method that returns 32 bytes .*, found 3 bytes"),
        ("derive = lambda self, _: 'k' * 32", "a method that returns 32 bytes .*, found str"),
    ],
)
@pytest.mark.parametrize("url", ["lake://north", "tiered:memory:|lake://north"])
def test_a_reserved_name_of_another_use_is_refused(
    tmp_path: Path, url: str, line: str, message: str
) -> None:
    module = (
        f"{LAKE}        CLOSED.append(self.url)\n\nCLOSED = []\n\n"
        f"class Odd(LakeStore):\n    {line}\n"
    )
    with installed(tmp_path, "lake_kv", module, {"kvrag.stores: lake": "lake_kv:Odd"}):
        with pytest.raises(ParameterError, match=f"'kvrag.stores: lake = .*{message}; mend that"):
            open_store(url)
        assert importlib.import_module("lake_kv").CLOSED == ["lake://north"]


def test_every_capability_is_checked_and_named_as_reserved() -> None:
    of_all = {base.Listing, base.Store, base.StoredRecord}
    kinds = [
        one
        for one in vars(base).values()
        if getattr(one, "_is_protocol", False)
        and one.__module__ == base.__name__
        and one not in of_all
    ]
    names = {name for kind in kinds for name in {*vars(kind), *get_annotations(kind)}}
    reserved = {name for name in names if not name.startswith("_")}
    assert len(reserved) >= 10
    for name in reserved:
        assert f"``{name}``" in (RemoteStore.__doc__ or "")
        wrong = base.wrong_capability(SimpleNamespace(**{name: object()}))
        assert wrong[0] == name


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
        ("sizes", lambda store: store.size_bytes()),
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


def test_a_reserved_name_may_have_its_use(tmp_path: Path) -> None:
    lines = (
        "is_in_memory = True\n    limit_bytes = 1000\n    derive = lambda self, _: b'k' * 32\n"
        "    damage = lambda self: []\n    mend = lambda self: None"
    )
    module = f"{LAKE}\nclass Odd(LakeStore):\n    {lines}\n"
    with (
        installed(tmp_path, "lake_kv", module, {"kvrag.stores: lake": "lake_kv:Odd"}),
        closing(open_store("lake://north")) as store,
    ):
        assert capability(store, Limits) is capability(store, RemoteStore)
