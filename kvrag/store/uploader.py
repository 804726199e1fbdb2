"""Background uploads of records from the disk tier to a slower store."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from kvrag.chunk import ChunkKey
from kvrag.errors import RecordError, StoreError, StoreUnreachableError
from kvrag.store.base import Store
from kvrag.store.capabilities import Pins, capability
from kvrag.store.outbox import Entry, Outbox
from kvrag.store.wrapper import read_whole

_FIRST_RETRY_SECONDS = 0.5
_LONGEST_RETRY_SECONDS = 30.0
# Age after which a listed record that is not on disk is given up.
_ABANDONED_SECONDS = 3600.0


Check = Callable[[ChunkKey, bytes], None]
"""Raises RecordError unless the bytes are a key's whole record."""


class Uploader:
    """Writes records to a disk tier, and uploads them from there in a thread.

    Parameters
    ----------
    disk, home
        The disk tier, and the store to upload to.
    folder
        Where the list of records to upload is kept.
    check
        Check that a record must pass before it is uploaded.

    Raises
    ------
    StoreError
        When the list cannot be used.
    """

    def __init__(self, disk: Store, home: Store, folder: Path, check: Check) -> None:
        self._disk = disk
        self._home = home
        self._pins = capability(disk, Pins)
        self._check = check
        self._outbox = Outbox(folder)
        self._wake = threading.Condition()
        self._is_closing = False
        self._has_failed = False
        self._is_idle = False
        self._version = 1
        # A record that has not been uploaded is nowhere but on disk.
        self._pin(*self._outbox.keys())
        self._thread = threading.Thread(target=self._run, name="kvrag-upload", daemon=True)
        self._thread.start()

    @property
    def num_pending(self) -> int:
        """Number of records that are yet to be uploaded."""
        return len(self._outbox.keys())

    def write(self, key: ChunkKey, record: bytes, *, is_replacing: bool) -> None:
        """Write a record to the disk tier, durably, and list it for upload.

        A record for which there is no room on disk is uploaded at once.

        Raises
        ------
        StoreError
            When neither store takes the record.
        """
        # Listed first: a record that is not listed would never be uploaded.
        self._list(key, is_replacing)
        try:
            write_to(self._disk, key, record, is_replacing)
        except StoreError:
            try:
                write_to(self._home, key, record, is_replacing)
                if is_replacing:
                    self._disk.delete(key)  # the old one would be found before the new one
            finally:
                self.forget(key)
            return
        if not self._outbox.contains(key):
            # Uploaded already, or given up as lost because a clock jumped.
            self._list(key, is_replacing)
        with self._wake:
            self._version += 1
            self._is_idle = False
            self._wake.notify_all()

    def forget(self, key: ChunkKey, number: int | None = None) -> None:
        """Remove a record from the list: any entry, or only the one with `number`."""
        if self._outbox.remove(key, number) and self._pins is not None:
            self._pins.unpin([key])

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """Wait until all is uploaded; say whether it is. Stops at once when an upload fails."""
        with self._wake:
            self._has_failed = self._is_idle = False
            self._version += 1
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._is_idle or self._has_failed, timeout_seconds)
            return self._is_idle

    def close(self) -> None:
        """Upload as much as possible; the rest stays listed."""
        self.flush()
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
        self._thread.join()
        self._outbox.close()

    # -- private -----------------------------------------------------------------------------

    def _run(self) -> None:
        pause = _FIRST_RETRY_SECONDS
        number = version = num_refused = 0
        while True:
            with self._wake:
                if self._is_closing:
                    return
                if version != self._version:
                    # Something was written: look again at all entries, also those skipped before.
                    number, version, num_refused = 0, self._version, 0
            try:
                entry = self._outbox.after(number)
                if entry is not None:
                    num_refused += not self._is_done_with(entry)
                    number = entry.number
                    continue
            except StoreError:
                has_failed = True
            else:
                has_failed = num_refused > 0
                number = num_refused = 0
            with self._wake:
                self._has_failed, self._is_idle = has_failed, not has_failed
                self._wake.notify_all()
                if version == self._version and not self._is_closing:
                    self._wake.wait(pause if has_failed else None)
            pause = min(2 * pause, _LONGEST_RETRY_SECONDS) if has_failed else _FIRST_RETRY_SECONDS

    def _is_done_with(self, entry: Entry) -> bool:
        """Upload a record; return False if it was refused. Raises StoreError if all would be."""
        try:
            self._upload(entry)
        except StoreUnreachableError:
            raise
        except Exception:
            # Whatever happens with this record, the thread must serve the others.
            return False
        return True

    def _upload(self, entry: Entry) -> None:
        try:
            record = self._disk.open(entry.key)
            if record is not None:
                with contextlib.closing(record):
                    content = read_whole(record)
                self._check(entry.key, content)
        except RecordError:
            # Damaged, so there is nothing to upload: the next reader computes it again.
            self._disk.note_damage(entry.key)
            self._disk.delete(entry.key)
        else:
            if record is not None:
                write_to(self._home, entry.key, content, entry.replaces)
            elif entry.age_seconds < _ABANDONED_SECONDS:
                return  # it is being written, or its writer was killed before it was
        self.forget(entry.key, entry.number)

    def _list(self, key: ChunkKey, replaces: bool) -> None:
        if self._outbox.add(key, replaces=replaces):
            self._pin(key)

    def _pin(self, *keys: ChunkKey) -> None:
        if self._pins is not None:
            self._pins.pin(keys)


def write_to(store: Store, key: ChunkKey, record: bytes, is_replacing: bool) -> None:
    """Put a record into a store, or replace the one there."""
    if is_replacing:
        store.replace(key, record)
    else:
        store.put(key, record)
