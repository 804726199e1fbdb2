"""What a chunk is encoded behind: nothing, its document's earlier text, or its predecessor.

Of the context only token ids are kept; its own KV is not stored. It never comes from another
document: what else an index holds would then decide about a chunk's KV.
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
"""Chunks are encoded behind what their document says before them."""
NEIGHBOURS = "neighbours"
"""Chunks are encoded alone, and once more behind their predecessor (FusionRAG's offline part)."""
CONTEXTS = (NO_CONTEXT, DOCUMENT, NEIGHBOURS)

DEFAULT_CONTEXT_TOKENS = 256
"""Tokens of `DOCUMENT` context at the most."""

SEPARATOR = "\n\n"
"""Joins chunks in a context as prompts join them, so that a context can stand there verbatim."""


def context_limit(context: str, context_tokens: int | None) -> int:
    """Return the limit to record for a context; 0 where there is none by number.

    Raises
    ------
    ParameterError
        For an unknown context, a limit that is no whole number from 1 on, or one that would do
        nothing.
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
    """Return the chunks of one document with what each of them is encoded behind.

    Parameters
    ----------
    chunks
        All chunks of the document, in order.
    tokenizer
        The model's fast tokenizer.
    context
        One of `CONTEXTS`.
    limit
        Tokens of `DOCUMENT` context at the most.
    room
        Tokens that context and chunk have together at the most: the model's window behind the
        shared prefix.
    control
        Takes control strings for text; None keeps them.
    """
    if context == NO_CONTEXT:
        return list(chunks)
    found = []
    for number, chunk in enumerate(chunks):
        left = room - len(chunk.token_ids)
        if context == DOCUMENT:
            # Each of them has a token: no more than so many can be needed.
            earlier = chunks[max(0, number - limit) : number]
            ids = _earlier_ids(earlier, chunk, tokenizer, min(limit, left), control)
            found.append(replace(chunk, contexts=(ids,)))
            continue
        ids = _ids_before(chunks[max(0, number - 1) : number], chunk, tokenizer, control)
        # A part of the predecessor would never be recognised in a prompt.
        is_useful = 0 < len(ids) <= left
        found.append(replace(chunk, contexts=((), ids) if is_useful else ((),)))
    return found


def encoded_behind(
    ordinal: int, later: Iterable[Chunk], context: str, limit: int
) -> Iterator[Chunk]:
    """Yield the chunks whose context may hold text of one that stood before them.

    Parameters
    ----------
    ordinal
        That one's place in its document.
    later
        The chunks behind it, in order; no more of them are asked for than can be meant.
    context, limit
        As in `add_contexts`.
    """
    num_between = 0
    for chunk in later:
        # As far as `_earlier_ids` and `add_contexts` look back; chunks gone since make it farther.
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
    """Return the last tokens before a chunk, no more than `limit`."""
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
    """Return the tokens before a chunk in the text that it makes with others in front of it."""
    if not earlier:
        return ()
    before = "".join(one.text + SEPARATOR for one in earlier)
    # Tokenised with the chunk, as a prompt is: what stands at a seam depends on both sides.
    (tokens,) = encode_documents(tokenizer, [before + chunk.text], control)
    ids = []
    for token_id, (_, end) in zip(tokens.token_ids, tokens.offsets, strict=True):
        if end > len(before):
            break
        ids.append(token_id)
    return tuple(ids)
