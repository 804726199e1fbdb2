"""What precedes a chunk during encoding: nothing, its document's text, a fixed filler, or others.

A context is stored as token ids only, without its KV. Except for ``similar``
(`kvrag.ingest.companions`) it never comes from another document: otherwise the rest of an index
would change a chunk's KV. The filler comes from no document and no user: it is a text file of this
package, the same for every chunk of every tenant, so it carries nothing from one to another.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from kvrag.arguments import shown
from kvrag.chunk import Chunk
from kvrag.errors import ParameterError
from kvrag.models.control import ControlTokens, encode_documents
from kvrag.models.tokens import encode

NO_CONTEXT = "none"
DOCUMENT = "document"
"""Chunks are encoded after earlier text of their document."""
NEIGHBOURS = "neighbours"
"""Chunks are encoded alone, and again after their predecessor (FusionRAG's offline part)."""
FILLER = "filler"
"""Chunks are encoded after the same unrelated text, as in the middle of a prompt. The record of the
chunk alone is optional (`Chunk.is_optional`).
"""

SIMILAR = "similar"
"""Chunks are encoded after those that are nearest to them (`kvrag.ingest.companions`), which are
known only once chunks are embedded. The record of the chunk alone is optional, as with `FILLER`.
"""

LEAST_TOKENS = 16
"""With `SIMILAR`, tokens of the shortest chunk that precedes others, and of a part of one."""

INDEX, FOLDER = TRUST = "index", "folder"
"""Whose chunks precede a chunk with `SIMILAR`: those of the index, or of the same folder."""

DEFAULT_TOKENS = {
    NO_CONTEXT: 0,
    DOCUMENT: 256,
    NEIGHBOURS: 0,
    FILLER: 512,
    SIMILAR: 512,
}
"""Each context's number of tokens if none is given; 0 if no number limits it."""

SEPARATOR = "\n\n"
"""Joins chunks in a context as prompts join them, so that a prompt can repeat it verbatim."""

_FILLER_FILE = "filler.txt"
_CONTEXT = re.compile("([a-z]+)(?::([1-9][0-9]{0,8}))?")


@dataclass(frozen=True)
class Context:
    """What precedes chunks when they are encoded.

    Attributes
    ----------
    name
        One of `DEFAULT_TOKENS`.
    num_tokens
        Its largest number of tokens; 0 if no number limits it.
    """

    name: str
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.name}:{self.num_tokens}" if self.num_tokens else self.name

    @property
    def is_of_document(self) -> bool:
        """Whether it is text of the chunk's document, so that chunks of equal text differ."""
        return self.name in (DOCUMENT, NEIGHBOURS)

    @property
    def is_filler(self) -> bool:
        """Whether it is the same text for all chunks of an index."""
        return self.name == FILLER

    @property
    def is_shared(self) -> bool:
        """Whether chunks share it, and have an optional record of the chunk alone beside it."""
        return self.is_filler or self.name == SIMILAR

    @property
    def default_ratio(self) -> float | None:
        """Share of reused tokens that the default policy computes again; None is its own.

        After its nearest, a chunk needs less than after a filler (docs/results/quality.md).
        """
        return 0.05 if self.name == SIMILAR else None

    @property
    def tells_apart(self) -> bool:
        """Whether chunks of equal text may be encoded after different text."""
        return self.is_of_document or self.name == SIMILAR


ALONE = Context(NO_CONTEXT, 0)
"""Chunks are encoded after the shared prefix alone."""

_LONG_WINDOW = 4096
"""Tokens of the smallest window for which `SIMILAR` is the default: a model of shorter prompts is
harmed by as many tokens (docs/contexts.md)."""


def parse_context(text: str) -> Context:
    """Return the context that ``none``, ``document[:TOKENS]``, ``neighbours``,
    ``filler[:TOKENS]`` or ``similar[:TOKENS]`` names.

    Raises
    ------
    ParameterError
        For any other text.
    """
    match = _CONTEXT.fullmatch(text) if isinstance(text, str) else None
    name, number = match.groups() if match else ("", None)
    default = DEFAULT_TOKENS.get(name)
    if default is not None and number is None:
        return Context(name, default)
    if default and number is not None:
        if name == SIMILAR and int(number) < 2 * LEAST_TOKENS:
            raise ParameterError(f"context {text}: give it at least {2 * LEAST_TOKENS} tokens")
        return Context(name, int(number))
    expected = (f"{one}[:TOKENS]" if most else one for one, most in DEFAULT_TOKENS.items())
    raise ParameterError(
        f"context {shown(text)}: expected one of {', '.join(expected)}, where TOKENS is a whole "
        "number from 1 on"
    )


