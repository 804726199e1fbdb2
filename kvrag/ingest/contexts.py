"""What precedes a chunk during encoding: nothing, earlier text, or its predecessor.

A context is stored as token ids only, without its KV. It never comes from another document:
otherwise the rest of an index would change a chunk's KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvrag import arguments
from kvrag.chunk import Chunk
from kvrag.errors import ParameterError
from kvrag.models.control import ControlTokens, encode_documents

NO_CONTEXT = "none"
DOCUMENT = "document"
"""Chunks are encoded after earlier text of their document."""
NEIGHBOURS = "neighbours"
"""Chunks are encoded alone, and again after their predecessor (FusionRAG's offline part)."""
CONTEXTS = (NO_CONTEXT, DOCUMENT, NEIGHBOURS)

DEFAULT_CONTEXT_TOKENS = 256
"""The largest number of tokens in a `DOCUMENT` context."""

SEPARATOR = "\n\n"
"""Joins chunks in a context as prompts join them, so that a prompt can repeat it verbatim."""


def context_limit(context: str, context_tokens: int | None) -> int:
    """Return the limit to record for a context; 0 if no number limits it.

    Raises
    ------
    ParameterError
        For an unknown context, for a limit that is not a whole number from 1 on, and for a limit
        that would have no effect.
    """
    if context not in CONTEXTS:
        raise ParameterError(f"context {context!r}: expected one of {', '.join(CONTEXTS)}")
    if context != DOCUMENT:
        if context_tokens is not None and context_tokens != 0:
            raise ParameterError(
                f"context_tokens={context_tokens} does nothing with context {context!r}: leave it "
                f"out, or choose context {DOCUMENT!r}"
            )
        return 0
    if context_tokens is None:
        return DEFAULT_CONTEXT_TOKENS
    return arguments.whole(context_tokens, "context_tokens", 1)


def add_contexts(
    chunks: Sequence[Chunk],
    tokenizer: Any,
    context: str,
    limit: int,
    room: int,
    control: ControlTokens | None = None,
) -> list[Chunk]:
    """Return the chunks of one document with their contexts.

    Parameters
    ----------
    chunks
        All chunks of the document, in order.
    tokenizer
        The model's fast tokenizer.
    context
        One of `CONTEXTS`.
    limit
        The largest number of tokens in a `DOCUMENT` context.
    room
        The largest number of tokens in a context and its chunk together: the model's window
        after the shared prefix.
    control
        Neutralises control strings in the text; None keeps them.
    """
    if context == NO_CONTEXT:
        return list(chunks)
    found = []
    for number, chunk in enumerate(chunks):
        left = room - len(chunk.token_ids)
        if context == DOCUMENT:
            # Each of them has at least one token: more than this many are never needed.
            earlier = chunks[max(0, number - limit) : number]
            ids = _earlier_ids(earlier, chunk, tokenizer, min(limit, left), control)
            found.append(replace(chunk, contexts=(ids,)))
            continue
        ids = _ids_before(chunks[max(0, number - 1) : number], chunk, tokenizer, control)
        # A prompt never matches a part of the predecessor.
        is_useful = 0 < len(ids) <= left
        found.append(replace(chunk, contexts=((), ids) if is_useful else ((),)))
    return found


def encoded_behind(
    ordinal: int, later: Iterable[Chunk], context: str, limit: int
) -> Iterator[Chunk]:
    """Yield the chunks whose context may hold text of a given earlier chunk.

    Parameters
    ----------
    ordinal
        The earlier chunk's place in its document.
    later
        The chunks after it, in order; read only as far as a context can reach.
    context, limit
        As in `add_contexts`.
    """
    num_between = 0
    for chunk in later:
        # The reach of `_earlier_ids` and `add_contexts`; removed chunks extend it.
        in_reach = num_between < limit if context == DOCUMENT else chunk.ordinal == ordinal + 1
        if context == NO_CONTEXT or not in_reach:
            return
        if any(chunk.contexts):
            yield chunk
        num_between += len(chunk.token_ids)


def _earlier_ids(
    earlier: Sequence[Chunk],
    chunk: Chunk,
    tokenizer: Any,
    limit: int,
    control: ControlTokens | None,
) -> tuple[int, ...]:
    """Return the last tokens before a chunk, at most `limit`."""
    if limit < 1:
        return ()
    first = len(earlier)
    num_tokens = 0
    while first and num_tokens < limit:
        first -= 1
        num_tokens += len(earlier[first].token_ids)
    return _ids_before(earlier[first:], chunk, tokenizer, control)[-limit:]


def _ids_before(
    earlier: Sequence[Chunk], chunk: Chunk, tokenizer: Any, control: ControlTokens | None
) -> tuple[int, ...]:
    """Return the tokens that precede a chunk when it is joined to earlier chunks."""
    if not earlier:
        return ()
    before = "".join(one.text + SEPARATOR for one in earlier)
    # Tokenised together with the chunk, as in a prompt: tokens at a seam depend on both sides.
    (tokens,) = encode_documents(tokenizer, [before + chunk.text], control)
    ids = []
    for token_id, (_, end) in zip(tokens.token_ids, tokens.offsets, strict=True):
        if end > len(before):
            break
        ids.append(token_id)
    return tuple(ids)
