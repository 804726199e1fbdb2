"""How an index codes KV: the codec it writes, the profile it fits, and the codecs it reads."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrag.chunk import ChunkKey
from kvrag.codec.base import Codec, EncodedChunk
from kvrag.codec.config import choose_codec
from kvrag.codec.container import RecordHeader, RecordReader
from kvrag.codec.lossless import NAME as LOSSLESS
from kvrag.codec.names import RAW, RAW_HEADS
from kvrag.codec.profile import Profile
from kvrag.codec.raw import RawCodec
from kvrag.codec.registry import RecordOpener, get_codec
from kvrag.errors import ParameterError, ProfileError, RecordError, StoreError
from kvrag.ingest.profiles import ProfileFolder
from kvrag.kvcache import ChunkKV, KVSpec
from kvrag.store.base import Store, StoredRecord

EXACT_CODECS = (RAW, RAW_HEADS, LOSSLESS)
"""Codecs whose records decode to exactly the model's values."""


def check_profile(profile: Profile, codec: str, spec: KVSpec, model_fingerprint: str) -> None:
    """Raise ParameterError unless a profile suits a codec and a model."""
    if not isinstance(profile, Profile):
        raise ParameterError(f"profile: expected a Profile, found {type(profile).__name__}")
    if profile.spec != spec or profile.model_fingerprint != model_fingerprint:
        raise ParameterError(
            f"the codec profile {profile.hash} was fitted to a model with fingerprint "
            f"{profile.model_fingerprint} ({profile.spec}), this one's is {model_fingerprint} "
            f"({spec}): fit another one with 'kvrag profile'"
        )
    get_codec(codec, profile)


def spread_evenly(lengths: Sequence[int], num_tokens: int) -> list[int]:
    """Return which chunks make an evenly spread sample of about `num_tokens` tokens.

    Parameters
    ----------
    lengths
        Number of tokens of each chunk.
    """
    total = sum(lengths)
    sampled, seen, taken = [], 0, 0
    for number, length in enumerate(lengths):
        seen += length
        # Take each chunk that brings the sample up to its even share of the wanted tokens.
        if taken * total < min(num_tokens, total) * seen:
            sampled.append(number)
            taken += length
    return sampled


@dataclass
class RecordCoding:
    """Opens records of any codec, and provides the codec for writing records.

    Attributes
    ----------
    profiles
        The index's profiles.
    label
        The codec of new records.
    profile_hash
        Hash of the codec's profile, or "" if it has none, or none yet.
    model_fingerprint
        Fingerprint of the index's model.
    """

    profiles: ProfileFolder
    label: str
    profile_hash: str
    model_fingerprint: str

    def __post_init__(self) -> None:
        self._opener = RecordOpener(self.profiles.get, self.model_fingerprint)
        self._codec: Codec | None = None

    @property
    def needs_profile(self) -> bool:
        """Whether a profile must be fitted before the codec can be used."""
        return not self.profile_hash and choose_codec(self.label).config is not None

    @property
    def codec(self) -> Codec:
        """The codec of new records; raw until its profile is fitted.

        Raises ProfileError if the profile is not available.
        """
        if self.needs_profile:
            return RawCodec()
        if self._codec is None:
            profile = self.profiles.get(self.profile_hash) if self.profile_hash else None
            self._codec = get_codec(self.label, profile)
        return self._codec

    def writes(self, header: RecordHeader) -> bool:
        """Return whether a record has the name, profile and level that this codec writes."""
        choice = choose_codec(self.label)
        if choice.config is None or header.codec == LOSSLESS:
            return (header.codec, header.profile) == (self.codec.name, self.profile_hash)
        level = self.profiles.get(self.profile_hash).level_index(choice.level)
        return (header.profile, header.level) == (self.profile_hash, level)

    def open(self, key: ChunkKey, source: StoredRecord, spec: KVSpec) -> EncodedChunk:
        """Open a record of any codec. Raises RecordError, StoreError and ProfileError."""
        return self._opener.open(key, source, spec)


def read_exact(
    key: ChunkKey, num_tokens: int, store: Store, coding: RecordCoding, spec: KVSpec
) -> ChunkKV | None:
    """Return the KV of a record that decodes to exactly the model's values, or None."""
    try:
        record = store.open(key)
        if record is None:
            return None
        with contextlib.closing(record):
            if RecordReader(record, key).header.codec not in EXACT_CODECS:
                return None
            encoded = coding.open(key, record, spec)
            # Only the header says how long the record is: trust the chunk instead.
            return read_all(encoded, spec) if encoded.num_tokens == num_tokens else None
    except (RecordError, StoreError, ProfileError):
        return None


def read_all(encoded: EncodedChunk, spec: KVSpec) -> ChunkKV:
    """Return the whole KV of an opened record. Raises as `EncodedChunk.read_layer` does."""
    shape = (2, spec.num_layers, spec.num_kv_heads, encoded.num_tokens, spec.head_dim)
    both = torch.empty(shape, dtype=spec.dtype)
    for layer_index in range(spec.num_layers):
        both[0, layer_index], both[1, layer_index] = encoded.read_layer(layer_index)
    return ChunkKV(both[0], both[1])
