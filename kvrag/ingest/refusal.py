"""Refusal of documents that hold the model's control strings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvrag.chunk import Chunk, Document
from kvrag.errors import DocumentError
from kvrag.models.control import ControlTokens


def refuse_control(document: Document, chunks: Sequence[Chunk], control: ControlTokens) -> None:
    """Raise DocumentError if a document holds a control string anywhere.

    Parameters
    ----------
    document
        The document; its text, metadata and source are searched.
    chunks
        Its chunks, which show control strings that only the tokenizer's normaliser produces.
    control
        The model's control strings.
    """
    for start, end in control.find(document.text):
        line = document.text.count("\n", 0, start) + 1
        raise _refusal(document, document.text[start:end], f"line {line} of its text")
    for chunk in chunks:
        for start, end in control.find_any(chunk.text):
            raise _refusal(document, chunk.text[start:end], f"its chunk {chunk.ordinal}")
    for place, value in (("its source", document.source), *_strings(document.metadata)):
        for start, end in control.find_any(value):
            raise _refusal(document, value[start:end], place)


def _strings(value: Any, place: str = "metadata") -> Iterator[tuple[str, str]]:
    """Yield the strings in plain JSON values, each with its place."""
    if isinstance(value, str):
        yield f"its {place}", value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield f"its {place}", str(name)
            yield from _strings(one, f"{place} {str(name)[:40]!r}")
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _strings(one, place)


def _refusal(document: Document, string: str, place: str) -> DocumentError:
    return DocumentError(
        f"{document.source}: {place} holds {string[:40]!r}, a control string of the model; remove "
        "it, or make the index with --control-tokens neutralise, which reads it as text"
    )
