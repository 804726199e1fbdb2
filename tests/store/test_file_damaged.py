"""Damage to `records.sqlite`: a miss at most; it is reported, mended, and never spreads."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kvrag.errors import RecordError
from kvrag.store.file import FileStore
from kvrag.testing.records import key_number, record_of
from kvrag.testing.store_contract import read_all, stored
from tests.support.folders import segment_path

KEYS = [key_number(number) for number in range(6)]
NEW = [key_number(number) for number in range(6, 9)]
ONE = f"x'{KEYS[2].digest}'"

OF_ENDS = [
    "UPDATE segments SET end = 0",
    "UPDATE segments SET end = 64",
    "UPDATE segments SET end = -64",
    "UPDATE segments SET end = 'zzz'",
    "UPDATE segments SET end = x'00'",
    "UPDATE segments SET end = 1e308",
    "UPDATE segments SET end = 9223372036854775807",
    "DELETE FROM segments",
    "DROP TABLE segments",
]
OF_RECORDS = [
    *(
        f"UPDATE records SET {column} = {value} WHERE key = {ONE}"
        for column in ("segment", "offset", "size")
        for value in ("'zzz'", "x'00'", "1e308", "CAST(x'ff' AS TEXT)")
    ),
    f"UPDATE records SET size = -1 WHERE key = {ONE}",
    f"UPDATE records SET size = 9223372036854775807 WHERE key = {ONE}",
    "UPDATE records SET size = 'zzz'",
    f"UPDATE records SET key = x'00' WHERE key = {ONE}",
    f"UPDATE records SET key = 'zzz' WHERE key = {ONE}",
    "DROP TABLE records",
    "DROP TABLE records; DROP TABLE segments",
]
OF_HEAD = [
    "PRAGMA user_version = 0",
    "PRAGMA application_id = 7",
    "PRAGMA application_id = 7; PRAGMA user_version = 9",
]
OF_SEGMENTS = ["UPDATE sqlite_sequence SET seq = 'zzz'"]


def edit(folder: Path, statements: str) -> None:
    with closing(sqlite3.connect(folder / "records.sqlite")) as connection:
        connection.executescript(f"PRAGMA foreign_keys = OFF; {statements}")


def fill(folder: Path) -> None:
    with closing(FileStore(folder)) as store:
        store.put_many((key, record_of(key)) for key in KEYS)


def num_found(store: FileStore) -> int:
    """Return how many records are found; each of them is whole."""
    num = 0
    for key in KEYS:
        try:
            record = store.open(key)
        except RecordError:
            continue
        if record is not None:
            assert read_all(record) == record_of(key)
            num += 1
    return num


def check_sound(folder: Path) -> None:
    with closing(FileStore(folder)) as store:
        assert store.damage() == []
        assert sorted(store.keys()) == sorted([*KEYS, *NEW])
        for key in (*KEYS, *NEW):
            assert stored(store, key) == record_of(key)


@pytest.mark.parametrize("statements", OF_ENDS)
def test_wrong_ends(tmp_path: Path, statements: str) -> None:
    """No record is overwritten."""
    fill(tmp_path)
    edit(tmp_path, statements)
    with closing(FileStore(tmp_path)) as store:
        assert store.damage()
        store.put_many((key, record_of(key)) for key in NEW)
        assert num_found(store) == len(KEYS)
        store.mend()
        store.collect_garbage(0.0)
    check_sound(tmp_path)


@pytest.mark.parametrize("is_mended_first", [True, False])
@pytest.mark.parametrize("statements", [*OF_RECORDS, *OF_ENDS, *OF_HEAD])
def test_wrong_rows(tmp_path: Path, statements: str, is_mended_first: bool) -> None:
    fill(tmp_path)
    edit(tmp_path, statements)
    with closing(FileStore(tmp_path)) as store:
        found = num_found(store)
        assert found in (len(KEYS), len(KEYS) - 1) or "WHERE" not in statements
        assert store.size_bytes() == sum(size for _, size in store.sizes()) <= 1000 * len(KEYS)
        assert sum(map(store.contains, KEYS)) == found
        assert store.damage()
        if is_mended_first:
            store.mend()
            assert store.damage() == []
            assert num_found(store) == (len(KEYS) if statements in OF_HEAD else found)
        store.put_many((key, record_of(key)) for key in (*KEYS, *NEW))
        store.mend()
    check_sound(tmp_path)


@pytest.mark.parametrize("statements", OF_SEGMENTS)
def test_the_next_number(tmp_path: Path, statements: str) -> None:
    fill(tmp_path)
    edit(tmp_path, statements)
    with closing(FileStore(tmp_path, segment_bytes=100)) as store:
        store.put_many((key, record_of(key)) for key in NEW)
    check_sound(tmp_path)


@pytest.mark.parametrize(
    "content", [b"not a database" * 100, b"\0" * 4096, "cut", "pipe", "foreign"]
)
@pytest.mark.parametrize("is_mended_first", [True, False])
def test_a_file_of_something_else(
    tmp_path: Path,
    content: bytes | str,
    is_mended_first: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fill(tmp_path)
    path = tmp_path / "records.sqlite"
    whole = path.read_bytes()
    path.unlink()
    if content == "pipe":
        os.mkfifo(path)
    elif content == "foreign":
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE notes (text)")
    else:
        path.write_bytes(whole[:5000] if isinstance(content, str) else content)
    with closing(FileStore(tmp_path)) as store:
        assert num_found(store) == 0
        assert store.counts()[0].misses == {"absent": len(KEYS)}
        assert list(store.sizes()) == []
        assert store.size_bytes() == 0
        assert caplog.text.count("records.sqlite is damaged") == 1
        assert store.damage()
        if is_mended_first:
            store.mend()
            assert store.damage() == []
        store.put_many((key, record_of(key)) for key in (*KEYS, *NEW))
    assert (tmp_path / "records.sqlite.damaged").exists()
    check_sound(tmp_path)


def test_another_process_begins_again(tmp_path: Path) -> None:
    fill(tmp_path)
    with closing(FileStore(tmp_path)) as other, closing(FileStore(tmp_path)) as store:
        other.put(NEW[0], record_of(NEW[0]))
        store._index.begin_again()
        store.put(NEW[1], record_of(NEW[1]))
        assert not other.contains(NEW[0])
        other.put_many((key, record_of(key)) for key in (*KEYS, *NEW))
        assert num_found(store) == len(KEYS)
    check_sound(tmp_path)


def test_a_segment_that_is_a_pipe(tmp_path: Path) -> None:
    fill(tmp_path)
    segment_path(tmp_path).unlink()
    os.mkfifo(segment_path(tmp_path))
    with closing(FileStore(tmp_path)) as store:
        assert num_found(store) == 0
        store.put_many((key, record_of(key)) for key in (*KEYS, *NEW))
        store.collect_garbage(0.0)
    check_sound(tmp_path)


def test_a_pipe_where_the_next_segment_goes(tmp_path: Path) -> None:
    fill(tmp_path)
    os.mkfifo(segment_path(tmp_path, 2))
    with closing(FileStore(tmp_path, segment_bytes=100)) as store:
        store.put_many((key, record_of(key)) for key in NEW)
        store.collect_garbage(0.0)
    check_sound(tmp_path)
