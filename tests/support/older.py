"""Indexes as earlier versions of kvrag left them."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path


def make_older(folder: Path, format_version: int = 4, without: tuple[str, ...] = ()) -> None:
    """Turn a closed index into one made before rows and ``index.json`` were sealed.

    `without` names settings that `index.json` did not have then.
    """
    path = folder / "index.json"
    values = json.loads(path.read_text())
    for name in ("checksum", "key_check", "index_id", *without):
        del values[name]
    path.write_text(json.dumps({**values, "format_version": format_version}))
    with closing(sqlite3.connect(folder / "catalog.sqlite")) as connection:
        (generation,) = connection.execute("SELECT generation FROM state").fetchone()
        connection.executescript(
            f"""
            DROP TABLE state;
            CREATE TABLE state (generation INTEGER NOT NULL);
            INSERT INTO state VALUES ({generation});
            ALTER TABLE files DROP COLUMN inode;
            ALTER TABLE files DROP COLUMN ctime_ns;
            ALTER TABLE files DROP COLUMN seal;
            ALTER TABLE documents DROP COLUMN num_chunks;
            ALTER TABLE documents DROP COLUMN chunks;
            ALTER TABLE documents DROP COLUMN seal;
            ALTER TABLE chunks DROP COLUMN seal;
            ALTER TABLE chunks DROP COLUMN vector_seal;
            PRAGMA user_version = 2;
            """
        )
