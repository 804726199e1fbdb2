"""Contexts of benchmarks: those of ingestion, and ``similar``, which is only measured."""

from __future__ import annotations

from kvrag.ingest import contexts
from kvrag.ingest.contexts import FILLER, Context

SIMILAR = "similar"
"""Chunks are encoded after the chunks of other documents that are nearest to them."""


def parse_context(text: str) -> Context:
    """Return the context that a text names: ``similar[:TOKENS]``, or one of ingestion's.

    Raises
    ------
    ParameterError
        For any other text.
    """
    name, colon, number = text.partition(":")
    if name != SIMILAR:
        return contexts.parse_context(text)
    # It takes a number as the filler does, and the same one if there is none.
    return Context(SIMILAR, contexts.parse_context(f"{FILLER}{colon}{number}").num_tokens)
