"""Read and write the folder of a `FileStore` by its documented format alone."""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from kvrag.chunk import ChunkKey


def key_file(path: Path, digits: str = "ab") -> Path:
    """Write the key of an encrypted store."""
    path.write_text(digits * 32)
    path.chmod(0o600)
    return path


def file_path(folder: Path, key: ChunkKey) -> Path:
    return folder / key.digest[:2] / f"{key.digest}.kv"


def segment_path(folder: Path, number: int = 1) -> Path:
    return folder / "segments" / f"{number:08d}.seg"


def files_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def peek(folder: Path, key: ChunkKey) -> bytes:
    return file_path(folder, key).read_bytes()


def plant(folder: Path, key: ChunkKey, record: bytes) -> None:
    """Write a record as another program would."""
    path = file_path(folder, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".planted")
    temporary.write_bytes(record)
    temporary.rename(path)


def damage(folder: Path, key: ChunkKey, offset: int, mask: int = 0x10) -> None:
    """Flip bits of a stored record."""
    content = bytearray(peek(folder, key))
    content[offset % len(content)] ^= mask
    file_path(folder, key).write_bytes(content)


def pack(folder: Path, records: Mapping[ChunkKey, bytes], number: int = 1) -> None:
    """Write records into a segment, as kvrag 0.2 did."""
    content = bytearray(b"\x89KVSEG\r\n\x01".ljust(64, b"\0"))
    places = []
    for key, record in records.items():
        places.append((bytes.fromhex(key.digest), number, len(content), len(record)))
        content += record + bytes(-len(record) % 64)
    (folder / "segments").mkdir(parents=True, exist_ok=True)
    segment_path(folder, number).write_bytes(content)
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
                key BLOB PRIMARY KEY, segment INTEGER NOT NULL REFERENCES segments (number),
                offset INTEGER NOT NULL, size INTEGER NOT NULL
            ) WITHOUT ROWID;
            CREATE INDEX IF NOT EXISTS records_by_segment ON records (segment);
            """
        )
        connection.execute("INSERT INTO segments VALUES (?, ?)", (number, len(content)))
        connection.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", places)


def pack_all(folder: Path) -> None:
    """Pack all records of a folder, as if kvrag 0.2 had written it."""
    paths = sorted(folder.glob("??/*.kv"))
    pack(folder, {ChunkKey(path.stem): path.read_bytes() for path in paths})
    for path in paths:
        path.unlink()
