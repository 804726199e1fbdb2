"""Stored chunks into the fused buffer: read, check, place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrag.codec.base import EncodedChunk
from kvrag.errors import RecordError, StoreError
from kvrag.fusion.layout import ReusedSpan
from kvrag.kvcache import FusedKV
from kvrag.positions.rotary import RotaryTable

MISS_ABSENT = "KV not in the store"
MISS_DAMAGED = "record damaged"
MISS_UNREADABLE = "store unreadable"

OpenKV = Callable[[str], EncodedChunk | None]
"""From a chunk id to its opened record, or None where the store has none."""


@dataclass
class LoadedSpans:
    """What came out of the store.

    Attributes
    ----------
    spans
        The spans whose every layer is in the buffer now, in prompt order.
    bytes_loaded
        Bytes read from the store.
    misses
        Why the others are not: reason to number of spans.
    """

    spans: list[ReusedSpan] = field(default_factory=list)
    bytes_loaded: int = 0
    misses: Counter[str] = field(default_factory=Counter)


def load_spans(
    spans: Sequence[ReusedSpan],
    open_kv: OpenKV,
    fused: FusedKV,
    tables: Sequence[RotaryTable],
) -> LoadedSpans:
    """Write the stored KV of each span into its rows of `fused`, keys at their global positions.

    A span that cannot be had whole is left out and counted; its rows then hold nothing of use
    and must be computed. Nothing is raised for the state of a store.

    Parameters
    ----------
    spans
        Stretches of the prompt and of their chunks.
    open_kv
        Opens a chunk's record.
    fused
        The prompt's buffer.
    tables
        Each layer's rotary table over all prompt positions.
    """
    loaded = LoadedSpans()
    for span in spans:
        try:
            record = open_kv(span.chunk_id)
            if record is None:
                loaded.misses[MISS_ABSENT] += 1
                continue
            if span.chunk_end > record.num_tokens:
                loaded.misses[MISS_DAMAGED] += 1
                continue
            _place_span(span, record, fused, tables)
        except RecordError:
            loaded.misses[MISS_DAMAGED] += 1
        except StoreError:
            loaded.misses[MISS_UNREADABLE] += 1
        else:
            loaded.spans.append(span)
            loaded.bytes_loaded += record.size_bytes
    return loaded


def _place_span(
    span: ReusedSpan, record: EncodedChunk, fused: FusedKV, tables: Sequence[RotaryTable]
) -> None:
    stored = slice(span.chunk_start, span.chunk_end)
    rows = slice(span.prompt_start, span.prompt_end)
    for layer_index, table in enumerate(tables):
        keys, values = record.read_layer(layer_index)
        into = fused.keys[layer_index][0, :, rows]
        table.place(keys[:, stored].to(into.device), rows, into)
        fused.values[layer_index][0, :, rows] = values[:, stored].to(into.device)
