"""Fused artefacts: the KV of a prompt's beginning, fused before, under an opaque name.

The name is a keyed hash over everything that the rows depend on: the tenant's salt, model and
tokenizer, the prompt's own token ids and how they were fused. Whoever loads one computes it again
from the prompt at hand, so that a foreign name, another model or other tokens never lead to its
bytes. The record is that of the lossless codecs; its keys are placed (rotated) from position 0
on.
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
from kvrag.ingest.index import Index
from kvrag.kvcache import ChunkKV
from kvrag.store.registry import open_store

FOLDER_NAME = "artefacts"
_MAX_LABEL = 200


@dataclass(frozen=True)
class ArtefactName:
    """What a request names a fused artefact by.

    Attributes
    ----------
    key
        40 hexadecimal digits, opaque.
    num_tokens
        Tokens of the prompt's beginning that it covers.
    label
        How it was fused; part of what the key is a hash of.
    """

    key: str
    num_tokens: int
    label: str

    @classmethod
    def parse(cls, values: Any) -> ArtefactName:
        """Return a name from a request. Raises ParameterError when it is none."""
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
    """Return what tells one way of fusing a text from all others."""
    report, layout = fused.report, fused.layout
    # What was missing was computed instead, and policies look at the question behind the rows kept.
    whole = f"{report.policy} {layout.spans} {sorted(report.misses.items())} {layout.token_ids}"
    digest = hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()
    return f"{report.policy}"[: _MAX_LABEL - len(digest) - 1] + f" {digest}"


class ArtefactStore:
    """Fused artefacts of one index.

    Parameters
    ----------
    index
        Whose model, tokenizer and salt name them.
    url
        Where they are kept; None means a folder in the index's own.

    Raises
    ------
    StoreError, ParameterError
        As `open_store` does.
    """

    def __init__(self, index: Index, url: str | None = None) -> None:
        self._index = index
        self._codec = RawCodec()
        self._store = open_store(url or f"file:{index.path / FOLDER_NAME}", must_answer=False)

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def put(self, fused: FusedPrompt, num_tokens: int | None = None) -> ArtefactName:
        """Keep the KV of a fused prompt, all rows but the last, and return its name.

        Parameters
        ----------
        num_tokens
            Rows to keep; None means all but the last, which vLLM computes.

        Raises
        ------
        ParameterError
            For a prompt whose rows are not its tokens (link tokens, compressed chunks, positions
            left out).
        StoreError
            When the store refuses it.
        """
        layout = fused.layout
        if layout.positions is not None or layout.token_ids != layout.plain_token_ids:
            raise ParameterError(
                "vLLM counts one row a token: a prompt with link tokens, compressed chunks or "
                "positions left out cannot be handed over"
            )
        if num_tokens is None:
            num_tokens = len(layout.token_ids) - 1
        if not 1 <= num_tokens < len(layout.token_ids):
            raise ParameterError(
                f"num_tokens {num_tokens}: expected 1 to {len(layout.token_ids) - 1}, the last "
                "token is always computed"
            )
        label = _label(fused)
        key = self._key(layout.token_ids[:num_tokens], label)
        rows = slice(0, num_tokens)
        kv = ChunkKV(
            torch.stack([layer[0, :, rows] for layer in fused.kv.keys]).cpu(),
            torch.stack([layer[0, :, rows] for layer in fused.kv.values]).cpu(),
        )
        # Rows under one name are the same up to rounding: the newest.
        self._store.replace(key, self._codec.encode(key, kv))
        return ArtefactName(key.digest, num_tokens, label)

    def check(self, name: ArtefactName, token_ids: Sequence[int]) -> ChunkKey:
        """Return the key of an artefact that holds for a prompt.

        Raises
        ------
        RecordError
            When it is one of other tokens, another model or another tenant.
        """
        key = self._key(token_ids[: name.num_tokens], name.label)
        if name.num_tokens > len(token_ids) or key.digest != name.key:
            raise RecordError(
                f"artefact {name.key} is not of this prompt's first {name.num_tokens} tokens under "
                "this model: the prompt is computed; fuse it again with this index"
            )
        return key

    def load(self, key: ChunkKey, num_tokens: int) -> ChunkKV:
        """Return keys, placed, and values ``[L, H, num_tokens, D]`` on the CPU.

        Raises
        ------
        RecordError
            When there is none, or it is damaged or of another shape.
        StoreError
            When the store cannot be read.
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
            # What is wrong, without the remedy for a document's record.
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
