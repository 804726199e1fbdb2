"""Filters of a search: what they admit, in every kind of search, and what they refuse."""

import sqlite3
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest

from kvrag.chunk import Document
from kvrag.errors import ParameterError
from kvrag.ingest import cachefile
from kvrag.ingest.index import Index
from kvrag.models.kv_model import KVModel

METADATA: dict[str, dict[str, Any]] = {
    "a": {"year": 2019, "lang": "en", "draft": True, "tags": ["red", "blue"]},
    "b": {"year": 2021.5, "lang": "de", "draft": False, "author": {"name": "Ines"}},
    "c": {"year": "2021", "lang": "en", "tags": ["blue"], "note": None},
    "d": {"year": 1, "draft": 1, "source": "elsewhere", "ordinal": 7},
}

CASES: list[tuple[dict[str, Any], str]] = [
    ({"lang": "en"}, "ac"),
    ({"lang": {"$eq": "en"}}, "ac"),
    ({"lang": {"$ne": "en"}}, "bd"),
    ({"lang": {"$in": ["en", "de"]}}, "abc"),
    ({"lang": {"$in": []}}, ""),
    ({"lang": {"$nin": ["en", "fr"]}}, "bd"),
    ({"lang": {"$nin": []}}, "abcd"),
    ({"year": {"$gt": 2019}}, "b"),
    ({"year": {"$gte": 2019}}, "ab"),
    ({"year": {"$gte": 2019, "$lt": 2021.5}}, "a"),
    ({"year": {"$lte": 2019}}, "ad"),
    ({"year": {"$gt": "2"}}, "c"),
    ({"year": {"$lt": "3"}}, "c"),
    ({"year": 2021}, ""),
    ({"year": "2021"}, "c"),
    ({"draft": True}, "a"),
    ({"draft": 1}, "d"),
    ({"draft": {"$ne": True}}, "bcd"),
    ({"draft": {"$lt": 5}}, "d"),
    ({"tags": "blue"}, "ac"),
    ({"tags": {"$ne": "red"}}, "bcd"),
    ({"author.name": "Ines"}, "b"),
    ({"note": {"$ne": 1}}, "abcd"),
    ({"source": "a"}, "a"),
    ({"source": {"$in": ["a", "d", "elsewhere"]}}, "ad"),
    ({"source": "elsewhere"}, ""),
    ({"source": {"$ne": "d"}}, "abc"),
    ({"metadata.source": "elsewhere"}, "d"),
    ({"ordinal": 0}, "abcd"),
    ({"ordinal": 7}, ""),
    ({"lang": "en", "draft": True}, "a"),
    ({"$and": [{"lang": "en"}, {"tags": "blue"}, {"year": {"$lt": 3000}}]}, "a"),
    ({"$or": [{"lang": "de"}, {"$and": [{"lang": "en"}, {"draft": True}]}]}, "ab"),
    ({"$or": [{"year": 1}], "lang": "en"}, ""),
    ({"'; DROP TABLE of; --": "x"}, ""),
]


@pytest.fixture
def filled(index: Index) -> Index:
    index.add([Document(name, f"The fox of {name}.", METADATA[name]) for name in METADATA])
    return index


def names(hits: Any) -> str:
    return "".join(sorted(hit.chunk.source for hit in hits))


@pytest.mark.parametrize("graph_from", [50_000, 2])
def test_every_search_takes_a_filter(
    index: Index, graph_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cachefile, "GRAPH_FROM", graph_from)
    index.add([Document(name, f"The fox of {name}.", METADATA[name]) for name in METADATA])
    vector = index.embedding.embed_query("fox")
    for wanted, expected in CASES:
        assert names(index.search("fox", filter=wanted)) == expected, wanted
        assert names(index.search_dense("fox", filter=wanted)) == expected, wanted
        assert names(index.search_words("fox", filter=wanted)) == expected, wanted
        assert names(index.search_by_vector(vector, filter=wanted)) == expected, wanted
    assert index.stats().has_graph == (graph_from == 2)


def test_a_filter_acts_before_the_best_are_chosen(index: Index) -> None:
    index.add([Document(f"fox {n}", "fox fox fox", {"n": n}) for n in range(150)])
    index.add([Document("far", "A lantern, and somewhere a fox.", {"n": 999})])
    for search in (index.search, index.search_dense, index.search_words):
        (hit,) = search("fox", 3, filter={"n": {"$gt": 500}})
        assert hit.chunk.source == "far"