def default_context(tokenizer: Any, max_positions: int, room: int, chunk_tokens: int) -> Context:
    """Return the context of a new index whose user named none.

    That is `SIMILAR`, if the model reads long prompts and has room for it.

    Parameters
    ----------
    tokenizer, room, chunk_tokens
        As in `check_filler`.
    max_positions
        The model's context window in tokens.
    """
    if max_positions >= _LONG_WINDOW:
        similar = parse_context(SIMILAR)
        with contextlib.suppress(ParameterError):
            check_filler(similar, tokenizer, room, chunk_tokens)
            return similar
    return ALONE


def check_filler(context: Context, tokenizer: Any, room: int, chunk_tokens: int) -> None:
    """Raise ParameterError if a filler is too long for the model, or for the filler text.

    Parameters
    ----------
    context
        The context; only a shared one is checked, since others are shortened to what fits.
    tokenizer
        The model's fast tokenizer.
    room
        See `add_contexts`.
    chunk_tokens
        The largest number of tokens in a chunk.
    """
    if not context.is_shared:
        return
    left = room - chunk_tokens
    if context.num_tokens > left:
        raise ParameterError(
            f"context {context} and chunk_tokens={chunk_tokens} together exceed the {room} tokens "
            "that the model's context has after the shared prefix; choose "
            + (
                f"at most {context.name}:{left}, or shorter chunks"
                if left > 0
                else "shorter chunks"
            )
        )
    if context.name != FILLER:
        return  # its text is as long as the documents allow
    num_written = len(filler_ids(tokenizer))
    if context.num_tokens > num_written:
        raise ParameterError(
            f"context {context}: the filler text has {num_written:,} tokens with this model's "
            f"tokenizer; choose at most {FILLER}:{num_written}"
        )


@functools.cache
def filler_text() -> str:
    """Return the filler text, whose end precedes chunks."""
    return resources.files(__package__).joinpath(_FILLER_FILE).read_text("utf-8").strip()


def filler_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens of the whole filler text, and of what separates it from a chunk.

    Parameters
    ----------
    tokenizer
        The model's fast tokenizer.
    """
    # Tokenised without a chunk: the ids are the same for all of them, and computed once.
    (tokens,) = encode(tokenizer, [filler_text() + SEPARATOR], add_special_tokens=False)
    return tokens.token_ids


def add_contexts(
    chunks: Sequence[Chunk],
    tokenizer: Any,
    context: Context,
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
        What precedes the chunks; ``similar`` is given to them once they are embedded.
    room
        The largest number of tokens in a context and its chunk together: the model's window
        after the shared prefix.
    control
        Neutralises control strings in the text; None keeps them.
    """
    limit = context.num_tokens
    if context.name in (NO_CONTEXT, SIMILAR):
        return list(chunks)
    filler = filler_ids(tokenizer) if context.is_filler else ()
    found = []
    for number, chunk in enumerate(chunks):
        left = room - len(chunk.token_ids)
        contexts: tuple[tuple[int, ...], ...]
        if context.is_filler:
            ids = _last(filler, min(limit, left))
            # Encoded alone, it is exact where it stands first in a prompt.
            contexts = (ids, ()) if ids else (ids,)
        elif context.name == DOCUMENT:
            # Each of them has at least one token: more than this many are never needed.
            earlier = chunks[max(0, number - limit) : number]
            contexts = (_earlier_ids(earlier, chunk, tokenizer, min(limit, left), control),)
        else:
            ids = _ids_before(chunks[max(0, number - 1) : number], chunk, tokenizer, control)
            # A prompt never matches a part of the predecessor.
            contexts = ((), ids) if 0 < len(ids) <= left else ((),)
        found.append(replace(chunk, contexts=contexts))
    return found


def encoded_behind(ordinal: int, later: Iterable[Chunk], context: Context) -> Iterator[Chunk]:
    """Yield the chunks whose context may hold text of a given earlier chunk.

    Parameters
    ----------
    ordinal
        The earlier chunk's place in its document.
    later
        The chunks after it, in order; read only as far as a context can reach.
    context
        As in `add_contexts`.
    """
    if not context.is_of_document:
        return
    num_between = 0
    for chunk in later:
        # The reach of `_earlier_ids` and `add_contexts`; removed chunks extend it.
        if not (
            num_between < context.num_tokens
            if context.name == DOCUMENT
            else chunk.ordinal == ordinal + 1
        ):
            return
        if any(chunk.contexts):
            yield chunk
        num_between += len(chunk.token_ids)


def _last(ids: tuple[int, ...], number: int) -> tuple[int, ...]:
    return ids[-number:] if number > 0 else ()


def _earlier_ids(
    earlier: Sequence[Chunk],
    chunk: Chunk,
    tokenizer: Any,
    limit: int,
    control: ControlTokens | None,
) -> tuple[int, ...]:
    """Return the last tokens before a chunk, at most `limit`."""
    first = len(earlier)
    num_tokens = 0
    while first and num_tokens < limit:
        first -= 1
        num_tokens += len(earlier[first].token_ids)
    return _last(_ids_before(earlier[first:], chunk, tokenizer, control), limit)


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
