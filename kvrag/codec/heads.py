"""Some key heads of an opened record, for a process that has only those of the model."""

from __future__ import annotations

import torch

from kvrag.codec.base import Destination, EncodedChunk, place_whole


class HeadRange:
    """A part of an opened record (an `EncodedChunk`): a range of its key heads.

    A record that stores heads apart (codec ``raw-heads``) is read only there. From any other,
    whole layers are read and decoded, and the other heads are dropped.

    Parameters
    ----------
    record
        The opened record.
    heads
        The first head, and the one after the last.
    """

    def __init__(self, record: EncodedChunk, heads: slice) -> None:
        self._record = record
        self._heads = heads

    @property
    def num_tokens(self) -> int:
        """T."""
        return self._record.num_tokens

    @property
    def size_bytes(self) -> int:
        """Length of the whole record."""
        return self._record.size_bytes

    @property
    def bytes_read(self) -> int:
        """Bytes fetched from the source so far, header included."""
        return self._record.bytes_read

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        """Bytes of each plane of the whole record."""
        return self._record.plane_bytes

    def read_layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return position-free keys and values ``[H', T, D]`` of one layer's H' heads."""
        return self._record.read_heads(layer_index, self._heads)

    def read_heads(self, layer_index: int, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return some of these heads."""
        first = self._heads.start
        return self._record.read_heads(layer_index, slice(first + heads.start, first + heads.stop))

    def place_layer(self, layer_index: int, *into: Destination) -> None:
        """Write one layer's heads where they belong; see `EncodedChunk.place_layer`."""
        place_whole(*self.read_layer(layer_index), into)

    def fetch(self, num_planes: int) -> None:
        """Read planes of the whole record into memory."""
        self._record.fetch(num_planes)

    def use(self, num_planes: int) -> None:
        """Decode only the first `num_planes` planes from now on."""
        self._record.use(num_planes)

    def cancel(self) -> None:
        """Cancel reads of other threads."""
        self._record.cancel()