def test_filters_follow_the_catalog(filled: Index, model: KVModel) -> None:
    wanted = {"lang": "en"}
    assert names(filled.search("fox", filter=wanted)) == "ac"
    filled.delete(sources=["a"])
    assert names(filled.search("fox", filter=wanted)) == "c"
    filled.add([Document("b", "The fox of b.", {"lang": "en"})])
    assert names(filled.search("fox", filter=wanted)) == "bc"
    with Index.open(filled.path, model=model) as again:
        assert names(again.search_dense("fox", filter=wanted)) == "bc"
        with sqlite3.connect(filled.path / "words.cache") as cache:
            assert not cache.execute("SELECT 1 FROM fields WHERE value = 'de'").fetchall()
        cache.close()


def test_damaged_metadata_admits_nothing_and_heals(filled: Index, model: KVModel) -> None:
    filled.close()
    (filled.path / "words.cache").unlink(missing_ok=True)
    path = filled.path / "catalog.sqlite"

    def write(found: str, put: str) -> None:
        with sqlite3.connect(path) as connection:
            connection.execute(
                "UPDATE chunks SET metadata = replace(metadata, ?, ?) WHERE source = 'a'",
                (found, put),
            )
        connection.close()

    write('"en"', '"de"')
    with Index.open(filled.path, model=model) as opened:
        assert names(opened.search("fox", filter={"lang": "de"})) == "b"
        assert names(opened.search("fox", filter={"lang": "en"})) == "c"
    write('"de"', '"en"')
    with Index.open(filled.path, model=model) as opened:
        opened.add([Document("e", "The fox of e.")])
        assert names(opened.search("fox", filter={"lang": "en"})) == "ac"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("source", "filter: expected a mapping"),
        ({}, "filter: expected a mapping"),
        ([], "filter: expected a mapping"),
        ({"$not": {"a": 1}}, "filter: '\\$not' is no field"),
        ({"$gt": 1}, "belong inside a field's condition"),
        ({1: 2}, "1 is no field"),
        ({"$and": {"a": 1}}, "filter: \\$and expects a list"),
        ({"$or": []}, "filter: \\$or expects a list"),
        ({"$or": [{"a": 1}, 3]}, "filter.\\$or\\[1\\]: expected a mapping"),
        ({"a": {}}, "filter.a: expected a condition"),
        ({"a": {"$like": "x"}}, "filter.a: unknown operator '\\$like'; expected one of \\$eq"),
        ({"a": {"b": 1}}, "filter.a: unknown operator 'b'"),
        ({"a": ["x"]}, "filter.a.\\$eq: expected a text, .* for several values, write"),
        ({"a": None}, "filter.a.\\$eq: expected a text"),
        ({"a": float("nan")}, "filter.a.\\$eq: expected a text"),
        ({"a": 1 << 63}, "filter.a.\\$eq: expected a text"),
        ({"a": {"$in": "x"}}, "filter.a.\\$in: expected a list"),
        ({"a": {"$in": [{}]}}, "filter.a.\\$in: expected a text"),
        ({"a": {"$in": list(range(10_001))}}, "more than 10,000 values together"),
        ({"$or": [{"a": {"$in": [1] * 5_001}}] * 2}, "more than 10,000 values together"),
        ({"a": {"$gt": True}}, "filter.a.\\$gt: expected a number, a text or a time, found True"),
        ({"a": {"$lt": [1]}}, "filter.a.\\$lt: expected a text"),
        ({f"f{n}": n for n in range(101)}, "more than 100 conditions"),
    ],
)
def test_what_is_no_filter_is_refused(filled: Index, wanted: Any, message: str) -> None:
    for search in (filled.search, filled.search_dense, filled.search_words):
        with pytest.raises(ParameterError, match=message):
            search("fox", filter=wanted)


def test_a_filter_that_contains_itself_is_refused(filled: Index) -> None:
    wanted: dict[str, Any] = {}
    wanted["$and"] = [wanted]
    with pytest.raises(ParameterError, match="nested more than 16 levels"):
        filled.search("fox", filter=wanted)


