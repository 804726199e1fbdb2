"""Documents, chunks and the identity of a chunk's KV.

A loader yields a `Document`. A `Chunk` is a stretch of one document with its token ids. A
`ChunkKey` names the KV of that chunk under one model. Two chunks with the same token ids under
the same model share one key, and so one stored record.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import struct
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from kvrag.arguments import shown
from kvrag.errors import ParameterError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PAGE_BREAK = "\f"
"""Loaders put it between the pages of a document; chunks record the page on which they begin."""

KEY_FORMAT_VERSION = 1
_DIGEST_BYTES = 20
_CONTEXT = "context"
# Long runs of characters that may be combining marks: neither letters, digits nor ASCII.
_LONG_RUN = re.compile(r"[^\w\x00-\x7f]{64,}")
_HEX_KEY = re.compile(r"[0-9a-f]{40}")


def normalise(text: str) -> str:
    r"""Return the text in NFC, with line ends as ``\n``."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text.isascii():
        return text
    return unicodedata.normalize("NFC", _LONG_RUN.sub(_order_marks, text))


def normalise_text(text: str) -> str:
    """Return the text as it is hashed, tokenised and passed to frameworks.

    That is `normalise`, with outer whitespace stripped. Prompt builders pass a chunk on in this
    form, so it can be found again in the rendered prompt.
    """
    return normalise(text).strip()


def _order_marks(run: re.Match[str]) -> str:
    """Return a run of combining marks in canonical order, which NFC then keeps.

    Python's own NFC sorts marks by insertion, in time quadratic in their number: 160 KB of them
    take seconds.
    """
    ordered: list[str] = []
    marks: list[str] = []
    for char in itertools.chain.from_iterable(unicodedata.normalize("NFD", c) for c in run[0]):
        if unicodedata.combining(char):
            marks.append(char)
        else:
            ordered += sorted(marks, key=unicodedata.combining)
            marks.clear()
            ordered.append(char)
    return "".join(ordered + sorted(marks, key=unicodedata.combining))


def content_hash(text: str) -> str:
    """Return the hexadecimal BLAKE2b-160 digest of `text` (UTF-8, surrogates escaped)."""
    return hashlib.blake2b(
        text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES
    ).hexdigest()


def chunk_id_of(source: str, ordinal: int, text: str) -> str:
    """Return the identity of a chunk within an index: a digest of source, ordinal and text."""
    # The length before the source keeps two different inputs from flattening to the same string.
    return content_hash(f"{len(source)}\0{source}{ordinal}\0{text}")


