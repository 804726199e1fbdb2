"""The catalog's rows and changes as values."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from kvrag.chunk import Chunk, ChunkKey, ContextIds
from kvrag.ingest.contexts import LEAST_TOKENS, Context

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KeyOf = Callable[[Chunk], ChunkKey]
"""Returns the name that a chunk's KV must have, the first of several."""


@dataclass(frozen=True)
class FileState:
    """The state of a file when it was last read whole.

    Attributes
    ----------
    digest
        Digest of the file's content.
    size_bytes, mtime_ns, inode, ctime_ns
        The system's values for the file. A process that alters a file can restore its size and
        mtime, but not its ctime. 0 if not recorded, or too recent to distinguish changes.
    """

    path: str
    digest: str
    size_bytes: int
    mtime_ns: int
    inode: int = 0
    ctime_ns: int = 0


class StoredDocument(NamedTuple):
    """A document's row; `chunks` is the checksum of its chunks' (`joined`), in order."""

    source: str
    file: str | None
    digest: str
    metadata: str
    num_chunks: int
    chunks: bytes


class PackedChunk(NamedTuple):
    """A chunk as the values of its row, in the order of its checksum."""

    row: int
    chunk_id: str
    source: str
    ordinal: int
    text: str
    token_ids: bytes
    token_starts: bytes
    num_tokens: int
    metadata: str
    contexts: bytes


@dataclass(frozen=True)
class DocumentRow:
    """One indexed document.

    Attributes
    ----------
    source
        Its absolute path (``path#row`` for rows of a table) or its given id.
    file
        The path of the file that it was read from; None if it was given.
    num_chunks, num_tokens
        Number of its chunks, and of their tokens.
    size_bytes
        Size of its KV, uncompressed, without what prompts have made
        (`kvrag.ingest.on_demand`). Documents that share chunks share records.
    metadata
        The document's metadata as plain JSON values.
    """

    source: str
    file: str | None
    num_chunks: int
    num_tokens: int
    size_bytes: int
    metadata: Mapping[str, Any]

    @property
    def whole(self) -> str:
        """What it is a part of: its file, or for a given document the id before the last ``#``.

        A file's own name may have a ``#``, so the name of a document does not tell its file.
        """
        return self.file or self.source.rpartition("#")[0] or self.source


@dataclass(frozen=True)
class ChunkRow:
    """A chunk to write, with the names of its KV and its vectors ``[num_windows, dim]``.

    Attributes
    ----------
    keys
        The names of its KV, one for each of its contexts.
    """

    chunk: Chunk
    keys: Sequence[ChunkKey]
    embedding: NDArray[np.float32]


@dataclass(frozen=True)
class VectorRows:
    """Vectors as they were read from the catalog.

    Attributes
    ----------
    of
        The digest of the catalog's contents then.
    present
        Marks of all chunks ``[m]``; empty if all vectors were wanted.
    rows, marks
        Row number and mark (`vector_mark`) of each vector's chunk ``[n]``. A chunk has as many
        vectors as its text had windows.
    vectors
        ``[n, dim]``.
    """

    of: bytes
    present: NDArray[np.uint64]
    rows: NDArray[np.int64]
    marks: NDArray[np.uint64]
    vectors: NDArray[np.float32]


@dataclass(frozen=True)
class StoredChunk:
    """What a chunk's row holds, sound or not.

    Attributes
    ----------
    packed, keys
        As they are stored, of any type; `keys` are the names of its KV.
    chunk
        The chunk; None if the row is damaged.
    checksums
        What it contributes to its document's checksum, without the names of its KV.
    embedding
        Its vectors as bytes; None if they are damaged.
    """

    packed: PackedChunk
    keys: Any
    chunk: Chunk | None
    checksums: bytes
    embedding: bytes | None


@dataclass(frozen=True)
class Encoding:
    """How an index encodes its chunks.

    Attributes
    ----------
    key_of
        Returns the name that a chunk's KV must have, the first of several.
    context
        What chunks are encoded after.
    """

    key_of: KeyOf
    context: Context


@dataclass
class Change:
    """The writes of one transaction, in this order.

    Attributes
    ----------
    remove_chunks
        Ids of single chunks to remove. Documents that lose their last chunk go too. Not together
        with other writes.
    forget_files, put_files
        Files whose state is removed, and files whose state is written.
    remove
        Sources of documents to remove with their chunks.
    encode
        Other contexts of chunks, by id; a chunk that is gone stays so.
    after
        With context ``similar``, the chunks that precede each chunk of `put` and `encode`. A
        chunk gets no context if one of them is gone.
    put
        ``(source, file, digest, metadata, rows)`` for each document to write; it replaces the
        document with the same source.
    """

    forget_files: list[str] = field(default_factory=list)
    remove: list[str] = field(default_factory=list)
    put: list[tuple[str, str | None, str, Mapping[str, Any], list[ChunkRow]]] = field(
        default_factory=list
    )
    put_files: list[FileState] = field(default_factory=list)
    remove_chunks: list[str] = field(default_factory=list)
    encode: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    after: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(vars(self).values())


def vector_mark(row: int, chunk_id: object) -> int:
    """Return 64 bits that tell which text a row holds: a catalog put back may use rows again."""
    said = f"{row} {chunk_id}".encode("utf-8", "surrogatepass")
    return xxhash.xxh3_64_intdigest(said)


