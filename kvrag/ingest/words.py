"""Search by words, and by metadata: an index of the chunks' texts and fields, in SQLite.

Everything that compares words folds and cuts them by these functions: this
index, the hashing embedding, and what compares two texts. Stored texts stay as they are.
Scripts that write no spaces between words (Chinese, Japanese, Thai, Lao, Khmer, Burmese) have no
words here, but each two neighbouring characters; so has Korean, which joins particles to its words.
docs/results/retrieval.md has what else was tried.

Words are ranked by BM25 over SQLite's own full-text
index (FTS5). Filters (`kvrag.ingest.filters`) look values of fields up.

The index is a separate file next to the catalog (encrypted if the catalog is), so that its damage
never reaches the catalog. It is a cache: the first search builds it, and a later search updates it
if the catalog has changed. It is never changed in place: a new file replaces the old one. Its last
bytes name the catalog version it covers and seal the whole file. They are checked before each use,
and a file that fails the check is rebuilt. A search returns only row numbers: the catalog reads,
and checks, the chunks.

Source of the ranking: SQLite's ``bm25`` (k1 = 1.2, b = 0.75).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import secrets
import unicodedata
from collections.abc import Iterator, Sequence
from typing import IO, Any

import regex
import xxhash

from kvrag.errors import StoreError
from kvrag.ingest.catalogfile import CatalogFile, checked
from kvrag.ingest.config import WORDS_NAME
from kvrag.ingest.filters import Filter, searched_fields, values_of
from kvrag.ingest.schema import CHECKSUM_BYTES, CHUNK_COLUMNS, PackedChunk, unpack_json
from kvrag.regularfile import open_regular
from kvrag.sqlitefile import library, open_connection, unlock

# Unicode's sets, with regex's own syntax: a set may be cut with another (&&), or lack it (--).
_LETTERS = r"[\p{L}\p{N}\p{M}\p{Co}]"
_SPACELESS = (
    r"[[\p{scx=Han}\p{scx=Hiragana}\p{scx=Katakana}\p{scx=Bopomofo}\p{Hangul}"
    rf"\p{{Line_Break=Complex_Context}}]&&{_LETTERS}]"
)
_WORD = regex.compile(rf"(?V1){_LETTERS}+")
_IS_SPACELESS = regex.compile(rf"(?V1){_SPACELESS}")
_PART = regex.compile(rf"(?V1){_SPACELESS}+|[{_LETTERS}--{_SPACELESS}]+")
_CHARACTER = regex.compile(r"\X")  # with the marks over and under it
_IGNORED = regex.compile(r"[\p{Default_Ignorable_Code_Point}\N{ARABIC TATWEEL}]")
_LONG = 4


def folded(text: str) -> str:
    """Return a text without what no reader searches for.

    Case, compatibility forms (ligatures, full-width and half-width letters), accents, vowel points,
    and invisible characters such as soft hyphens are folded. A dotless i is an i, as its capital
    is. Marks that are letters stay: vowels of Thai and Hindi, voiced kana.
    """
    if text.isascii():
        return text.lower()
    text = unicodedata.normalize("NFKD", text).casefold()
    changes = {ord(one): "" for one in set(text) if _is_accent(unicodedata.combining(one))}
    changes[ord("\N{LATIN SMALL LETTER DOTLESS I}")] = "i"
    return unicodedata.normalize("NFKC", _IGNORED.sub("", text.translate(changes)))


def words_of(text: str) -> Iterator[str]:
    """Yield a text's words, folded, for an index.

    A run of a script without spaces gives each two neighbouring characters, and its last one: so
    each of its characters begins a word.
    """
    for word, characters in _parts(text):
        if characters:
            yield from map("".join, itertools.pairwise([*characters, ""]))
        else:
            yield word


def asked_words(text: str) -> Iterator[str]:
    """Yield a text's words, folded, to look up: as `words_of`, without the last character of runs.

    A run of one character gives that one.
    """
    for word, characters in _parts(text):
        if len(characters) > 1:
            yield from map("".join, itertools.pairwise(characters))
        else:
            yield word


def long_words(text: str) -> set[str]:
    """Return the words that say what a text is about: four letters or more, or of such a run."""
    return {word for word in asked_words(text) if len(word) >= _LONG or is_spaceless(word)}


def is_spaceless(word: str) -> bool:
    """Return whether a word is from a run of a script without spaces."""
    return _IS_SPACELESS.match(word) is not None


def _parts(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield words, and the characters of those that are runs of scripts without spaces."""
    text = folded(text)
    if _IS_SPACELESS.search(text) is None:
        yield from ((word, []) for word in _WORD.findall(text))
        return
    for word in _PART.findall(text):
        yield word, _CHARACTER.findall(word) if is_spaceless(word) else []


def _is_accent(combining_class: int) -> bool:
    # Points of Hebrew, Arabic and Syriac; and what is above or below in any script.
    return 10 <= combining_class <= 36 or combining_class >= 202


