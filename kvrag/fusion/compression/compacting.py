"""Compressed chunks in a prompt: as many rows as are stored, side by side.

Source: KVLink (arXiv 2502.16002) §2.4. A compressed chunk takes the span of its stored rows and no
more: what stands behind it moves up, in positions and in the buffer. So the buffer, and every
attention over it, shrink with what is stored. The token ids that the plain pipeline would feed stay
those of the prompt (`Layout.plain_token_ids`); the rows that stand for a chunk have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvrag.chunk import Chunk
from kvrag.fusion.compression.spec import Compression
from kvrag.fusion.layout import COMPRESSED, MAX_EDGE_TOKENS, Layout, ReusedSpan

MISS_PART = "only a part of a compressed chunk"


def compact(layout: Layout, chunks: Mapping[str, Chunk], compression: Compression) -> Layout:
    """Put every chunk's stored rows in place of its tokens.

    A chunk of which the prompt holds a part only is left to be computed, and counted: its rows
    would tell of text that is not there. Of its first and last tokens some may be written into
    others by the text around them; they are then computed, and stored rows know of them as well.

    Parameters
    ----------
    layout
        Of an index in which every chunk is compressed; without link tokens.
    chunks
        At least the chunks of its spans, by id.
    compression
        How.
    """
    assert not layout.links, "link tokens are put in behind"
    token_ids: list[int] = []
    spans: list[ReusedSpan] = []
    misses = dict(layout.misses)
    copied = 0
    for span in layout.spans:
        num_tokens = len(chunks[span.chunk_id].token_ids)
        if span.length < num_tokens - MAX_EDGE_TOKENS:
            misses[MISS_PART] = misses.get(MISS_PART, 0) + 1
            continue
        token_ids += layout.token_ids[copied : span.prompt_start]
        num_rows = compression.num_rows(num_tokens)
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
    """Leave chunks to be computed whose KV turned out not to be had, and count them.

    Parameters
    ----------
    layout
        Not compacted.
    lost
        Chunk id to the reason of the miss.
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
