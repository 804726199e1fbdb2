"""`IndexSettings`: the options of a new index, and their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrag.arguments import shown
from kvrag.codec.names import PACKED, parse_codec
from kvrag.errors import ParameterError
from kvrag.ingest.chunker import MIN_CHUNK_TOKENS
from kvrag.ingest.contexts import INDEX, TRUST, parse_context
from kvrag.ingest.encoders import check_device
from kvrag.models.control import check_control_tokens
from kvrag.optiontable import check_options, described, option

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from kvrag.codec.profile import Profile
    from kvrag.ingest.embedding import Embedding

_DEFAULT_SALT = b"kvrag"


@described
@dataclass(frozen=True)
class IndexSettings:
    """The settings of a new index: the keywords of `Index.create`, and options of 'kvrag ingest'.

    Values that suit no model are refused at once, by a ParameterError.
    """

    embedding: str | Path | Embedding | Any = option(
        None,
        "Embedding for retrieval: minilm, hashing, the folder or hub name of a "
        "sentence-transformers model, or MODULE:NAME for an object of Python (in Python: the "
        "object itself). Default for a new index: minilm with 'kvrag[embed]', otherwise hashing.",
    )
    codec: str = option(
        PACKED,
        "How KV is stored: raw, raw-heads, lossless, packed, cachegen:1 to cachegen:4, "
        "transform:BITS or stream:BITS. Default for a new index: packed, raw until it holds "
        "enough text to fit it.",
    )
    profile: Profile | None = option(
        None, "The profile fitted for codec and model; by default fitted to the first documents."
    )
    chunk_tokens: int = option(
        512,
        "Maximum length of a chunk, in tokens; with the shared prefix it must fit into the "
        "model's context. Default for a new index: 512.",
        least=MIN_CHUNK_TOKENS,
        most=2**31 - 1,
    )
    context: str | None = option(
        None,
        "Text that the model reads before each chunk it encodes: none, filler (the same "
        "unrelated text for all chunks, 512 tokens), similar (the nearest chunks of other "
        "documents, 512 tokens), "
        "document (earlier text of the same document, at most 256 tokens) or neighbours (also "
        "stores a second record, encoded after the previous chunk). Default for a new index: "
        "similar for models with a window of 4,096 tokens or more, otherwise none.",
    )
    trust: str = option(
        INDEX,
        "Whose chunks context similar takes: those of the whole index, or only those of documents "
        "in the same folder. Default for a new index: index.",
    )
    writer: str | Path | None = option(
        None,
        "File of a writer ('kvrag train writer'), which acts while chunks are encoded after a "
        "filler or similar; the index keeps a copy.",
    )
    dtype: torch.dtype | str | None = option(
        None,
        "Type of the model's weights and KV: float32, bfloat16 or float16. Default for a new "
        "index: the checkpoint's type.",
    )
    tenant_salt: bytes | None = option(
        None,
        "1 to 64 bytes that key the chunk keys, so that tenants who share a store cannot guess "
        "each other's keys. By default a public salt, or one derived from the key of an encrypted "
        "index.",
    )
    device: str | None = option(
        None,
        "Where a model that is loaded here runs, such as cuda; by default on the CPU. It is not "
        "recorded: stored KV has the same form on every device.",
    )
    store: str | None = option(
        None,
        "URL of the store of KV (`kvrag.store.registry.open_store`), recorded without its "
        "password; by default a folder inside the index folder. With key_file=PATH in the URL the "
        "catalog is encrypted too.",
    )
    control_tokens: str | None = option(
        None,
        "How to treat the model's control strings, such as <|im_end|>, in documents: neutralise "
        "(read them as text, in prompts too), refuse (leave out such documents) or keep. Default "
        "for a new index: neutralise for chat models, keep for others.",
    )

    def __post_init__(self) -> None:
        parse_codec(self.codec)
        check_options(self)
        if not isinstance(self.salt, bytes):
            raise ParameterError(
                f"tenant_salt: expected 1 to 64 bytes, found {type(self.salt).__name__}"
            )
        if not 1 <= len(self.salt) <= 64:
            raise ParameterError(f"tenant_salt is 1 to 64 bytes, found {len(self.salt)}")
        check_control_tokens(self.control_tokens)
        if self.context is not None:
            parse_context(self.context)
        if self.trust not in TRUST:
            raise ParameterError(f"trust {shown(self.trust)}: expected {' or '.join(TRUST)}")
        check_device(self.device)

    @property
    def salt(self) -> bytes:
        """The tenant's salt, or the public one."""
        return _DEFAULT_SALT if self.tenant_salt is None else self.tenant_salt
