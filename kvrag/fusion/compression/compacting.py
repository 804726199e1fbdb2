"""Compressed chunks in a prompt: their stored rows, side by side.

Source: KVLink (arXiv 2502.16002) §2.4. A compressed chunk takes up only its stored rows, and
everything after it moves up, in positions and in the buffer. So the buffer, and every attention
over it, shrink with the stored rows. `Layout.plain_token_ids` still holds the token ids that the
plain pipeline would feed; the rows of a compressed chunk have no token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvrag.chunk import Chunk
from kvrag.fusion.compression.spec import Compression
from kvrag.fusion.layout import COMPRESSED, Layout, ReusedSpan

MISS_PART = "only a part of a compressed chunk"


def compact(layout: Layout, chunks: Mapping[str, Chunk], compression: Compression) -> Layout:
    """Return the layout with every chunk's stored rows in place of its tokens.

    If the prompt contains only a part of a chunk, the chunk is computed, and counted as a miss:
    its rows would include text that the prompt does not. The surrounding text may change some of a
    chunk's first and last tokens; these are computed although the stored rows cover them too.

    Parameters
    ----------
    layout
        A layout without link tokens, over an index in which every chunk is compressed.
    chunks
        The chunks by id, at least those of the layout's spans.
    compression
        The index's compression.
    """
    assert not layout.links, "link tokens are inserted after compacting"
    token_ids: list[int] = []
    spans: list[ReusedSpan] = []
    misses = dict(layout.misses)
    copied = 0
    for span in layout.spans:
        chunk = chunks[span.chunk_id]
        if not span.is_whole(chunk):
            misses[MISS_PART] = misses.get(MISS_PART, 0) + 1
            continue
        token_ids += layout.token_ids[copied : span.prompt_start]
        num_rows = compression.num_rows(len(chunk.token_ids))
        spans.append(
            replace(
                span,
                prompt_start=len(token_ids),
                chunk_start=0,
                length=num_rows,
                num_compressed=span.length,
            )
        )
        token_ids += [COMPRESSED] * num_rows
        copied = span.prompt_end
    token_ids += layout.token_ids[copied:]
    return replace(
        layout,
        token_ids=tuple(token_ids),
        spans=tuple(spans),
        misses=misses,
        given_ids=layout.token_ids,
    )


def without_chunks(layout: Layout, lost: Mapping[str, str]) -> Layout:
    """Return the layout without chunks whose KV is not available, and count them as misses.

    Parameters
    ----------
    layout
        A layout that is not compacted.
    lost
        Chunk id to the reason for the miss.
    """
    misses = dict(layout.misses)
    kept = []
    for span in layout.spans:
        reason = lost.get(span.chunk_id)
        if reason is None:
            kept.append(span)
        else:
            misses[reason] = misses.get(reason, 0) + 1
    return replace(layout, spans=tuple(kept), misses=misses)
