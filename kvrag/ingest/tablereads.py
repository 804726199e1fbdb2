"""Reads of all chunks of a catalog, for the copies that searches and matching use.

Each change of the catalog increases its generation by one. A reader compares generations to find
out whether its copy is stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvrag.chunk import chunk_id_of
from kvrag.ingest.catalogfile import checked
from kvrag.ingest.filters import searched_fields
from kvrag.ingest.rows import VectorRows, unpack_json, vector_mark
from kvrag.ingest.schema import CHUNK_COLUMNS, NO_GENERATION, VECTOR_COLUMNS
from kvrag.ingest.seals import SEAL_BYTES
from kvrag.ingest.soundrows import SoundRows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class TableReads(SoundRows):
    """The part of `Catalog` that reads all chunks at once: vectors, words, texts and tokens."""

    @checked
    def generation(self) -> int:
        """Return how many transactions have changed the catalog; -1 if that row is damaged."""
        state = self._state()
        return NO_GENERATION if state is None else state.generation

    @checked
    def version(self) -> tuple[int, bytes]:
        """Return the generation and a digest of the documents' contents; -1 if the generation is
        damaged.
        """
        state = self._state()
        if state is None:
            return NO_GENERATION, b""
        return state.generation, state.documents.to_bytes(SEAL_BYTES, "little")

    def mark(self) -> bytes:
        """Return 16 bytes that change whenever the catalog changes."""
        return self._seals.whole([repr(self._rows("SELECT * FROM state")).encode()])

    def row_seals(self) -> Iterator[tuple[int, object]]:
        """Yield the number and the seal of each readable chunk row."""
        yield from self._scan("row, seal")

    def sound_texts(
        self, rows: Sequence[int]
    ) -> Iterator[tuple[int, bytes, str, Mapping[str, Any]]]:
        """Yield number, seal, text and fields of each sound chunk row."""
        for values in self._select_in(CHUNK_COLUMNS, "row", rows):
            if self._is_sound(values):
                row, _, source, ordinal, text, *_, metadata, _, seal = values
                yield row, seal, text, searched_fields(source, ordinal, unpack_json(metadata))

    @checked
    def each_text(self, use: Callable[[str, str], None]) -> tuple[int, bytes]:
        """Call `use` with the id and text of each chunk in turn; return the version.

        Leaves out chunks whose text differs from what was indexed.
        """
        with self._snapshot():
            for row, chunk_id, source, ordinal, text in self._scan(
                "row, chunk_id, source, ordinal, text"
            ):
                if _is_named(chunk_id, source, ordinal, text):
                    use(chunk_id, text)
                else:
                    self._note(f"the text of chunk {row} is not what was written")
            return self.version()

    @checked
    def each_head(
        self, num_tokens: int, use: Callable[[str, bytes, int], None]
    ) -> tuple[int, bytes]:
        """Call `use` with each chunk's id, its first token ids and its number of tokens.

        The token ids are packed as in the row (`kvrag.ingest.rows.pack_ids`), at most
        `num_tokens` of them. They may be damaged: use them only to compare, and read the chunk
        before you use it. Returns the version.
        """
        with self._snapshot():
            for row, chunk_id, head, length in self._scan(
                f"row, chunk_id, substr(token_ids, 1, {4 * num_tokens}), num_tokens"
            ):
                if isinstance(head, bytes) and isinstance(length, int):
                    use(chunk_id, head, length)
                else:
                    self._note(f"the tokens of chunk {row} are not what was written")
            return self.version()

    @checked
    def tokens_behind(self, row: int, most: int) -> list[tuple[int, bytes]]:
        """Return row number and token ids of the next chunks after a row, at most `most`.

        The token ids are packed as in the row (`kvrag.ingest.rows.pack_ids`). They may be damaged:
        use them only to compare, and read the chunk before you use it.
        """
        found = self._rows(
            "SELECT row, token_ids FROM chunks WHERE row > ? ORDER BY row LIMIT ?", (row, most)
        )
        return [(number, ids if isinstance(ids, bytes) else b"") for number, ids in found]

    @checked
    def token_ids_of(self, rows: Sequence[int], chunk_ids: Sequence[str]) -> dict[str, bytes]:
        """Return token ids as `tokens_behind` does, by chunk id; leaves out unknown chunks."""
        columns = "chunk_id, token_ids"
        found = [
            *self._select_in(columns, "row", rows),
            *self._select_in(columns, "chunk_id", chunk_ids),
        ]
        return {
            chunk_id: ids
            for chunk_id, ids in found
            if isinstance(chunk_id, str) and isinstance(ids, bytes)
        }

    @checked
    def num_vectors(self, dim: int) -> int:
        """Return how many vectors the chunks have, a vector for each window of their texts."""
        counted = self._rows("SELECT SUM(LENGTH(embedding) / ?) FROM chunks", (4 * dim,))
        return counted[0][0] if counted and isinstance(counted[0][0], int) else 0

    @checked
    def vectors(self, dim: int, known: NDArray[np.uint64] | None = None) -> VectorRows:
        """Return the vectors of the chunks, in order of row number.

        Leaves out vectors that differ from what was written.

        Parameters
        ----------
        known
            Marks of chunks whose vectors are not wanted ``[m]``; None wants all.
        """
        import numpy as np

        with self._snapshot():
            present = np.empty(0, np.uint64)
            found = self._scan(VECTOR_COLUMNS)
            if known is not None:
                rows, present = self.marks()
                new = np.sort(rows[~np.isin(present, known)])
                found = self._select_in(VECTOR_COLUMNS, "row", new.tolist())
            owners: list[tuple[int, int, int]] = []
            vectors: list[NDArray[np.float32]] = [np.empty((0, dim), np.float32)]
            for values in found:
                sound = self._is_vector_sound(values)
                num, rest = divmod(len(values[2]), 4 * dim) if sound else (0, 0)
                if num and not rest:
                    owners.append((values[0], vector_mark(*values[:2]), num))
                    vectors.append(np.frombuffer(values[2], dtype="<f4").reshape(num, dim))
                else:
                    self._note(f"the vector of chunk {values[0]} is not what was written")
            counts = [num for *_, num in owners]
            return VectorRows(
                self.version(),
                present,
                np.repeat(np.array([row for row, *_ in owners], np.int64), counts),
                np.repeat(np.array([mark for _, mark, _ in owners], np.uint64), counts),
                np.concatenate(vectors, dtype=np.float32),
            )

    @checked
    def marks(self) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Return row numbers and marks (`kvrag.ingest.rows.vector_mark`) of all chunks ``[m]``."""
        import numpy as np

        # By the index of ids, which is far smaller than the table.
        places = self._rows("SELECT row, chunk_id FROM chunks ORDER BY chunk_id")
        rows = np.fromiter((row for row, _ in places), np.int64, len(places))
        marks = np.fromiter((vector_mark(*one) for one in places), np.uint64, len(places))
        return rows, marks


def _is_named(chunk_id: object, source: object, ordinal: object, text: object) -> bool:
    """Return whether a chunk's id matches its text and place."""
    is_typed = isinstance(text, str) and isinstance(source, str) and isinstance(ordinal, int)
    return is_typed and chunk_id == chunk_id_of(source, ordinal, text)  # type: ignore[arg-type]
