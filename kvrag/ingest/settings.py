"""`IndexSettings`: the options of a new index, and their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from kvrag import arguments
from kvrag.codec.names import parse_codec
from kvrag.errors import ParameterError
from kvrag.fusion.compression.spec import NO_COMPRESSION, parse_compression
from kvrag.ingest.checks import check_device
from kvrag.ingest.chunker import MIN_CHUNK_TOKENS
from kvrag.ingest.contexts import parse_context
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
    context: str | None
    compression: str
    dtype: torch.dtype | str | None
    tenant_salt: bytes | None
    device: str | None
    store: str | None
    control_tokens: str | None


@dataclass(frozen=True)
class IndexSettings:
    """The settings of a new index. Values that suit no model are refused at once.

    Parameters
    ----------
    embedding
        See `kvrag.ingest.embedding.get_embedding`. None means ``minilm`` where ``kvrag[embed]``
        is installed, and ``hashing`` elsewhere.
    codec
        How KV is encoded: ``raw``, ``lossless``, ``cachegen:LEVEL`` or ``transform:BITS``.
    profile
        The profile fitted for codec and model; None fits one to the first documents.
    chunk_tokens
        The largest number of tokens in a chunk; with the shared prefix it must fit into the
        model's context.
    context
        What precedes a chunk when it is encoded: ``none``, or text whose KV is not stored:
        ``filler`` (the same unrelated text for all chunks, as in the middle of a prompt; the first
        prompt that begins with a chunk stores a second record, of the chunk alone),
        ``document`` (earlier text of its document) or ``neighbours`` (the preceding chunk, in a
        second record that is used when a prompt has the same chunk before this one).
        ``corpus`` (as ``filler``, with passages of the first documents as the text).
        ``filler:TOKENS``, ``corpus:TOKENS`` and ``document:TOKENS`` name its largest number of
        tokens; without one they mean 512, 512 and 256. None means ``filler`` for a model whose
        window has at least 4,096 tokens, with room for it, and ``none`` for others and for
        compressed chunks.
    compression
        How chunks are stored as fewer rows than they have tokens: ``drop:RATE`` (leaves out
        tokens that say little) or ``anchors:RATE`` (trained tokens stand for blocks; see
        ``kvrag train anchors``). RATE is the share not stored; ``none`` stores every token.
    dtype
        Type of weights and KV of a model that is loaded here; None keeps the checkpoint's.
    tenant_salt
        1 to 64 bytes that key the chunk keys, so that tenants who share a store cannot
        guess each other's keys. None means a public salt, or one derived from the key of an
        encrypted index.
    device
        Where a model that is loaded here runs, such as ``"cuda"``; None means the CPU. It is
        not recorded: stored KV has the same form on every device.
    store
        URL of the store of KV (`kvrag.store.registry.open_store`), recorded without its
        password; None means a folder inside the index folder. With ``key_file=PATH`` in the URL
        the catalog is encrypted too.
    control_tokens
        What happens to the model's control strings (``<|im_end|>``) in documents and prompts:
        ``neutralise`` reads them as text, ``refuse`` rejects documents that hold any, and
        ``keep`` lets them act as control tokens. None means ``neutralise`` for models with a
        chat template and ``keep`` for others.

    Raises
    ------
    ParameterError
        When a value is out of range, or the device cannot be used.
    """

    embedding: str | Path | Embedding | Any = None
    codec: str = "raw"
    profile: Profile | None = None
    chunk_tokens: int = 512
    context: str | None = None
    compression: str = NO_COMPRESSION
    dtype: torch.dtype | str | None = None
    tenant_salt: bytes | None = None
    device: str | None = None
    store: str | None = None
    control_tokens: str | None = None

    def __post_init__(self) -> None:
        parse_codec(self.codec)
        arguments.whole(self.chunk_tokens, "chunk_tokens", MIN_CHUNK_TOKENS, 2**31 - 1)
        if not isinstance(self.salt, bytes):
            raise ParameterError(
                f"tenant_salt: expected 1 to 64 bytes, found {type(self.salt).__name__}"
            )
        if not 1 <= len(self.salt) <= 64:
            raise ParameterError(f"tenant_salt is 1 to 64 bytes, found {len(self.salt)}")
        check_control_tokens(self.control_tokens)
        if self.context is not None:
            parse_context(self.context)
        parse_compression(self.compression)
        check_device(self.device)

    @property
    def salt(self) -> bytes:
        """The tenant's salt, or the public one."""
        return _DEFAULT_SALT if self.tenant_salt is None else self.tenant_salt
