"""The prompts that `query`, `chat` and the server build from retrieved chunks."""

from __future__ import annotations

from collections.abc import Sequence

from kvrag.chunk import Chunk

Messages = list[dict[str, str]]


def reading_order(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return chunks by document: best document last, each document's chunks in its order.

    Small models answer best from what stands next to the question. A chunk that says only "she"
    or "the company" makes sense after the text that it continues.

    Parameters
    ----------
    chunks
        Best first.
    """
    rank: dict[str, int] = {}
    for chunk in chunks:
        rank.setdefault(chunk.source, len(rank))
    return sorted(chunks, key=lambda chunk: (-rank[chunk.source], chunk.ordinal))


def own_marks(question: str) -> tuple[str, ...]:
    """Return the strings at which an answer begins to ask itself; none if questions are wanted."""
    return () if "question" in question.lower() else ("\nQuestion:",)


def chat_messages(
    question: str,
    texts: Sequence[str],
    history: Sequence[tuple[str, str]] = (),
    instruction: str = "",
) -> Messages:
    """Return messages for a chat template.

    Parameters
    ----------
    question, texts
        The question and its retrieved chunks; together they are the last user message.
    history
        Earlier messages of the user and their answers, oldest first. With the messages as they
        were, chunks included, the prompt begins as the earlier ones did, whose KV is kept.
    instruction
        What the model is to do with the chunks; stands between them and the question.
    """
    messages: Messages = []
    for earlier, answer in history:
        messages.append({"role": "user", "content": earlier})
        messages.append({"role": "assistant", "content": answer})
    said = [instruction] if instruction else []
    content = "\n\n".join([*texts, *said, f"Question: {question}"])
    messages.append({"role": "user", "content": content})
    return messages
