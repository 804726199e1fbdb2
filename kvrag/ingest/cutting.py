"""Documents to chunks, as the settings of an index ask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvrag.chunk import Chunk, Document
from kvrag.errors import DocumentError
from kvrag.ingest.chunker import chunk_document
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.contexts import CORPUS, add_contexts, filler_ids
from kvrag.ingest.encoders import Encoders
from kvrag.models.control import REFUSE, ControlTokens


class Cutter:
    """Splits documents into chunks, each with its contexts.

    Parameters
    ----------
    encoders
        The encoders of the index; only the tokenizer is loaded.
    config
        The settings of the index.
    """

    def __init__(self, encoders: Encoders, config: IndexConfig) -> None:
        self._encoders = encoders
        self._config = config

    def cut(self, document: Document) -> list[Chunk]:
        """Split a document. Raises DocumentError."""
        config = self._config
        encoders = self._encoders
        control = encoders.control
        most = config.chunk_tokens
        if document.is_whole and not encoders.is_compressed:
            most = max(most, encoders.room - config.context_tokens)
        chunks = chunk_document(document, encoders.tokenizer, most, control)
        if control is not None and config.control_tokens == REFUSE:
            refuse_control(document, chunks, control)
        return add_contexts(
            chunks,
            encoders.tokenizer,
            config.chunk_context,
            encoders.room,
            control,
            is_compressed=encoders.is_compressed,
            corpus_filler=config.corpus_filler,
        )

    def num_control_strings(self, chunks: Sequence[Chunk]) -> int:
        """Return the number of control strings in chunks that are read as text."""
        control = self._encoders.control
        return 0 if control is None else sum(len(control.find_any(one.text)) for one in chunks)

    def num_filler_tokens(self) -> int:
        """Return the number of tokens of the index's filler, at most those that it asked for."""
        encoders, config = self._encoders, self._config
        text = config.corpus_filler if config.context == CORPUS else None
        found = len(filler_ids(encoders.tokenizer, text, encoders.control))
        return min(found, config.context_tokens)

    def note(self) -> str:
        """Return a note if the first documents were too short for the context, or ""."""
        config = self._config
        if config.context != CORPUS:
            return ""
        found = self.num_filler_tokens()
        if found == config.context_tokens:
            return ""
        return (
            f"context {config.chunk_context}: the first documents gave {found:,} tokens only, and "
            "all later chunks are encoded after these too; to have more, ingest many documents at "
            "once into a new folder"
        )


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
