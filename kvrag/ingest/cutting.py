"""Documents to chunks, as the settings of an index ask."""

from __future__ import annotations

from kvrag.chunk import Chunk, Document
from kvrag.ingest.chunker import chunk_document
from kvrag.ingest.config import IndexConfig
from kvrag.ingest.contexts import CORPUS, add_contexts, filler_ids
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.refusal import refuse_control
from kvrag.models.control import REFUSE


class Cutter:
    """Splits documents into chunks, each with its contexts.

    Parameters
    ----------
    encoders
        The encoders of the index; only the tokenizer is loaded.

    Attributes
    ----------
    neutralised
        Number of control strings that were read as text, for each document with any.
    """

    def __init__(self, encoders: Encoders) -> None:
        self._encoders = encoders
        self.neutralised: dict[str, int] = {}

    def cut(self, document: Document, config: IndexConfig) -> list[Chunk]:
        """Split a document by an index's settings. Raises DocumentError."""
        encoders = self._encoders
        control = encoders.control
        most = config.chunk_tokens
        if document.is_whole and not encoders.is_compressed:
            most = max(most, encoders.room - config.context_tokens)
        chunks = chunk_document(document, encoders.tokenizer, most, control)
        if control is not None and config.control_tokens == REFUSE:
            refuse_control(document, chunks, control)
        elif control is not None and (
            found := sum(len(control.find_any(chunk.text)) for chunk in chunks)
        ):
            self.neutralised[document.source] = found
        return add_contexts(
            chunks,
            encoders.tokenizer,
            config.chunk_context,
            encoders.room,
            control,
            is_compressed=encoders.is_compressed,
            corpus_filler=config.corpus_filler,
        )

    def num_filler_tokens(self, config: IndexConfig) -> int:
        """Return the number of tokens of an index's filler, at most those that it asked for."""
        encoders = self._encoders
        text = config.corpus_filler if config.context == CORPUS else None
        found = len(filler_ids(encoders.tokenizer, text, encoders.control))
        return min(found, config.context_tokens)

    def note(self, config: IndexConfig) -> str:
        """Return a note if the first documents were too short for the context, or ""."""
        if config.context != CORPUS:
            return ""
        found = self.num_filler_tokens(config)
        if found == config.context_tokens:
            return ""
        return (
            f"context {config.chunk_context}: the first documents gave {found:,} tokens only, and "
            "all later chunks are encoded after these too; to have more, ingest many documents at "
            "once into a new folder"
        )
