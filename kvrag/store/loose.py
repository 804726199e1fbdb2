"""Records as separate files: ``FOLDER/ab/abcd...ef.kv``, one for each record.

This is how records were written before there were segments. They can still be read, and
`FileStore.collect_garbage` moves them into segments.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kvrag.chunk import ChunkKey
from kvrag.store.files import ABSENT, READ_FLAGS, entries, store_error

_SUFFIX = ".kv"
_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_RECORD = re.compile(r"([0-9a-f]{40})\.kv")
_TEMPORARY = re.compile(r"\.[0-9a-f]{40}\.[0-9a-f]{16}\.tmp")


class LooseRecords:
    """A folder's records that are separate files.

    Parameters
    ----------
    folder
        The store's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path_of(self, key: ChunkKey) -> Path:
        """Return the path at which the record of `key` would be."""
        return self._folder / key.digest[:2] / (key.digest + _SUFFIX)

    def open(self, key: ChunkKey) -> tuple[int, int] | None:
        """Return a file descriptor and the size of a record, or None if there is none."""
        path = self.path_of(key)
        try:
            descriptor = os.open(path, READ_FLAGS)
        except OSError as error:
            if error.errno in ABSENT:
                return None
            raise store_error("open", path, error) from error
        try:
            status = os.fstat(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise store_error("open", path, error) from error
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            return None
        return descriptor, status.st_size

    def contains(self, key: ChunkKey) -> bool:
        """Say whether there is a record of `key`."""
        path = self.path_of(key)
        try:
            return stat.S_ISREG(path.lstat().st_mode)
        except OSError as error:
            if error.errno in ABSENT:
                return False
            raise store_error("look for", path, error) from error

    def delete(self, key: ChunkKey) -> bool:
        """Remove a record and return whether there was one. Readers that have it open keep it."""
        if not self.contains(key):
            return False
        path = self.path_of(key)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise store_error("delete", path, error) from error
        return True

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over keys and sizes, in no particular order."""
        for entry in self._files():
            match = _RECORD.fullmatch(entry.name)
            if match and entry.name[:2] == Path(entry.path).parent.name:
                with contextlib.suppress(FileNotFoundError):
                    yield ChunkKey(match[1]), entry.stat(follow_symlinks=False).st_size

    def collect_garbage(self, min_age_seconds: float) -> int:
        """Remove killed processes' temporary files; return their number. Raises StoreError."""
        newest = time.time() - min_age_seconds
        num_removed = 0
        for entry in self._files():
            if not _TEMPORARY.fullmatch(entry.name):
                continue
            try:
                if entry.stat(follow_symlinks=False).st_mtime <= newest:
                    Path(entry.path).unlink()
                    num_removed += 1
            except FileNotFoundError:
                continue
            except OSError as error:
                raise store_error("remove", Path(entry.path), error) from error
        return num_removed

    def _files(self) -> Iterator[os.DirEntry[str]]:
        for folder in entries(self._folder):
            if _FAN_OUT.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
                for entry in entries(Path(folder.path)):
                    if entry.is_file(follow_symlinks=False):
                        yield entry
