"""Read and write the folder of a `FileStore` by its documented format alone."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from kvrag.chunk import ChunkKey


def loose_path(folder: Path, key: ChunkKey) -> Path:
    return folder / key.digest[:2] / f"{key.digest}.kv"


def segment_path(folder: Path, number: int = 1) -> Path:
    return folder / "segments" / f"{number:08d}.seg"


def files_under(folder: Path) -> list[str]:
    """Return every file except those that SQLite keeps next to an open database."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if not name.endswith(("-wal", "-shm")))


def place_of(folder: Path, key: ChunkKey) -> tuple[int, int, int]:
    with closing(sqlite3.connect(folder / "records.sqlite")) as connection:
        return connection.execute(
            "SELECT segment, offset, size FROM records WHERE key = ?", (bytes.fromhex(key.digest),)
        ).fetchone()


def peek(folder: Path, key: ChunkKey) -> bytes:
    segment, offset, size = place_of(folder, key)
    content = segment_path(folder, segment).read_bytes()
    assert content.startswith(b"\x89KVSEG\r\n\x01")
    assert offset % 64 == 0
    return content[offset : offset + size]


def plant(folder: Path, key: ChunkKey, record: bytes) -> None:
    """Write a record as another program would, in a separate segment."""
    number = 77
    (folder / "segments").mkdir(parents=True, exist_ok=True)
    segment_path(folder, number).write_bytes(b"\x89KVSEG\r\n\x01".ljust(64, b"\0") + record)
    with closing(sqlite3.connect(folder / "records.sqlite")) as connection, connection:
        connection.executescript(
            """
            PRAGMA journal_mode = WAL;
            PRAGMA application_id = 0x6B765253;
            PRAGMA user_version = 1;
            CREATE TABLE IF NOT EXISTS segments (
                number INTEGER PRIMARY KEY AUTOINCREMENT, end INTEGER NOT NULL
            );
            CREATE TABLE IF NOT EXISTS records (
                key BLOB PRIMARY KEY, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
                size INTEGER NOT NULL
            ) WITHOUT ROWID;
            """
        )
        connection.execute("INSERT INTO segments VALUES (?, ?)", (number, 64 + len(record)))
        connection.execute(
            "INSERT OR REPLACE INTO records VALUES (?, ?, 64, ?)",
            (bytes.fromhex(key.digest), number, len(record)),
        )


def damage(folder: Path, key: ChunkKey, offset: int, mask: int = 0x10) -> None:
    """Flip bits of a stored record."""
    segment, start, size = place_of(folder, key)
    path = segment_path(folder, segment)
    content = bytearray(path.read_bytes())
    content[start + offset % size] ^= mask
    path.write_bytes(content)
