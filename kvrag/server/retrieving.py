"""Models named ``rag:NAME``: the server retrieves, builds the prompt and cites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from kvrag.chunk import Chunk
from kvrag.engine.answer import Answer
from kvrag.engine.prompts import chat_messages, own_marks, reading_order
from kvrag.errors import ParameterError
from kvrag.ingest.index import Index
from kvrag.ingest.ranking import Reranker
from kvrag.ingest.rows import DocumentRow
from kvrag.models.plain import few_shot_prompt
from kvrag.server.answering import Question
from kvrag.server.responses import Annotation, URLCitation

PREFIX = "rag:"

_FEW_SHOT_STOP = "\n"


def question_over(
    index: Index,
    turns: Sequence[dict[str, Any]],
    k: int,
    wanted: Mapping[str, Any] | None = None,
    reranker: Reranker | None = None,
) -> Question:
    """Return the prompt for a conversation's last question, over the chunks found for it.

    What follows the question, such as calls of tools and their results, stays after it. So each
    round of calls finds the same chunks, and begins as the round before.

    Parameters
    ----------
    index
        The index to search.
    turns
        The conversation; the user's last turn is the question.
    k
        Number of chunks.
    wanted
        Which chunks may be found (`Index.search`); None means all.
    reranker
        What orders the best of them; None: the search itself.

    Raises
    ------
    ParameterError
        When there is no question or it is answered, the filter is wrong, or other turns have no
        place in the prompt.
    """
    asked = [number for number, one in enumerate(turns) if one["role"] == "user"]
    if not asked or turns[-1]["role"] == "assistant":
        raise ParameterError(
            f"the last message is {turns[-1]['role']!r}: the server searches for what the user "
            "asks last; end with a message of the user, or with a tool's result"
        )
    at = asked[-1]
    question = turns[at]["content"]
    hits = index.search(question, k, filter=wanted, reranker=reranker)
    chunks = reading_order([hit.chunk for hit in hits])
    texts = [chunk.text for chunk in chunks]
    hints = tuple(hit.chunk.chunk_id for hit in hits)
    if getattr(index.tokenizer, "chat_template", None):
        messages = [*turns[:at], *chat_messages(question, texts), *turns[at + 1 :]]
        return Question(messages, hints, own_marks(question), stop_loops=True)
    if len(turns) > 1:
        raise ParameterError(
            "this model has no chat template, so a prompt cannot hold other messages; send the "
            "question alone"
        )
    return Question(few_shot_prompt(question, texts), hints, (_FEW_SHOT_STOP,), stop_loops=True)


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
