"""Seals: keyed digests that show whether a row of the catalog is unchanged.

Each seal is a 16-byte BLAKE2b digest, separated by table, with a key derived from the tenant's salt
and the index's id. It is a checksum against accidents and rows of other indexes: ``index.json``
holds the salt, so anyone who may write to the folder can make one. (In an encrypted catalog, the
key authenticates the pages.)
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Any

SEAL_BYTES = 16

# The errors for a row with a value of another type; such a row is damaged.
_NO_VALUES = (AttributeError, TypeError, ValueError, struct.error)


def seal_key(tenant_salt: bytes, index_id: str = "") -> bytes:
    """Return the key of an index's seals: rows of another index do not pass the check."""
    said = index_id.encode()
    return hashlib.blake2b(said, key=tenant_salt, person=b"kvrag seals", digest_size=32).digest()


class Seals:
    """Makes and compares seals under one key.

    Arguments are the values of a row's columns, in the order of its table.
    """

    def __init__(self, key: bytes) -> None:
        (
            self._chunk,
            self._vector,
            self._document,
            self._file,
            self._state,
            self._whole,
            self._words,
        ) = (
            hashlib.blake2b(digest_size=SEAL_BYTES, key=key, person=b"kvrag " + table)
            for table in (b"chunk", b"vector", b"document", b"file", b"state", b"whole", b"words")
        )

    def chunk(self, values: Sequence[Any]) -> bytes:
        """Seal row, chunk_id, source, ordinal, text, token_ids, token_starts, num_tokens,
        metadata, contexts.
        """
        row, chunk_id, source, ordinal, text, ids, starts, num_tokens, metadata, contexts = values
        texts = (chunk_id.encode(), source.encode(), text.encode(), metadata.encode())
        return _seal(self._chunk, (row, ordinal, num_tokens), (*texts, ids, starts, contexts))

    def vector(self, values: Sequence[Any]) -> bytes:
        """Seal row, chunk_id, embedding."""
        row, chunk_id, embedding = values
        return _seal(self._vector, (row,), (chunk_id.encode(), embedding))

    def document(self, values: Sequence[Any]) -> bytes:
        """Seal source, file, digest, metadata, num_chunks, chunks."""
        source, file, digest, metadata, num_chunks, chunks = values
        has_file = file is not None
        texts = (source.encode(), (file or "").encode(), digest.encode(), metadata.encode())
        return _seal(self._document, (num_chunks, has_file), (*texts, chunks))

    def file(self, values: Sequence[Any]) -> bytes:
        """Seal path, digest, size_bytes, mtime_ns, inode, ctime_ns."""
        path, digest, *numbers = values
        return _seal(self._file, numbers, (path.encode(), digest.encode()))

    def state(self, values: Sequence[Any]) -> bytes:
        """Seal generation, num_documents, documents, num_files, files."""
        generation, num_documents, documents, num_files, files = values
        return _seal(self._state, (generation, num_documents, num_files), (documents, files))

    def whole(self, parts: Iterable[bytes]) -> bytes:
        """Seal a sequence of bytes."""
        parts = list(parts)
        return _seal(self._whole, map(len, parts), parts)

    def words(self, values: Sequence[bytes]) -> bytes:
        """Seal the catalog's version and the digest of a file of the index of words."""
        return _seal(self._words, map(len, values), values)

    @staticmethod
    def is_right(seal: object, make: Any, values: Sequence[Any]) -> bool:
        """Return whether a seal is what `make`, a method of this class, returns for the values."""
        try:
            return bool(seal == make(values))
        except _NO_VALUES:
            return False


def _seal(started: Any, numbers: Iterable[int], parts: Sequence[bytes]) -> bytes:
    numbers = (*numbers, *map(len, parts))
    digest = started.copy()
    # The lengths come first, so that no two rows flatten to the same bytes.
    digest.update(struct.pack(f"<{len(numbers)}q", *numbers))
    digest.update(b"".join(parts))
    return bytes(digest.digest())