def fields_of(source: str, ordinal: int, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chunk's metadata, with source and ordinal unless the document defines them."""
    return {"source": source, "ordinal": ordinal, **metadata}


class Mark(NamedTuple):
    """A place in a document's outline: a heading, or a definition or statement of code.

    Attributes
    ----------
    start
        The offset of its first character.
    level
        Its depth. It ends what marks of this level, or of a higher number, began before it.
    title
        At most 256 characters; empty for a statement.
    """

    start: int
    level: int
    title: str


@dataclass(frozen=True)
class Document:
    """One source document, from a loader.

    Attributes
    ----------
    source
        The origin: an absolute path (``path#row`` for rows of a table) or the id that a framework
        gave. Unique within an index.
    text
        The whole text, not yet normalised. Indexing refuses anything that is not text.
    metadata
        Plain JSON values, shown with answers.
    is_whole
        Whether the text was cut elsewhere and becomes one chunk, if the model's window allows it.
    outline
        Where the text may be cut, if its loader knows that better than the chunker; in ascending
        order. The text is normalised then (`normalise_text`). Empty: as Markdown, or plain text.
    """

    source: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    is_whole: bool = False
    outline: tuple[Mark, ...] = ()


class ContextIds(tuple[int, ...]):
    """The tokens of a context, whose hash is computed once: many tables of a prompt ask for it."""

    def __hash__(self) -> int:
        """Return a tuple's hash."""
        found: int | None = vars(self).get("hash")
        if found is None:
            found = vars(self)["hash"] = super().__hash__()
        return found


UNSTORED = ContextIds((2**31 - 1,))
"""The one context of a chunk without KV: no tokenizer has this id."""


@dataclass(frozen=True)
class Chunk:
    """A stretch of one document, the unit of retrieval and of KV reuse.

    Attributes
    ----------
    chunk_id
        Identity within the index: digest of source, ordinal and text (see `chunk_id_of`).
    text
        Normalised text (see `normalise_text`); exactly what retrievers return.
    token_ids
        The chunk tokenised alone, without special tokens. Length T >= 1.
    token_starts
        For each token, the offset of its first character in `text`. Length T.
    source, ordinal
        The document that it was cut from, and its place there, counted from 0.
    metadata
        The document's metadata, plus what the chunker adds: ``heading``, ``headings`` (the path of
        headings under which the chunk begins, from the outermost), ``page``, ``start``.
    contexts
        One entry for each record of the chunk's KV: the token ids between the shared prefix and the
        chunk while it is encoded. Their own KV is not stored. At least one, often just ``()``. If
        ``()`` is not the first, its record is optional (`is_optional`).
    """

    chunk_id: str
    text: str
    token_ids: tuple[int, ...]
    token_starts: tuple[int, ...]
    source: str
    ordinal: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    contexts: tuple[tuple[int, ...], ...] = ((),)

    @cached_property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`token_ids` and `token_starts`: arrays stay with a chunk that the catalog keeps."""
        import numpy as np

        return np.array(self.token_ids, np.int64), np.array(self.token_starts, np.int64)

    @property
    def fields(self) -> dict[str, Any]:
        """The metadata, with source and ordinal unless the document defines them."""
        return fields_of(self.source, self.ordinal, self.metadata)

    def encodings(self) -> Iterator[Chunk]:
        """Yield the chunk once for each of its records, with only that record's context."""
        for context_ids in self.contexts:
            yield replace(self, contexts=(context_ids,))

    def required(self) -> Iterator[Chunk]:
        """Yield what `encodings` does, without the optional record: ingestion stores these."""
        for one in self.encodings():
            if not self.is_optional(one.contexts[0]):
                yield one

    def is_optional(self, context_ids: tuple[int, ...]) -> bool:
        """Return whether the record after a context is made only when a prompt first needs it.

        That is the record of the chunk alone, beside one that was encoded after a filler, and that
        of a chunk without KV (`UNSTORED`), which is never made. If it is missing, nothing is lost.
        """
        return context_ids == UNSTORED or (not context_ids and bool(self.contexts[0]))


@dataclass(frozen=True, order=True)
class ChunkKey:
    """The name of one chunk's KV under one model: 40 lower-case hexadecimal digits."""

    digest: str

    def __post_init__(self) -> None:
        if not _HEX_KEY.fullmatch(self.digest):
            raise ValueError(f"a chunk key is 40 hexadecimal digits, found {shown(self.digest)}")

    def __str__(self) -> str:
        return self.digest


def is_key(text: object) -> bool:
    """Return whether `text` has the form of a `ChunkKey`."""
    return isinstance(text, str) and _HEX_KEY.fullmatch(text) is not None


def chunk_key(
    *,
    tenant_salt: bytes,
    model_fingerprint: str,
    tokenizer_fingerprint: str,
    prefix_ids: Sequence[int],
    token_ids: Sequence[int],
    context_ids: Sequence[int] = (),
    options: Mapping[str, str] | None = None,
) -> ChunkKey:
    """Return the key under which a chunk's KV is stored.

    Parameters
    ----------
    tenant_salt
        1 to 64 bytes that key the hash. Without them, nobody can compute or probe a tenant's keys.
    model_fingerprint, tokenizer_fingerprint
        Digests of weights with config, and of the tokenizer.
    prefix_ids
        Token ids of the shared prefix that the chunk was encoded after.
    token_ids
        The chunk's own token ids.
    context_ids
        Token ids between the two during encoding. Without any, the key is that of the chunk alone.
    options
        Settings that change the stored KV (a link model). The codec is not
        among them: it is recorded separately, so that a recode keeps the key.

    Raises
    ------
    ParameterError
        For an option named ``context``: `context_ids` are hashed under that name.
    """
    digest = hashlib.blake2b(
        digest_size=_DIGEST_BYTES, key=tenant_salt, person=b"kvrag-chunk-key\0"
    )

    def feed(payload: bytes) -> None:
        # Length-prefixed, so that no two field lists flatten to the same bytes.
        digest.update(struct.pack("<Q", len(payload)))
        digest.update(payload)

    feed(struct.pack("<I", KEY_FORMAT_VERSION))
    feed(model_fingerprint.encode())
    feed(tokenizer_fingerprint.encode())
    for ids in (prefix_ids, token_ids):
        feed(struct.pack(f"<{len(ids)}q", *ids))
    altering = {name: value.encode() for name, value in (options or {}).items()}
    if _CONTEXT in altering:
        raise ParameterError(
            f"chunk key: the option name {_CONTEXT!r} is reserved for context_ids; use another one"
        )
    if context_ids:
        altering[_CONTEXT] = struct.pack(f"<{len(context_ids)}q", *context_ids)
    for name, value in sorted(altering.items()):
        feed(name.encode())
        feed(value)
    return ChunkKey(digest.hexdigest())
