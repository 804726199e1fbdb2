"""Chunks as clients see them: with their neighbours, their titles, and as citations."""

from __future__ import annotations

from pathlib import PurePath

from kvrag.chunk import Chunk
from kvrag.engine.answer import Answer
from kvrag.ingest.index import Index
from kvrag.ingest.rows import DocumentRow
from kvrag.server.responses import Annotation, URLCitation

PREFIX = "rag:"


def chunks_around(
    index: Index, chunk_id: str, before: int, after: int | None = None
) -> list[Chunk]:
    """Return a chunk and its neighbours in the document, in order; nothing for an unknown id.

    Parameters
    ----------
    index, chunk_id
        The index, and a chunk of it.
    before, after
        Most neighbours on each side; None: as many after it as before it.
    """
    chunks = index.get_chunks([chunk_id])
    if not chunks:
        return []
    ids = index.catalog.chunk_ids_of(chunks[0].source)
    if chunk_id not in ids:  # a writer was here between the two
        return chunks
    at = ids.index(chunk_id)
    end = at + (before if after is None else after) + 1
    return index.get_chunks(ids[max(0, at - before) : end])


def title_of(one: Chunk | DocumentRow) -> str:
    """Return the title of a document or a chunk's document, or the name of its file."""
    return str(one.metadata.get("title") or PurePath(one.source).name)


def citations(answer: Answer) -> list[Annotation]:
    """Return a citation for each chunk that was in the prompt, best first."""
    return [
        Annotation(
            url_citation=URLCitation(
                start_index=0,
                end_index=len(answer.text),
                title=PurePath(source.source).name,
                url=f"{source.source}#{source.ordinal}",
                chunk_id=source.chunk_id,
                ordinal=source.ordinal,
                text=source.text,
            )
        )
        for source in answer.sources
    ]
