"""Opened chunks that report damage."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvrag.codec.base import Destination, EncodedChunk
from kvrag.errors import RecordError


class WatchedChunk:
    """An `EncodedChunk` that reports damage.

    Parameters
    ----------
    inner
        The opened record.
    note_damage
        Called when bytes that were read are not those that were written.
    """

    def __init__(self, inner: EncodedChunk, note_damage: Callable[[], None]) -> None:
        self._inner = inner
        self._note_damage = note_damage

    @property
    def num_tokens(self) -> int:
        """T."""
        return self._inner.num_tokens

    @property
    def size_bytes(self) -> int:
        """Length of the whole record."""
        return self._inner.size_bytes

    @property
    def bytes_read(self) -> int:
        """Bytes fetched from the store so far."""
        return self._inner.bytes_read

    def read_layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of one layer; see `EncodedChunk.read_layer`."""
        try:
            return self._inner.read_layer(layer_index)
        except RecordError:
            self._note_damage()
            raise

    def read_heads(self, layer_index: int, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return some heads of one layer; see `EncodedChunk.read_heads`."""
        try:
            return self._inner.read_heads(layer_index, heads)
        except RecordError:
            self._note_damage()
            raise

    def place_layer(self, layer_index: int, *into: Destination) -> None:
        """Write one layer where it belongs; see `EncodedChunk.place_layer`."""
        try:
            self._inner.place_layer(layer_index, *into)
        except RecordError:
            self._note_damage()
            raise

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        """Bytes of each plane; see `EncodedChunk.plane_bytes`."""
        return self._inner.plane_bytes

    def fetch(self, num_planes: int) -> None:
        """Bring planes into memory; see `EncodedChunk.fetch`."""
        try:
            self._inner.fetch(num_planes)
        except RecordError:
            self._note_damage()
            raise

    def use(self, num_planes: int) -> None:
        """Decode `num_planes` planes from now on."""
        self._inner.use(num_planes)

    def cancel(self) -> None:
        """Stop the fetches of other threads."""
        self._inner.cancel()
