"""Fused artefacts: the already fused KV of a prompt's beginning, under an opaque name.

The name is a keyed hash of everything that the rows depend on: the tenant's salt, the model and
tokenizer, the prompt's token ids and how they were fused. Loading computes the name again from the
current prompt, so another tenant's name, another model or other tokens never lead to its bytes. The
record has the format of the lossless codecs; its keys are placed (rotated) from position 0 on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvrag.chunk import ChunkKey, chunk_key
from kvrag.codec.raw import RawCodec
from kvrag.errors import ParameterError, RecordError
from kvrag.fusion.fuser import FusedPrompt
from kvrag.ingest.coding import read_all
from kvrag.ingest.encryption import encrypted_as
from kvrag.ingest.index import Index
from kvrag.kvcache import ChunkKV
from kvrag.store.file import FileStore
from kvrag.store.registry import open_store

FOLDER_NAME = "artefacts"
_MAX_LABEL = 200


@dataclass(frozen=True)
class ArtefactName:
    """The name of a fused artefact in a request.

    Attributes
    ----------
    key
        40 hexadecimal digits, opaque.
    num_tokens
        Number of tokens at the prompt's beginning that the artefact covers.
    label
        Describes how it was fused; the key's hash includes it.
    """

    key: str
    num_tokens: int
    label: str

    @classmethod
    def parse(cls, values: Any) -> ArtefactName:
        """Return the name in a request's values. Raise ParameterError if they are not a name."""
        if isinstance(values, Mapping) and set(values) == {"key", "num_tokens", "label"}:
            key, num_tokens, label = values["key"], values["num_tokens"], values["label"]
            if (
                isinstance(key, str)
                and type(num_tokens) is int
                and num_tokens >= 1
                and isinstance(label, str)
                and len(label) <= _MAX_LABEL
            ):
                try:
                    ChunkKey(key)
                except ValueError as error:
                    raise ParameterError(f"artefact: {error}") from error
                return cls(key, num_tokens, label)
        raise ParameterError(
            "artefact: expected key (40 hexadecimal digits), num_tokens (1 or more) and label"
        )


def _label(fused: FusedPrompt) -> str:
    """Return a label that identifies the way in which a text was fused."""
    report, layout = fused.report, fused.layout
    # Missing chunks were computed instead, and policies observe the question after the kept rows.
    whole = f"{report.policy} {layout.spans} {sorted(report.misses.items())} {layout.token_ids}"
    digest = hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()
    return f"{report.policy}"[: _MAX_LABEL - len(digest) - 1] + f" {digest}"


class ArtefactStore:
    """Fused artefacts of one index.

    Parameters
    ----------
    index
        The index whose model, tokenizer and salt the names depend on.
    url
        URL of the store; None means a folder inside the index's folder. Without a key in the URL,
        artefacts of an encrypted index are encrypted under a key derived from the index's.

    Raises
    ------
    StoreError, ParameterError
        See `open_store`.
    """

    def __init__(self, index: Index, url: str | None = None) -> None:
        self._index = index
        self._codec = RawCodec()
        store = open_store(url, must_answer=False) if url else FileStore(index.path / FOLDER_NAME)
        self._store = encrypted_as(index.store, store)

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def put(self, fused: FusedPrompt, num_tokens: int | None = None) -> ArtefactName:
        """Store the KV of a fused prompt, and return the artefact's name.

        Parameters
        ----------
        fused
            The prompt.
        num_tokens
            Number of rows to store; None means all except the last, which vLLM computes.

        Raises
        ------
        ParameterError
            If the prompt's rows are not its tokens (link tokens, compressed chunks, gaps between
            positions).
        StoreError
            If the store refuses the record.
        """
        layout = fused.layout
        if layout.positions is not None or layout.token_ids != layout.plain_token_ids:
            raise ParameterError(
                "vLLM has one row per token: a prompt with link tokens, compressed chunks or gaps "
                "between positions cannot be stored for it"
            )
        if num_tokens is None:
            num_tokens = len(layout.token_ids) - 1
        if not 1 <= num_tokens < len(layout.token_ids):
            raise ParameterError(
                f"num_tokens {num_tokens}: expected 1 to {len(layout.token_ids) - 1}, because the "
                "last token is always computed"
            )
        label = _label(fused)
        key = self._key(layout.token_ids[:num_tokens], label)
        rows, spec = slice(0, num_tokens), self._index.config.spec
        kv = ChunkKV(
            *(
                torch.stack([layer[0, :, rows] for layer in part]).to("cpu", spec.dtype)
                for part in (fused.kv.keys, fused.kv.values)
            )
        )
        # Rows under one name are equal up to rounding, so the newest may replace older ones.
        self._store.replace(key, self._codec.encode(key, kv))
        return ArtefactName(key.digest, num_tokens, label)

    def check(self, name: ArtefactName, token_ids: Sequence[int]) -> ChunkKey:
        """Return the key of an artefact that is valid for a prompt.

        Raises
        ------
        RecordError
            If the artefact belongs to other tokens, another model or another tenant.
        """
        key = self._key(token_ids[: name.num_tokens], name.label)
        if name.num_tokens > len(token_ids) or key.digest != name.key:
            raise RecordError(
                f"artefact {name.key} does not belong to this prompt's first {name.num_tokens} "
                "tokens and this model: the prompt is computed; fuse it again with this index"
            )
        return key

    def load(self, key: ChunkKey, num_tokens: int) -> ChunkKV:
        """Return keys, placed, and values ``[L, H, num_tokens, D]`` on the CPU.

        Raises
        ------
        RecordError
            If the artefact is missing, damaged or of another shape.
        StoreError
            If the store cannot be read.
        """
        record = self._store.open(key)
        if record is None:
            raise RecordError(f"artefact {key} is not in {self._store.url}: fuse its prompt again")
        try:
            encoded = self._codec.open(key, record, self._index.config.spec)
            if encoded.num_tokens != num_tokens:
                raise RecordError(
                    f"artefact {key}: expected {num_tokens} rows, found {encoded.num_tokens}"
                )
            return read_all(encoded, self._index.config.spec)
        except RecordError as error:
            self._store.note_damage(key)
            # The cause only: the message's remedy is for a document's record.
            reason = str(error).partition(";")[0]
            raise RecordError(
                f"artefact {key} is damaged ({reason}): the prompt is computed; fuse it again"
            ) from error
        finally:
            record.close()

    def _key(self, token_ids: Sequence[int], label: str) -> ChunkKey:
        config = self._index.config
        return chunk_key(
            tenant_salt=bytes.fromhex(config.tenant_salt),
            model_fingerprint=config.model_fingerprint,
            tokenizer_fingerprint=config.tokenizer_fingerprint,
            prefix_ids=(),
            token_ids=token_ids,
            options={"fused": label},
        )
