"""Search by words: BM25 over the chunks' texts, in SQLite's own full-text index (FTS5).

The index is a table of the catalog. Triggers keep it in step within the transaction that changes
the chunks, whoever writes; where it is missing it is filled at the first search. It is told row
numbers and texts, and it answers row numbers alone: the chunks themselves are read, and checked,
by the catalog. It keeps a copy of the texts, so that a damaged row of a chunk can still be taken
out of it; beside the KV of a text its copy is nothing.

Source of the ranking: SQLite's ``bm25`` (k1 = 1.2, b = 0.75).
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from kvrag.errors import IndexFormatError, StoreError

TABLE = "chunk_words"
_FILL = f"INSERT INTO {{schema}}.{TABLE} (rowid, text) SELECT row, text FROM main.chunks"
_DECLARATION = f"{TABLE} USING fts5(text, tokenize = 'unicode61 remove_diacritics 2')"
_ADD = f"INSERT INTO {TABLE} (rowid, text) VALUES (new.row, new.text);"
_DROP = f"DELETE FROM {TABLE} WHERE rowid = old.row;"
_TRIGGERS = {
    f"{TABLE}_added": f"AFTER INSERT ON chunks BEGIN {_ADD} END",
    f"{TABLE}_removed": f"AFTER DELETE ON chunks BEGIN {_DROP} END",
    f"{TABLE}_changed": f"AFTER UPDATE OF row, text ON chunks BEGIN {_DROP} {_ADD} END",
}
# A question of more words is a document; what comes behind these finds little else.
_MAX_WORDS = 256


def create(connection: sqlite3.Connection) -> None:
    """Make the index of a catalog that is being made; nothing where this SQLite has no FTS5."""
    try:
        rebuild(connection)
    except connection.OperationalError as error:
        if "no such module" not in str(error):
            raise


def search(connection: sqlite3.Connection, question: str, k: int) -> list[tuple[int, float]]:
    """Return row number and BM25 score of the `k` best chunks for any of a question's words.

    Equal scores come in the order of indexing. A question without words finds nothing.

    Raises
    ------
    StoreError
        When this Python's SQLite has no FTS5.
    IndexFormatError
        When the index is damaged.
    """
    match = any_word_of(question)
    if not match:
        return []
    table = _ready(connection)
    try:
        return connection.execute(
            f"SELECT rowid, -bm25({TABLE}) FROM {table} WHERE {TABLE} MATCH ? "
            f"ORDER BY bm25({TABLE}), rowid LIMIT ?",
            (match, k),
        ).fetchall()
    except connection.OperationalError:
        raise
    except connection.DatabaseError as error:
        raise IndexFormatError(
            f"the index of words is damaged ({error}); 'kvrag verify --repair' makes it anew"
        ) from error


def any_word_of(question: str) -> str:
    """Return a question's words as an expression of FTS5: each quoted, any of them enough."""
    words = dict.fromkeys(re.findall(r"\w+", question.casefold()))
    return " OR ".join(f'"{word}"' for word in list(words)[:_MAX_WORDS])


def damage(connection: sqlite3.Connection) -> str:
    """Return what is wrong with the index; "" where it is sound, or is not there yet."""
    if not _is_there(connection):
        return ""
    try:
        connection.execute(f"INSERT INTO {TABLE} ({TABLE}) VALUES ('integrity-check')")
        (num_unlike,) = connection.execute(
            f"SELECT (SELECT COUNT(*) FROM chunks c LEFT JOIN {TABLE} w ON w.rowid = c.row "
            f"WHERE w.text IS NOT c.text) + (SELECT COUNT(*) FROM {TABLE} WHERE rowid NOT IN "
            "(SELECT row FROM chunks))"
        ).fetchone()
    except connection.DatabaseError as error:
        if "readonly" in str(error):
            return ""  # it cannot be checked without the right to write
        return f"the index of words is damaged ({error})"
    return f"the index of words is wrong for {num_unlike:,} chunks" if num_unlike else ""


def rebuild(connection: sqlite3.Connection) -> None:
    """Make the index anew from the chunks, in one transaction."""
    with _transaction(connection):
        for name in _TRIGGERS:
            connection.execute(f"DROP TRIGGER IF EXISTS {name}")
        connection.execute(f"DROP TABLE IF EXISTS {TABLE}")
        connection.execute(f"CREATE VIRTUAL TABLE {_DECLARATION}")
        for name, what in _TRIGGERS.items():
            connection.execute(f"CREATE TRIGGER {name} {what}")
        connection.execute(_FILL.format(schema="main"))


def _ready(connection: sqlite3.Connection) -> str:
    """Return the index's table, made now where it is missing."""
    if _is_there(connection):
        return f"main.{TABLE}"
    try:
        try:
            rebuild(connection)
        except connection.OperationalError as error:
            if "readonly" not in str(error):
                raise
            return _in_memory(connection)
    except connection.OperationalError as error:
        if "no such module" not in str(error):
            raise
        raise StoreError(
            "searching by words needs SQLite with FTS5, which this Python's lacks: search without "
            "--sparse, or use another build of Python"
        ) from error
    return f"main.{TABLE}"


def _in_memory(connection: sqlite3.Connection) -> str:
    """Return an index beside a catalog that cannot be written, made anew when that has changed."""
    (generation,) = connection.execute("SELECT generation FROM main.state").fetchone()
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_temp_master")}
    if f"{TABLE}_{generation}" not in names:
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute(f"DROP TABLE IF EXISTS temp.{TABLE}")
        connection.execute(f"CREATE VIRTUAL TABLE temp.{_DECLARATION}")
        connection.execute(_FILL.format(schema="temp"))
        for name in names:
            if re.fullmatch(rf"{TABLE}_\d+", name):
                connection.execute(f"DROP TABLE temp.{name}")
        connection.execute(f"CREATE TEMP TABLE {TABLE}_{generation} (mark)")
    return f"temp.{TABLE}"


def _is_there(connection: sqlite3.Connection) -> bool:
    names = (TABLE, *_TRIGGERS)
    (found,) = connection.execute(
        f"SELECT COUNT(*) FROM sqlite_master WHERE name IN ({','.join('?' * len(names))})", names
    ).fetchone()
    return bool(found == len(names))


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
