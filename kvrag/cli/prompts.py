"""The prompts that `query` and `chat` build from retrieved chunks."""

from __future__ import annotations

from collections.abc import Sequence

from kvrag.chunk import Chunk

Messages = list[dict[str, str]]


def reading_order(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return chunks by document: best document first, each document's chunks in its order.

    Parameters
    ----------
    chunks
        Best first. A chunk that says only "she" or "the company" makes sense after the text that
        it continues.
    """
    rank: dict[str, int] = {}
    for chunk in chunks:
        rank.setdefault(chunk.source, len(rank))
    return sorted(chunks, key=lambda chunk: (rank[chunk.source], chunk.ordinal))


def plain_prompt(question: str, texts: Sequence[str]) -> str:
    """Return the chunks with blank lines between them, then the question to complete."""
    return "\n\n".join([*texts, f"Question: {question}\nAnswer:"])


def chat_messages(
    question: str, texts: Sequence[str], history: Sequence[tuple[str, str]] = ()
) -> Messages:
    """Return messages for a chat template.

    Parameters
    ----------
    question, texts
        The question and its retrieved chunks; together they are the last user message.
    history
        Earlier questions and answers, oldest first, without their chunks: chunks that matter
        are retrieved again.
    """
    messages: Messages = []
    for earlier_question, answer in history:
        messages.append({"role": "user", "content": earlier_question})
        messages.append({"role": "assistant", "content": answer})
    content = "\n\n".join([*texts, f"Question: {question}"])
    messages.append({"role": "user", "content": content})
    return messages
