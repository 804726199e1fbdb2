"""Encrypted records: AES-256-GCM around any store.

Each key holds a header of 64 bytes (magic ``89 4B 56 45 4E 43 0D 0A``, version, bytes of a frame,
bytes of the record, salt of 32 bytes, all little-endian, then zeros), followed by frames. A frame
is 64 KiB of the record (the last one is what remains) and its tag of 16 bytes. Each record has a
separate key (HKDF-SHA256 of the tenant's key over the salt), so a frame's number can be its nonce.
The tag also authenticates the chunk key, the header and the frame's number: nobody can swap frames,
move them to another record, or cut them off. Reading a range reads the frames that cover it.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvrag.chunk import ChunkKey
from kvrag.errors import ParameterError, RecordError
from kvrag.plugins import require
from kvrag.store.base import Store, StoredRecord, StoreWrapper, check_range
from kvrag.store.file import read_secret

KEY_BYTES = 32
FRAME_BYTES = 64 << 10

MAGIC = b"\x89KVENC\r\n"
_VERSION = 1
_TAG_BYTES = 16
# magic, version, bytes of a frame, bytes of the record, salt, zero
_HEADER = struct.Struct("<8sIIQ32s8s")
HEADER_BYTES = _HEADER.size


def read_key(path: str | Path) -> bytes:
    """Return the key from a file of 64 hexadecimal digits.

    Raises
    ------
    ParameterError
        When the file cannot be read, holds something else, or other users may read it.
    """
    text = read_secret(path, "key", " of 64 hexadecimal digits")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ParameterError(
            f"{path}: a key is 64 hexadecimal digits, found {len(text)} characters; make one with "
            "'openssl rand -hex 32'"
        )
    return key


class EncryptedStore(StoreWrapper):
    """A store whose records are encrypted; the sizes it returns are those of the plain records.

    Parameters
    ----------
    inner
        Where the encrypted records are kept.
    key
        A tenant's key, 32 bytes.
    key_file
        Path of the key's file, which becomes part of the URL; "" if the key is from no file.

    Raises
    ------
    ParameterError
        When the key has another length, or the library ``cryptography`` is not installed.
    """

    def __init__(self, inner: Store, key: bytes, key_file: str = "") -> None:
        super().__init__(inner)
        self._key_file = key_file
        if len(key) != KEY_BYTES:
            raise ParameterError(f"a key is {KEY_BYTES} bytes, found {len(key)}")
        self._key = key
        self._aead = require("cryptography.hazmat.primitives.ciphers.aead", "encryption")
        self._hkdf = require("cryptography.hazmat.primitives.kdf.hkdf", "encryption")
        self._hashes = require("cryptography.hazmat.primitives.hashes", "encryption")
        self.invalid_tag = require("cryptography.exceptions", "encryption").InvalidTag

    @property
    def url(self) -> str:
        """The inner store's URL with the key's path."""
        url = self.inner.url
        if not self._key_file:
            return url
        return f"{url}{'&' if '?' in url else '?'}key_file={self._key_file}"

    def derive(self, purpose: bytes, salt: bytes | None = None) -> bytes:
        """Return 32 bytes derived from the tenant's key, different for each purpose and salt."""
        derived = self._hkdf.HKDF(
            algorithm=self._hashes.SHA256(), length=KEY_BYTES, salt=salt, info=purpose
        )
        return bytes(derived.derive(self._key))

    def put(self, key: ChunkKey, record: bytes) -> None:
        """Encrypt and write a record; an existing record stays."""
        if not self.inner.contains(key):
            self.inner.put(key, self._encrypt(key, record))

    def replace(self, key: ChunkKey, record: bytes) -> None:
        """Encrypt and write a record in place of the existing one."""
        self.inner.replace(key, self._encrypt(key, record))

    def open(self, key: ChunkKey) -> StoredRecord | None:
        """Open a record for reading, or return None if there is none.

        Raises
        ------
        RecordError
            When the record is not encrypted.
        StoreError
            When the store does not deliver the record.
        """
        record = self.inner.open(key)
        if record is None:
            return None
        try:
            return _EncryptedRecord(self, key, record)
        except BaseException:
            record.close()
            raise

    def sizes(self) -> Iterator[tuple[ChunkKey, int]]:
        """Iterate over keys and the bytes of their records, without the encryption overhead."""
        return ((key, _plain_size(size)) for key, size in self.inner.sizes())

    def cipher(self, salt: bytes) -> Any:
        """Return the cipher for the record with `salt`."""
        return self._aead.AESGCM(self.derive(b"kvrag record", salt))

    def _encrypt(self, key: ChunkKey, record: bytes) -> bytes:
        salt = secrets.token_bytes(32)
        header = _HEADER.pack(MAGIC, _VERSION, FRAME_BYTES, len(record), salt, bytes(8))
        cipher = self.cipher(salt)
        context = _context(key, header)
        view = memoryview(record)
        frames = (
            cipher.encrypt(_nonce(number), view[start : start + FRAME_BYTES], context)
            for number, start in enumerate(range(0, max(len(record), 1), FRAME_BYTES))
        )
        return b"".join([header, *frames])


