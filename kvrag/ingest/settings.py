"""`IndexSettings`: how a new index is made, as callers of `Index.create` say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from kvrag import arguments
from kvrag.codec.names import parse_codec
from kvrag.errors import ParameterError
from kvrag.fusion.compression.spec import NO_COMPRESSION, parse_compression
from kvrag.ingest.checks import check_device
from kvrag.ingest.chunker import MIN_CHUNK_TOKENS
from kvrag.ingest.contexts import NO_CONTEXT, context_limit
from kvrag.models.control import check_control_tokens

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from kvrag.codec.profile import Profile
    from kvrag.ingest.embedding import Embedding

_DEFAULT_SALT = b"kvrag"


class IndexOptions(TypedDict, total=False):
    """The fields of `IndexSettings`, as keywords of `Index.create`."""

    embedding: str | Path | Embedding | Any
    codec: str
    profile: Profile | None
    chunk_tokens: int
    context: str
    context_tokens: int | None
    compression: str
    dtype: torch.dtype | str | None
    tenant_salt: bytes | None
    device: str | None
    store: str | None
    control_tokens: str | None


@dataclass(frozen=True)
class IndexSettings:
    """How an index is made. What no model could make good is checked at once.

    Parameters
    ----------
    embedding
        See `kvrag.ingest.embedding.get_embedding`.
    codec
        How KV is encoded: ``raw``, ``lossless``, ``cachegen:LEVEL`` or ``transform:BITS``.
    profile
        What the codec was fitted to this model with; None fits one to the first documents.
    chunk_tokens
        Most tokens a chunk may have; with the shared prefix it must fit into the model's
        context.
    context
        What a chunk is encoded behind: ``none``, or text of its own document whose KV is not
        stored: ``document`` (what comes before it) or ``neighbours`` (its predecessor, in a
        second record that is used where the predecessor stands before it).
    context_tokens
        Tokens of ``document`` context at the most; None means 256.
    compression
        How chunks are stored as fewer rows than they have tokens: ``drop:RATE`` (tokens that
        say little are left out), ``anchors:RATE`` (trained tokens stand for blocks;
        ``kvrag train anchors``), RATE the share not stored; ``none`` stores all.
    dtype
        Type of weights and KV of a model that is loaded here; None keeps the checkpoint's.
    tenant_salt
        1 to 64 bytes that key the chunk keys, so that tenants who share a store cannot
        guess each other's; None means a public one, or of an encrypted index one that follows
        from its key.
    device
        Where a model that is loaded here runs, such as ``"cuda"``; None means the CPU. It is
        not recorded: stored KV is the same kind wherever it is computed.
    store
        URL of where KV is kept (`kvrag.store.registry.open_store`), recorded without its
        password; None means a folder in the index's own. With ``key_file=PATH`` in it the
        catalog is encrypted too.
    control_tokens
        What becomes of the model's control strings (``<|im_end|>``) in documents and prompts:
        ``neutralise`` reads them as text, ``refuse`` does not index documents that hold any,
        ``keep`` leaves them their power. None neutralises them for models with a chat template
        and keeps them for others.

    Raises
    ------
    ParameterError
        When a value is out of range, or the device cannot be used.
    """

    embedding: str | Path | Embedding | Any = "minilm"
    codec: str = "raw"
    profile: Profile | None = None
    chunk_tokens: int = 512
    context: str = NO_CONTEXT
    context_tokens: int | None = None
    compression: str = NO_COMPRESSION
    dtype: torch.dtype | str | None = None
    tenant_salt: bytes | None = None
    device: str | None = None
    store: str | None = None
    control_tokens: str | None = None

    def __post_init__(self) -> None:
        parse_codec(self.codec)
        arguments.whole(self.chunk_tokens, "chunk_tokens", MIN_CHUNK_TOKENS)
        if not isinstance(self.salt, bytes):
            raise ParameterError(
                f"tenant_salt: expected 1 to 64 bytes, found {type(self.salt).__name__}"
            )
        if not 1 <= len(self.salt) <= 64:
            raise ParameterError(f"tenant_salt is 1 to 64 bytes, found {len(self.salt)}")
        check_control_tokens(self.control_tokens)
        context_limit(self.context, self.context_tokens)
        parse_compression(self.compression)
        check_device(self.device)

    @property
    def salt(self) -> bytes:
        """The tenant's salt, or the public one."""
        return _DEFAULT_SALT if self.tenant_salt is None else self.tenant_salt
