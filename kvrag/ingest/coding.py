"""How an index codes KV: the codec it writes, the profile it fits, and the codecs it reads."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvrag.arguments import shown
from kvrag.chunk import ChunkKey
from kvrag.codec.base import Codec, EncodedChunk, check_kv
from kvrag.codec.config import CodecChoice, choose_codec
from kvrag.codec.container import RecordReader
from kvrag.codec.fitting import fit_profile
from kvrag.codec.header import RecordHeader
from kvrag.codec.lossless import NAME as LOSSLESS
from kvrag.codec.names import RAW, RAW_HEADS, expected_bytes_per_token
from kvrag.codec.profile import Profile
from kvrag.codec.raw import RawCodec
from kvrag.codec.registry import RecordOpener, get_codec
from kvrag.errors import DocumentError, ParameterError, ProfileError, RecordError, StoreError
from kvrag.foreign import document_failures
from kvrag.ingest.profiles import SAMPLE_TOKENS, ProfileFolder
from kvrag.ingest.report import RecodeReport
from kvrag.kvcache import ChunkKV, KVSpec
from kvrag.store.base import Store, StoredRecord

EXACT_CODECS = (RAW, RAW_HEADS, LOSSLESS)
"""Codecs whose records decode to exactly the model's values."""


def check_profile(profile: Profile, codec: str, spec: KVSpec, model_fingerprint: str) -> None:
    """Raise ParameterError unless a profile suits a codec and a model."""
    if profile.spec != spec or profile.model_fingerprint != model_fingerprint:
        raise ParameterError(
            f"the codec profile {profile.hash} was fitted to a model with fingerprint "
            f"{profile.model_fingerprint} ({profile.spec}), this one's is {model_fingerprint} "
            f"({spec}): fit another one with 'kvrag profile'"
        )
    get_codec(codec, profile)


def spread_evenly(lengths: Sequence[int], num_tokens: int = SAMPLE_TOKENS) -> list[int]:
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


def fit_to(
    codec: str,
    lengths: Sequence[int],
    kv_of: Callable[[int], ChunkKV],
    *,
    spec: KVSpec,
    model_fingerprint: str,
    on_progress: Callable[[str], None] = lambda _: None,
    num_tokens: int = SAMPLE_TOKENS,
) -> Profile:
    """Fit the profile of a codec to a sample of chunks.

    Parameters
    ----------
    codec
        A codec that needs a profile.
    lengths
        Number of tokens of each available chunk.
    kv_of
        Returns the KV of a chunk by its number.
    on_progress
        Receives a line of text for each step.
    num_tokens
        Tokens in the sample.

    Raises
    ------
    ParameterError
        When the codec needs no profile, or the sample is too small.
    DocumentError
        When the KV of no chunk of the sample can be computed, or is finite.
    """
    choice = choose_codec(codec)
    if choice.config is None:
        raise ParameterError(f"codec {shown(codec)} needs no profile")
    sample = spread_evenly(lengths, num_tokens)
    reasons: list[str] = []

    def computed() -> Iterator[ChunkKV]:
        for done, number in enumerate(sample):
            on_progress(f"computing chunk {done + 1:,} of {len(sample):,} of the sample")
            # One that fails is left out here, and refused when its record is made.
            with document_failures(reasons.append):
                yield _sound(kv_of(number))
        if sample and len(reasons) == len(sample):
            raise DocumentError(f"no chunk of the sample can be used: {reasons[0]}")

    return fit_profile(choice.config, spec, model_fingerprint, computed(), on_progress)


def _sound(kv: ChunkKV) -> ChunkKV:
    try:
        check_kv(kv)
    except ParameterError as error:  # NaN or infinity
        raise DocumentError(str(error)) from error
    return kv


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
        """Whether a profile must be fitted before anything can be written."""
        return not self.profile_hash and choose_codec(self.label).config is not None

    @property
    def codec(self) -> Codec:
        """The codec of new records. Raises ProfileError if its profile is not available."""
        if self._codec is None:
            profile = self.profiles.get(self.profile_hash) if self.profile_hash else None
            self._codec = get_codec(self.label, profile)
        return self._codec

    @property
    def present_codec(self) -> Codec:
        """The codec of new records; raw until its profile is fitted. Raises ProfileError."""
        return RawCodec() if self.needs_profile else self.codec

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


def recode_records(
    needed: Mapping[ChunkKey, int],
    store: Store,
    coding: RecordCoding,
    spec: KVSpec,
    *,
    compute: Callable[[ChunkKey], ChunkKV],
    on_progress: Callable[[int, int], None] | None,
) -> RecodeReport:
    """Rewrite every record with the index's codec; each is replaced in one step.

    Records that decode exactly are converted. KV of lossy, damaged and missing records is
    computed again.

    Parameters
    ----------
    needed
        Number of tokens for each key.
    compute
        Computes the KV of a key with the model.
    """
    started = time.perf_counter()
    target = coding.codec
    size_before = size_after = num_recoded = num_computed = 0
    for number, (key, num_tokens) in enumerate(sorted(needed.items())):
        if on_progress is not None:
            on_progress(number, len(needed))
        old_bytes, is_done = _coded_already(key, store, coding)
        size_before += old_bytes
        if is_done:
            size_after += old_bytes
            continue
        kv = read_exact(key, num_tokens, store, coding, spec)
        if kv is None:
            kv = compute(key)
            num_computed += 1
        record = target.encode(key, kv)
        store.replace(key, record)
        size_after += len(record)
        num_recoded += 1
    return RecodeReport(
        codec=coding.label,
        num_records=len(needed),
        num_recoded=num_recoded,
        num_computed=num_computed,
        size_bytes_before=size_before,
        size_bytes=size_after,
        seconds=time.perf_counter() - started,
    )


def check_room(
    needed: Mapping[ChunkKey, int], store: Store, choice: CodecChoice, spec: KVSpec, folder: Path
) -> None:
    """Raise StoreError if the disk has no room for all records in another codec."""
    per_token = expected_bytes_per_token(choice.label, spec.bytes_per_token, spec.dtype.itemsize)
    more = sum(needed.values()) * per_token - store.size_bytes()
    free = shutil.disk_usage(folder).free
    if more > free:
        raise StoreError(
            f"records in codec {choice.label} need about {more / 1e6:,.0f} MB more in {folder}, "
            f"and {free / 1e6:,.0f} MB are free; free some space, or choose a smaller codec"
        )


def _coded_already(key: ChunkKey, store: Store, coding: RecordCoding) -> tuple[int, bool]:
    """Return a record's size in bytes, and whether it already has the wanted coding."""
    try:
        record = store.open(key)
        if record is None:
            return 0, False
        with contextlib.closing(record):
            return record.size_bytes, coding.writes(RecordReader(record, key).header)
    except (RecordError, StoreError):
        return 0, False


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
