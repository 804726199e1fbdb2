"""A change of the catalog as a segment: what a writer commits, and every reader carries out.

The form is safetensors: the vectors of all chunks as one matrix, and everything else as JSON,
compressed. A change carried out on equal catalogs makes equal catalogs, row numbers and
checksums included.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict
from typing import Any

from kvrag.chunk import Chunk, ChunkKey
from kvrag.errors import IndexFormatError
from kvrag.ingest.rows import Change, ChunkRow, FileState

_MOST_BYTES = 1 << 31  # of JSON: a window has 32,768 tokens, and any number of small documents


def pack(change: Change) -> bytes:
    """Return a change as the bytes of a segment."""
    import numpy as np  # late: most commands need neither
    from safetensors.numpy import save

    if change.remove_chunks:
        said: dict[str, Any] = {"drop": change.remove_chunks}
        vectors = [np.empty((0, 0), np.float32)]
    else:
        rows = [row for *_, rows in change.put for row in rows]
        vectors = [row.embedding for row in rows] or [np.empty((0, 0), np.float32)]
        said = {
            "forget_files": change.forget_files,
            "remove": change.remove,
            "put": [
                [source, file, digest, dict(metadata), [_said(row) for row in rows]]
                for source, file, digest, metadata, rows in change.put
            ],
            "put_files": [asdict(one) for one in change.put_files],
        }
    text = zlib.compress(json.dumps(said, allow_nan=False).encode(), 1)
    return bytes(
        save(
            {
                "change": np.frombuffer(text, np.uint8),
                "vectors": np.concatenate(vectors).astype("<f4"),
            }
        )
    )


def unpack(content: bytes, where: str) -> Change:
    """Return the change in a segment's bytes. Raises IndexFormatError, which names `where`."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(content)
        unzip = zlib.decompressobj()
        said = json.loads(unzip.decompress(tensors["change"].tobytes(), _MOST_BYTES))
        if "drop" in said:
            return Change(remove_chunks=[str(one) for one in said["drop"]])
        vectors = _Vectors(tensors["vectors"])
        return Change(
            forget_files=said["forget_files"],
            remove=said["remove"],
            put=[
                (source, file, digest, metadata, [_row(source, one, vectors) for one in rows])
                for source, file, digest, metadata, rows in said["put"]
            ],
            put_files=[FileState(**one) for one in said["put_files"]],
        )
    except (SafetensorError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise IndexFormatError(
            f"{where} holds no change that this kvrag can read ({error}); use the kvrag that wrote "
            "it, or a newer one"
        ) from error


class _Vectors:
    """Takes the vectors of one chunk after the other from a matrix."""

    def __init__(self, matrix: Any) -> None:
        self._matrix = matrix
        self._next = 0

    def take(self, count: int) -> Any:
        found = self._matrix[self._next : self._next + count]
        if len(found) != count:
            raise ValueError(f"{len(self._matrix)} vectors are fewer than its chunks have")
        self._next += count
        return found


def _said(row: ChunkRow) -> list[Any]:
    chunk = row.chunk
    return [
        chunk.chunk_id,
        chunk.text,
        chunk.token_ids,
        chunk.token_starts,
        chunk.ordinal,
        dict(chunk.metadata),
        chunk.contexts,
        [key.digest for key in row.keys],
        len(row.embedding),
    ]


def _row(source: str, values: list[Any], vectors: _Vectors) -> ChunkRow:
    chunk_id, text, ids, starts, ordinal, metadata, contexts, keys, count = values
    chunk = Chunk(
        chunk_id,
        text,
        tuple(ids),
        tuple(starts),
        source,
        ordinal,
        metadata,
        tuple(map(tuple, contexts)),
    )
    return ChunkRow(chunk, [ChunkKey(one) for one in keys], vectors.take(count))
