"""What every opened record answers alike, whatever its codec."""

from __future__ import annotations

from kvrag.codec.container import RecordReader


class OpenedRecord:
    """Tokens and bytes of one record, as its header and its reader know them."""

    def __init__(self, reader: RecordReader) -> None:
        self._reader = reader
        self._num_fetched = 0

    @property
    def num_tokens(self) -> int:
        """T."""
        return self._reader.header.num_tokens

    @property
    def size_bytes(self) -> int:
        """Length of the whole record, header included."""
        return self._reader.size_bytes

    @property
    def bytes_read(self) -> int:
        """Bytes fetched from the source so far, header included."""
        return self._reader.bytes_read

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        """Bytes of each plane, from coarse to fine; of codecs without planes, of all blocks."""
        return (sum(block.padded_bytes for block in self._reader.header.blocks),)

    def fetch(self, num_planes: int) -> None:
        """Bring so many planes into memory, as far as they are not there, in one read.

        Raises RecordError or StoreError when they cannot be had.
        """
        if num_planes > self._num_fetched:
            num_blocks = len(self._reader.header.blocks) // len(self.plane_bytes)
            self._reader.fetch(range(self._num_fetched * num_blocks, num_planes * num_blocks))
            self._num_fetched = num_planes

    def use(self, num_planes: int) -> None:
        """Decode so many planes from now on, in place of all. No layer may be being decoded."""

    def cancel(self) -> None:
        """Break off what other threads fetch, where the store can; they get StoreError."""
        self._reader.cancel()