_SCHEMA = """
CREATE TABLE of (row INTEGER PRIMARY KEY, seal BLOB);
CREATE VIRTUAL TABLE words USING fts5(text, tokenize = 'ascii');
CREATE TABLE fields (name, value, row INTEGER, PRIMARY KEY (name, value, row)) WITHOUT ROWID;
"""
# A question with more words is a document; further words would find little more.
_MAX_WORDS = 256
_BATCH = 1 << 20
_VERSION = b"5"
_OLDER = b"3"  # of 0.2.0: sound, but made again before it is used
_TAIL_BYTES = 2 * CHECKSUM_BYTES  # version of the catalog, seal of the file


class WordIndex:
    """The index of words of one catalog. Safe to use from several threads."""

    def __init__(self, catalog: CatalogFile) -> None:
        self._catalog = catalog
        self._path = catalog.path.with_name(WORDS_NAME)
        self._connection: Any = None
        self._mark = b""

    @property
    def _sql(self) -> Any:
        return library(self._catalog.cipher_key)

    def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def discard(self) -> None:
        """Remove the file; the next search rebuilds it."""
        self.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    @checked
    def search(
        self, question: str, k: int, wanted: Filter | None = None
    ) -> list[tuple[int, float]]:
        """Return row number and BM25 score of the `k` best chunks for any of a question's words.

        Equal scores appear in the order of indexing. A question without words finds nothing.

        Parameters
        ----------
        wanted
            Which chunks may be found; None means all.

        Raises
        ------
        StoreError
            When this Python's SQLite has no FTS5.
        """
        match = any_word_of(question)
        if not match:
            return []
        # Unary plus: the words are looked up, not each row that the filter admits.
        also = "" if wanted is None else f"AND +rowid IN ({_WHERE.format(wanted.condition)}) "
        values = () if wanted is None else wanted.values
        found: list[tuple[int, float]] = self._select(
            f"SELECT rowid, -bm25(words) FROM words WHERE words MATCH ? {also}"
            "ORDER BY bm25(words), rowid LIMIT ?",
            (match, *values, k),
        )
        return found

    @checked
    def rows_of(self, wanted: Filter) -> list[int]:
        """Return the chunk rows that a filter admits, ascending. Raises as `search`."""
        found = self._select(f"{_WHERE.format(wanted.condition)} ORDER BY row", wanted.values)
        return [row for (row,) in found]

    def _select(self, statement: str, values: Sequence[Any]) -> list[Any]:
        """Return the result of a statement over an index of the current catalog."""
        with self._catalog.snapshot():
            found = self._selected(statement, values)
        if self._connection is not None and self._mark != self._current_mark():
            # A process that removed texts meanwhile found no file to take them out of.
            self.discard()
        return found

    def _selected(self, statement: str, values: Sequence[Any]) -> list[Any]:
        try:
            try:
                return self._ready().execute(statement, values).fetchall()  # type: ignore[no-any-return]
            except self._sql.DatabaseError as error:
                # SQLite refuses a statement by the same class as a file: the seal tells them apart.
                if isinstance(error, self._sql.OperationalError) and not self.damage():
                    raise
                self.discard()  # damaged after it was opened
                return self._ready().execute(statement, values).fetchall()  # type: ignore[no-any-return]
        except self._sql.OperationalError as error:
            if not _lacks_fts5(error):
                raise StoreError(
                    f"{self._path}: SQLite cannot do this search ({error}); ask with fewer words "
                    "or a smaller filter"
                ) from error
            raise StoreError(
                "searching by words or with a filter needs SQLite with FTS5, which this Python's "
                "lacks: search with --dense (Index.search_dense) and no filter, or use another "
                "build of Python"
            ) from error

    @checked
    def refresh(self) -> None:
        """Update the file, if there is one; remove it if it is damaged.

        No text that has left the catalog stays in the file.
        """
        if not self._path.is_file():
            return
        self.close()
        with self._catalog.snapshot():
            try:
                if (self._tail() or b"")[:CHECKSUM_BYTES] != self._current_mark():
                    self._write()
            except (self._sql.DatabaseError, OSError):
                self.discard()

    @checked
    def damage(self) -> str:
        """Return what is wrong with the file; "" if it is sound or missing."""
        if not self._path.exists() or self._tail() or self._tail(_OLDER):
            return ""
        return "the index of words is damaged (its file is not what was written)"

    def _current_mark(self) -> bytes:
        """Return 16 bytes that change whenever the catalog changes."""
        row = repr(self._catalog.rows("SELECT * FROM state"))
        return self._catalog.checksums.whole([row.encode()])

    def _ready(self) -> Any:
        """Return a connection to an index of the current catalog."""
        mark = self._current_mark()
        if self._connection is not None and self._mark == mark:
            return self._connection
        self.close()
        tail = self._tail()
        if tail is None or tail[:CHECKSUM_BYTES] != mark:
            try:
                self._write()
            except (self._sql.DatabaseError, OSError) as error:
                if _lacks_fts5(error):
                    raise
                # The folder refuses the write, or is full.
                self._connection = self._sql.connect(":memory:", **_OPTIONS)
                self._fill(self._connection)
        if self._connection is None:
            self._connection = open_connection(
                f"{self._path.absolute().as_uri()}?mode=ro&immutable=1",
                sql=self._sql,
                uri=True,
                **_OPTIONS,
            )
            unlock(self._connection, self._catalog.cipher_key)
        self._mark = mark
        return self._connection

    def _tail(self, version: bytes = _VERSION, copy: IO[bytes] | None = None) -> bytes | None:
        """Return the file's last bytes; None if it is missing, damaged, or of another version.

        `copy` gets what is before them.
        """
        digest = _digest_of(version)
        try:
            with open_regular(self._path) as file:
                left = os.fstat(file.fileno()).st_size - _TAIL_BYTES
                while left > 0:
                    part = file.read(min(left, _BATCH))
                    if not part:
                        return None
                    digest.update(part)
                    if copy is not None:
                        copy.write(part)
                    left -= len(part)
                tail = file.read()
        except OSError:
            return None
        is_right = tail[CHECKSUM_BYTES:] == self._catalog.checksums.whole(
            (version, tail[:CHECKSUM_BYTES], digest.digest()), "words"
        )
        return tail if len(tail) == _TAIL_BYTES and is_right else None

    def _write(self) -> None:
        """Replace the file by one for the current catalog."""
        temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}.tmp")
        try:
            with temporary.open("wb") as file:
                is_sound = self._tail(copy=file) is not None
            if not is_sound:  # otherwise of an earlier catalog, and most of it is still valid
                os.truncate(temporary, 0)
            with contextlib.closing(self._sql.connect(temporary, **_OPTIONS)) as connection:
                unlock(connection, self._catalog.cipher_key)
                # No other process sees the file, and a partial one is thrown away.
                connection.execute("PRAGMA journal_mode = OFF")
                connection.execute("PRAGMA synchronous = OFF")
                connection.execute("PRAGMA secure_delete = ON")
                self._fill(connection)
            digest = _digest_of(_VERSION)
            with temporary.open("r+b") as file:
                while part := file.read(_BATCH):
                    digest.update(part)
                mark = self._current_mark()
                file.write(
                    mark + self._catalog.checksums.whole((_VERSION, mark, digest.digest()), "words")
                )
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
        finally:
            temporary.unlink(missing_ok=True)

    def _fill(self, connection: Any) -> None:
        """Bring the content of an index up to date with the catalog."""
        connection.execute("PRAGMA temp_store = MEMORY")
        if not connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
            connection.executescript(_SCHEMA)
        old = dict(connection.execute("SELECT row, seal FROM of"))
        new = dict(self._catalog.scan("row, seal"))
        gone = [(row,) for row, seal in old.items() if new.get(row) != seal]
        added = [row for row, seal in new.items() if row not in old or old[row] != seal]
        connection.execute("BEGIN")
        connection.executemany("DELETE FROM words WHERE rowid = ?", gone)
        connection.executemany("DELETE FROM of WHERE row = ?", gone)
        if gone:
            connection.execute("DELETE FROM fields WHERE row NOT IN (SELECT row FROM of)")
        for one in self._catalog.select_in(CHUNK_COLUMNS, "row", added):
            if not self._catalog.checksums.is_right("chunk", one):
                continue  # tried again when the catalog has changed
            packed = PackedChunk(*one[:-1])
            row, words = packed.row, " ".join(words_of(packed.text))
            connection.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (row, words))
            connection.execute("INSERT INTO of VALUES (?, ?)", (row, one[-1]))
            fields = searched_fields(packed.source, packed.ordinal, unpack_json(packed.metadata))
            connection.executemany(
                "INSERT OR IGNORE INTO fields VALUES (?, ?, ?)",
                ((name, value, row) for name, value in values_of(fields)),
            )
        if gone:  # merging removes the words of deleted texts
            connection.execute("INSERT INTO words (words) VALUES ('optimize')")
        connection.execute("COMMIT")


_WHERE = "SELECT row FROM of WHERE {}"
_OPTIONS: dict[str, Any] = {"isolation_level": None, "check_same_thread": False}


def _digest_of(version: bytes) -> Any:
    """Return what digests a file: whole files are read at each change, so it must be fast."""
    return hashlib.blake2b(digest_size=CHECKSUM_BYTES) if version == _OLDER else xxhash.xxh3_128()


def any_word_of(question: str) -> str:
    """Return a question's words as an FTS5 expression: each quoted, any of them enough."""
    words = list(dict.fromkeys(asked_words(question)))[:_MAX_WORDS]
    # A run of one character finds the pairs that begin with it; other pairs begin with no other.
    return " OR ".join(f'"{word}"{" *" if is_spaceless(word) else ""}' for word in words)


def _lacks_fts5(error: BaseException) -> bool:
    return "no such module" in str(error)
