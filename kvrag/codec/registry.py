"""Codecs by name, and the codec that reads a record."""

from __future__ import annotations

from collections.abc import Callable

from kvrag.chunk import ChunkKey
from kvrag.codec.base import Codec, EncodedChunk
from kvrag.codec.container import ByteSource, RecordReader
from kvrag.codec.lossless import LosslessCodec
from kvrag.codec.pipeline import PipelineCodec
from kvrag.codec.presets import choose_codec
from kvrag.codec.profile import Profile
from kvrag.codec.quantiser import Exact
from kvrag.codec.raw import RawCodec
from kvrag.errors import ParameterError, ProfileError, RecordError
from kvrag.kvcache import KVSpec

GetProfile = Callable[[str], Profile]
"""From a hash to the profile; raises ProfileError where it cannot be had."""


def get_codec(name: str, profile: Profile | None = None) -> Codec:
    """Return the codec called `name`, such as ``raw`` or ``transform:1``.

    Parameters
    ----------
    profile
        What was fitted to the model; every codec but ``raw`` needs one.

    Raises
    ------
    ParameterError
        When there is no such codec, or the profile is missing or lacks the level.
    """
    choice = choose_codec(name)
    if choice.config is None:
        return RawCodec()
    if profile is None:
        raise ParameterError(f"codec {name!r} needs a profile: fit one with 'kvrag profile'")
    if isinstance(profile.config.quantiser, Exact):
        return LosslessCodec(profile)
    return PipelineCodec(profile, choice.label, choice.level)


class RecordOpener:
    """Opens records of any codec: each names its own, and the profile it was coded with.

    Parameters
    ----------
    get_profile
        Where profiles are found.
    """

    def __init__(self, get_profile: GetProfile) -> None:
        self._get_profile = get_profile
        self._raw = RawCodec()
        self._by_profile: dict[str, Codec] = {}

    def add(self, codec: Codec, profile: Profile) -> None:
        """Use `codec` for the records of `profile`."""
        self._by_profile[profile.hash] = codec

    def open(self, key: ChunkKey, source: ByteSource, spec: KVSpec) -> EncodedChunk:
        """Read and check the header of a record.

        Raises
        ------
        RecordError
            When it is damaged, belongs to another key or shape, or its profile cannot be had.
        StoreError
            When the store cannot deliver the header.
        """
        reader = RecordReader(source, key)
        if not reader.header.profile:
            return self._raw.open_record(reader, spec)
        codec = self._by_profile.get(reader.header.profile)
        if codec is None:
            try:
                profile = self._get_profile(reader.header.profile)
            except ProfileError as error:
                raise RecordError(f"record {key}: {error}") from error
            codec = codec_of(profile)
            self._by_profile[profile.hash] = codec
        return codec.open_record(reader, spec)


def codec_of(profile: Profile) -> Codec:
    """Return the codec that reads every level of a profile, and writes the first."""
    if isinstance(profile.config.quantiser, Exact):
        return LosslessCodec(profile)
    return PipelineCodec(profile, "", profile.levels[0].name)