WHEN: dict[str, Any] = {
    "a": datetime(2024, 3, 1, 12, 30),
    "b": "2024-03-01T10:00",
    "c": datetime(2024, 3, 1, 13, 0, tzinfo=timezone(timedelta(hours=2))),  # 11:00 UTC
    "d": date(2024, 3, 2),
    "e": "2024-02-29 23:59:59.5",
    "f": np.datetime64("2024-03-01T12:30:00.000000001", "ns"),
    "g": ["2023-01-01", "2024-03-01T14:30:00+0200"],
    "h": "2024-02-30",  # looks like a date
    "i": "2024-03",
    "j": None,
}

TIMES: list[tuple[Any, str]] = [
    ({"$gte": "2024-03-01T11:30"}, "adfg"),
    ({"$gte": "2024-03-01 11:30"}, "adfg"),
    ({"$gte": "2024-03-01T13:30+02:00"}, "adfg"),
    ({"$gte": datetime(2024, 3, 1, 11, 30)}, "adfg"),
    ({"$gte": datetime(2024, 3, 1, 11, 30, tzinfo=UTC)}, "adfg"),
    ({"$gte": np.datetime64("2024-03-01T11:30", "ns")}, "adfg"),
    ({"$gt": "2024-03-01T10:00:00Z", "$lt": "2024-03-01t12:30:00z"}, "cg"),  # "g" has one of each
    ({"$gt": date(2024, 3, 1), "$lt": date(2024, 3, 2)}, "abcfg"),
    ({"$lt": "2024-03-01"}, "eg"),
    ({"$gte": "2024-03-02"}, "d"),
    ({"$lt": "2024-02-30"}, "eg"),  # no time: compared as a text
    ("2024-02-30", "h"),
    # Other forms that ISO 8601 has, and that databases write.
    *((form, "c") for form in ("20240301T1100", "20240301T110000Z", "2024-03-01T11")),
    *((form, "c") for form in ("2024-03-01 11:00:00 UTC", "2024-03-01 11:00:00 +0000")),
    ("2024-03-01T12:30", "afg"),
    (datetime(2024, 3, 1, 12, 30), "afg"),
    (datetime(2024, 3, 1, 11, 0, tzinfo=UTC), "c"),
    ({"$in": ["2024-03-01T11:00Z", date(2024, 3, 2), "2024-03"]}, "cdi"),
    ({"$ne": "2024-03-01T12:30:00"}, "bcdehij"),
    ({"$nin": [datetime(2024, 3, 1, 12, 30)]}, "bcdehij"),
]


def test_times_are_compared_as_times(index: Index) -> None:
    index.add([Document(name, f"The fox of {name}.", {"when": WHEN[name]}) for name in WHEN])
    for wanted, expected in TIMES:
        assert names(index.search("fox", 20, filter={"when": wanted})) == expected, wanted
    stored = {one.source: one.metadata["when"] for one in index.documents()}
    assert stored == {
        **{name: when for name, when in WHEN.items() if not isinstance(when, date | np.generic)},
        "a": "2024-03-01T12:30:00",
        "c": "2024-03-01T11:00:00+00:00",
        "d": "2024-03-02",
        "f": "2024-03-01T12:30:00",
    }


def test_times_of_older_indexes_are_compared_too(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as old:  # as metadata was written before
        old.setattr("kvrag.ingest.filters.written", str)
        when = {**WHEN, "f": datetime(2024, 3, 1, 12, 30)}
        index.add([Document(name, f"The fox of {name}.", {"when": when[name]}) for name in when])
    stored = {one.source: one.metadata["when"] for one in index.documents()}
    assert (stored["a"], stored["c"]) == ("2024-03-01 12:30:00", "2024-03-01 13:00:00+02:00")
    for wanted, expected in TIMES:
        assert names(index.search("fox", 20, filter={"when": wanted})) == expected, wanted


def test_the_calendar_has_ends(index: Index) -> None:
    east, west = timezone(timedelta(hours=2)), timezone(-timedelta(hours=2))
    ends = {"first": datetime.min.replace(tzinfo=east), "last": datetime.max.replace(tzinfo=west)}
    index.add([Document(name, "A fox.", {"when": when}) for name, when in ends.items()])
    stored = {one.source: one.metadata["when"] for one in index.documents()}
    assert stored == {"first": ends["first"].isoformat(), "last": ends["last"].isoformat()}
    (hit,) = index.search("fox", filter={"when": ends["last"]})
    assert hit.chunk.source == "last"
