"""Writes of the index of segments, all in one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from kvrag.chunk import ChunkKey
from kvrag.store.segments import Place

# Which rows say where a record is. SQLite keeps any value in any column.
IS_PLACE = (
    "(typeof(key) = 'blob' AND length(key) = 20 AND typeof(segment) = 'integer' "
    "AND typeof(offset) = 'integer' AND typeof(size) = 'integer' AND size BETWEEN 0 AND 1 << 48)"
)
# Number, end as noted (NULL if it is no number) and end of the last record of each segment.
ENDS = (
    "SELECT number, CASE typeof(end) WHEN 'integer' THEN end END, "
    f"(SELECT MAX(offset + size) FROM records WHERE segment = number AND {IS_PLACE}) "
    "FROM segments UNION ALL SELECT segment, NULL, MAX(offset + size) FROM records "
    f"WHERE {IS_PLACE} AND segment NOT IN (SELECT number FROM segments) GROUP BY segment"
)
_LARGEST_NUMBER = 10**12 - 1  # of a segment: its file's name has 12 digits at most


class IndexWriter:
    """One transaction on a `kvrag.store.segment_index.SegmentIndex`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def find(self, key: ChunkKey) -> Place | None:
        """Return the place of the record of `key`, or None if no sound row names one."""
        row = self._connection.execute(
            f"SELECT segment, offset, size FROM records WHERE key = ? AND {IS_PLACE}",
            (blob(key),),
        ).fetchone()
        return None if row is None else Place(*row)

    def is_empty(self, segment: int) -> bool:
        """Return whether a segment holds no record."""
        query = "SELECT 1 FROM records WHERE segment = ? LIMIT 1"
        return self._connection.execute(query, (segment,)).fetchone() is None

    def next_segment(self) -> int:
        """Return a segment number that was never used before."""
        numbers = self._connection.execute(
            "SELECT seq FROM sqlite_sequence WHERE name = 'segments' AND typeof(seq) = 'integer' "
            "UNION ALL SELECT number FROM segments UNION ALL SELECT segment FROM records"
        )
        return 1 + max((n for (n,) in numbers if _is_number(n)), default=0)

    def last_segment(self) -> tuple[int, int | None, int]:
        """Return number and noted end of the segment being filled, and where its last record ends.

        The noted end is None if it is damaged. The number is 0 if there is no segment.
        """
        row = self._connection.execute(
            "SELECT number, CASE typeof(end) WHEN 'integer' THEN end END FROM segments "
            "WHERE number BETWEEN 1 AND ? ORDER BY number DESC LIMIT 1",
            (_LARGEST_NUMBER,),
        ).fetchone()
        if row is None:
            return 0, 0, 0
        (last,) = self._connection.execute(
            f"SELECT COALESCE(MAX(offset + size), 0) FROM records WHERE segment = ? AND {IS_PLACE}",
            row[:1],
        ).fetchone()
        return (*row, last)

    def set(self, key: ChunkKey, place: Place) -> None:
        """Note where a record is, replacing its earlier place."""
        self._note_end(place.segment, place.end)
        self._connection.execute(
            "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)",
            (blob(key), place.segment, place.offset, place.size_bytes),
        )

    def remove(self, key: ChunkKey) -> bool:
        """Forget a record; return whether there was one."""
        return bool(
            self._connection.execute("DELETE FROM records WHERE key = ?", (blob(key),)).rowcount
        )

    def segments(self) -> list[tuple[int, int]]:
        """Return each segment's number and its bytes still in use, in order."""
        return self._connection.execute(
            f"SELECT number, (SELECT CAST(TOTAL(size) AS INTEGER) FROM records "
            f"WHERE segment = number AND {IS_PLACE}) FROM segments ORDER BY number"
        ).fetchall()

    def named(self) -> frozenset[int]:
        """Return the numbers of the segments that rows of either table name."""
        numbers = self._connection.execute(
            "SELECT number FROM segments UNION SELECT segment FROM records"
        )
        return frozenset(number for (number,) in numbers if isinstance(number, int))

    def places(self, segment: int) -> list[tuple[ChunkKey, Place]]:
        """Return the records in a segment, in order."""
        rows = self._connection.execute(
            "SELECT key, segment, offset, size FROM records "
            f"WHERE segment = ? AND {IS_PLACE} ORDER BY offset",
            (segment,),
        )
        return [(ChunkKey(key.hex()), Place(*place)) for key, *place in rows]

    def mend(self, lengths: Mapping[int, int]) -> None:
        """Remove rows that name no place, and correct wrong ends.

        Parameters
        ----------
        lengths
            The length of each segment's file.
        """
        self._connection.execute("REINDEX")
        self._connection.execute(f"DELETE FROM records WHERE {IS_PLACE} IS NOT 1")
        for number, end, last in self._connection.execute(ENDS).fetchall():
            if number in lengths and not is_end(end, last, lengths[number]):
                self._note_end(number, lengths[number])

    def drop_segment(self, segment: int) -> None:
        """Forget a segment that holds no record."""
        self._connection.execute("DELETE FROM segments WHERE number = ?", (segment,))

    def _note_end(self, segment: int, end: int) -> None:
        self._connection.execute(
            "INSERT INTO segments VALUES (?, ?) "
            "ON CONFLICT (number) DO UPDATE SET end = excluded.end",
            (segment, end),
        )


def is_end(end: int | None, last: int | None, length: int) -> bool:
    """Return whether a noted end can be one of a segment's file with that length.

    Parameters
    ----------
    end
        The noted end; None if it is no number.
    last
        Where the segment's last record ends; None if it has none.
    """
    # A file that was cut short is reported by its records.
    return end is not None and min(last or 0, length) <= end <= length


def _is_number(number: object) -> bool:
    return isinstance(number, int) and 0 <= number < _LARGEST_NUMBER


def blob(key: ChunkKey) -> bytes:
    """Return a key as the rows hold it."""
    return bytes.fromhex(key.digest)