class _EncryptedRecord:
    """An opened record of an `EncryptedStore`."""

    def __init__(self, store: EncryptedStore, key: ChunkKey, inner: StoredRecord) -> None:
        self._store = store
        self._key = key
        self._inner = inner
        header = bytearray(HEADER_BYTES)
        if inner.size_bytes >= HEADER_BYTES:
            inner.read_into(0, memoryview(header))
        magic, version, frame_bytes, self._size_bytes, salt, _ = _HEADER.unpack(header)
        if (magic, version, frame_bytes) != (MAGIC, _VERSION, FRAME_BYTES):
            what = f"an encrypted record of version {_VERSION}"
            raise self._refuse(what, "another one, perhaps stored without a key")
        if inner.size_bytes != _kept_size(self._size_bytes):
            raise self._refuse(f"{_kept_size(self._size_bytes)} bytes", f"{inner.size_bytes} bytes")
        self._context = _context(key, bytes(header))
        self._cipher = store.cipher(salt)

    @property
    def size_bytes(self) -> int:
        return int(self._size_bytes)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        check_range(self._key, self.size_bytes, offset, buffer.nbytes)
        end = offset + buffer.nbytes
        first, last = offset // FRAME_BYTES, max(end - 1, offset) // FRAME_BYTES
        step = FRAME_BYTES + _TAG_BYTES
        begin = HEADER_BYTES + first * step
        kept = bytearray(min(HEADER_BYTES + (last + 1) * step, self._inner.size_bytes) - begin)
        self._inner.read_into(begin, memoryview(kept))
        view = memoryview(kept)
        for number in range(first, last + 1):
            frame = view[(number - first) * step : (number - first + 1) * step]
            try:
                content = self._cipher.decrypt(_nonce(number), frame, self._context)
            except self._store.invalid_tag:
                raise self._refuse(
                    "what this key has encrypted", "other bytes, or another key's"
                ) from None
            start = number * FRAME_BYTES
            part = content[max(offset - start, 0) : end - start]
            at = max(start - offset, 0)
            buffer[at : at + len(part)] = part

    def close(self) -> None:
        self._inner.close()

    def _refuse(self, expected: str, found: str) -> RecordError:
        return RecordError(
            f"record {self._key} in {self._store.url}: expected {expected}, found {found}; use the "
            "key it was stored with, or delete it and ingest its document again"
        )


def _context(key: ChunkKey, header: bytes) -> bytes:
    return bytes.fromhex(key.digest) + header


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")


def _kept_size(size_bytes: int) -> int:
    num_frames = max(-(-size_bytes // FRAME_BYTES), 1)
    return HEADER_BYTES + size_bytes + num_frames * _TAG_BYTES


def _plain_size(kept_bytes: int) -> int:
    frames = max(kept_bytes - HEADER_BYTES, 0)
    num_frames = max(-(-frames // (FRAME_BYTES + _TAG_BYTES)), 1)
    return max(frames - num_frames * _TAG_BYTES, 0)
