"""What every opened record answers alike, whatever its codec."""

from __future__ import annotations

from kvrag.codec.container import RecordReader


class OpenedRecord:
    """Tokens and bytes of one record, as its header and its reader know them."""

    def __init__(self, reader: RecordReader) -> None:
        self._reader = reader

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
