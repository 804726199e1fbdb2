"""Stored chunks into the fused buffer: read, check, place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvrag.codec.base import Destination, EncodedChunk
from kvrag.errors import IndexFormatError, ProfileError, RecordError, StoreError
from kvrag.fusion.layout import ReusedSpan
from kvrag.kvcache import FusedKV
from kvrag.positions.rotary import RotaryTable

MISS_ABSENT = "KV not in the store"
MISS_DAMAGED = "record damaged"
MISS_UNREADABLE = "store unreadable"
MISS_PROFILE = "codec profile missing"

_DAMAGE = (RecordError, StoreError, IndexFormatError, ProfileError)

OpenKV = Callable[[str, tuple[int, ...]], EncodedChunk | None]
"""From a chunk id, and the tokens that the chunk was encoded behind, to the opened record, or None
where the store has none.
"""

_RecordId = tuple[str, tuple[int, ...]]

WriteKV = Callable[[int, FusedKV, RotaryTable], None]
"""Writes rows of one layer, by its index and rotary table, into a buffer."""


class SpanLostError(Exception):
    """A span could not be loaded whole; the loader has already left it out."""


class SpanLoader:
    """Brings the stored KV of a prompt's spans into its buffer, one layer at a time.

    Records are opened and their headers checked at once. A layer is read when it is asked for,
    so that the rows of later layers take no memory before they are needed. Nothing is raised for
    the state of a store except `SpanLostError`.

    Parameters
    ----------
    spans
        Stretches of the prompt and of their chunks.
    open_kv
        Opens a record of a chunk.
    write_more
        Writes what else has KV of its own into a layer, behind the spans; None: nothing has.

    Attributes
    ----------
    spans
        Those that can be had, in prompt order; the others must be computed.
    misses
        Why spans were left out: reason to number of spans.
    lost
        The same of each chunk: id to reason.
    """

    def __init__(
        self,
        spans: Sequence[ReusedSpan],
        open_kv: OpenKV,
        write_more: WriteKV | None = None,
    ) -> None:
        self._write_more = write_more
        self.spans: list[ReusedSpan] = []
        self.misses: Counter[str] = Counter()
        self.lost: dict[str, str] = {}
        self._bytes_of_dropped = 0
        self._records: dict[_RecordId, EncodedChunk] = {}
        for span in spans:
            wanted = _record_id(span)
            try:
                record = self._records.get(wanted) or open_kv(*wanted)
            except _DAMAGE as error:
                self._miss(span, _reason(error))
            else:
                if record is None:
                    self._miss(span, MISS_ABSENT)
                elif span.chunk_end > record.num_tokens:
                    self._miss(span, MISS_DAMAGED)
                else:
                    self._records[wanted] = record
                    self.spans.append(span)

    @property
    def bytes_loaded(self) -> int:
        """Bytes read from the store, headers included."""
        return self._bytes_of_dropped + sum(r.bytes_read for r in self._records.values())

    def load_layer(self, layer_index: int, fused: FusedKV, table: RotaryTable) -> None:
        """Write one layer of every span into its rows of `fused`, keys at global positions.

        Raises
        ------
        SpanLostError
            When a span's layer is damaged or unreadable. The span is counted and left out; what
            has been computed with it must be computed again.
        """
        for span in self.spans:
            rows = slice(span.prompt_start, span.prompt_end)
            into = Destination(
                keys=fused.keys[layer_index][0, :, rows],
                values=fused.values[layer_index][0, :, rows],
                tokens=slice(span.chunk_start, span.chunk_end),
                table=table,
                rows=rows,
            )
            try:
                self._records[_record_id(span)].place_layer(layer_index, into)
            except _DAMAGE as error:
                self._drop(_record_id(span), _reason(error))
                self._drop_other_damage(len(fused.keys))
                raise SpanLostError(f"chunk {span.chunk_id}: {_reason(error)}") from error
        if self._write_more is not None:
            self._write_more(layer_index, fused, table)

    def _miss(self, span: ReusedSpan, reason: str) -> None:
        self.misses[reason] += 1
        self.lost[span.chunk_id] = reason

    def _drop(self, lost: _RecordId, reason: str) -> None:
        for span in self.spans:
            if _record_id(span) == lost:
                self._miss(span, reason)
        self.spans = [span for span in self.spans if _record_id(span) != lost]
        self._bytes_of_dropped += self._records.pop(lost).bytes_read

    def _drop_other_damage(self, num_layers: int) -> None:
        """Read every layer of the records left, so that one new beginning is enough."""
        for record_id, record in list(self._records.items()):
            try:
                for layer_index in range(num_layers):
                    record.read_layer(layer_index)
            except _DAMAGE as error:
                self._drop(record_id, _reason(error))


def _record_id(span: ReusedSpan) -> _RecordId:
    return span.chunk_id, span.context_ids


def _reason(error: Exception) -> str:
    if isinstance(error, ProfileError):
        return MISS_PROFILE
    return MISS_UNREADABLE if isinstance(error, StoreError) else MISS_DAMAGED