def pack_ids(values: Sequence[int]) -> bytes:
    """Return token ids or offsets in a row's format."""
    return _little_endian(array("i", values)).tobytes()


def pack_contexts(contexts: Sequence[Sequence[int]]) -> bytes:
    """Return a chunk's contexts in a row's format, each after its length; usually empty."""
    if not any(contexts):
        return b""
    return b"".join(pack_ids((len(ids), *ids)) for ids in contexts)


class Heads:
    """Finds what was encoded after some texts.

    Parameters
    ----------
    texts
        Token ids of chunks, packed (`pack_ids`).
    """

    def __init__(self, texts: Iterable[bytes]) -> None:
        size = 4 * LEAST_TOKENS
        import numpy as np

        found = (one[:size] for one in texts if isinstance(one, bytes))  # damaged rows have others
        self._heads = {one for one in found if len(one) == size}
        first = [int.from_bytes(one[:8], "little") for one in self._heads]
        self._first = np.array(first, np.int64)

    def are_in(self, contexts: object) -> bool:
        """Return whether one of them, or the beginning of one, is in packed contexts."""
        import numpy as np

        if not self._heads or not isinstance(contexts, bytes):
            return False
        ids = np.frombuffer(contexts, "<i4", len(contexts) // 4).astype(np.int64)
        pairs = ids[:-1] | ids[1:] << 32
        starts = 4 * np.flatnonzero(np.isin(pairs, self._first))
        return any(contexts[at : at + 4 * LEAST_TOKENS] in self._heads for at in starts.tolist())


class Texts:
    """Says whether what chunks were encoded after (context ``similar``) is of known texts.

    Parameters
    ----------
    texts
        Token ids of chunks.
    separator
        Tokens after each of them.
    """

    def __init__(self, texts: Iterable[tuple[int, ...]], separator: tuple[int, ...]) -> None:
        self._separator = separator
        self._texts: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for one in texts:
            self._texts.setdefault(one[:LEAST_TOKENS], []).append(one)

    def are_all_of(self, context: tuple[int, ...]) -> bool:
        """Return whether a context is put together from them; if in doubt, False."""
        at = 0
        while at < len(context):
            texts = self._texts.get(context[at : at + LEAST_TOKENS], [])
            ends = [
                end
                for one in texts
                if context[(end := at + self._num_equal(one, context[at:])) :][
                    : len(self._separator)
                ]
                == self._separator
                and (at == 0 or end == at + len(one))  # the first one alone may be cut
            ]
            if not ends:
                return False
            at = max(ends) + len(self._separator)
        return at == len(context)

    @staticmethod
    def _num_equal(text: tuple[int, ...], others: tuple[int, ...]) -> int:
        pairs = enumerate(zip(text, others, strict=False))
        different = (number for number, (one, other) in pairs if one != other)
        return next(different, min(len(text), len(others)))


def pack_json(values: Mapping[str, Any]) -> str:
    """Return metadata in a row's format."""
    return json.dumps(dict(values), ensure_ascii=False, allow_nan=False)


def unpack_json(text: Any) -> dict[str, Any]:
    """Return metadata from a row. Raises ValueError or TypeError if it is invalid."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"metadata is a {type(values).__name__}")
    return values


def pack_chunk(row: int, chunk: Chunk) -> PackedChunk:
    """Return a chunk as the values of its row."""
    return PackedChunk(
        row,
        chunk.chunk_id,
        chunk.source,
        chunk.ordinal,
        chunk.text,
        pack_ids(chunk.token_ids),
        pack_ids(chunk.token_starts),
        len(chunk.token_ids),
        pack_json(chunk.metadata),
        pack_contexts(chunk.contexts),
    )


def unpack_chunk(packed: PackedChunk) -> Chunk:
    """Return the chunk of a row.

    Raises
    ------
    ValueError, TypeError
        When the row differs from what was written.
    """
    text, source, ordinal = packed.text, packed.source, packed.ordinal
    ids, starts = tuple(_unpack_ids(packed.token_ids)), tuple(_unpack_ids(packed.token_starts))
    if not (isinstance(text, str) and isinstance(source, str) and isinstance(ordinal, int)):
        raise TypeError("text, source or place is of another type")
    if not 0 < len(ids) == len(starts):
        raise ValueError(f"{len(ids)} tokens with {len(starts)} offsets")
    if min(ids) < 0 or min(starts) < 0 or max(starts) > len(text):
        raise ValueError("a token or its offset is out of range")
    return Chunk(
        packed.chunk_id,
        text,
        ids,
        starts,
        source,
        ordinal,
        unpack_json(packed.metadata),
        _unpack_contexts(packed.contexts),
    )


def _unpack_ids(packed: bytes) -> list[int]:
    values = array("i")
    values.frombytes(packed)
    return _little_endian(values).tolist()


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _unpack_contexts(packed: bytes) -> tuple[tuple[int, ...], ...]:
    values = _unpack_ids(packed)
    if not values:
        return ((),)
    if min(values) < 0:
        raise ValueError("a context's token or length is below 0")
    contexts = []
    place = 0
    while place < len(values):
        end = place + 1 + values[place]
        if end > len(values):
            raise ValueError(f"a context of {values[place]} tokens has {len(values) - place - 1}")
        contexts.append(ContextIds(values[place + 1 : end]))
        place = end
    return tuple(contexts)
