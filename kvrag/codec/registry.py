"""Finds codecs by name, and the codec that reads a record."""

from __future__ import annotations

from collections.abc import Callable

from kvrag.arguments import shown
from kvrag.chunk import ChunkKey
from kvrag.codec.bands import FittedBands
from kvrag.codec.base import Codec, EncodedChunk
from kvrag.codec.config import CodecChoice, choose_codec
from kvrag.codec.container import ByteSource, RecordReader
from kvrag.codec.lossless import LosslessCodec
from kvrag.codec.names import PLAIN
from kvrag.codec.packed import PackedCodec
from kvrag.codec.pipeline import PipelineCodec
from kvrag.codec.profile import Profile
from kvrag.codec.tables import Exact
from kvrag.errors import ParameterError, ProfileError
from kvrag.kvcache import KVSpec

GetProfile = Callable[[str], Profile]
"""Returns the profile with a given hash; raises ProfileError if it is not available."""


def get_codec(name: str, profile: Profile | None = None) -> Codec:
    """Return the codec called `name`, such as ``raw`` or ``transform:1``.

    Parameters
    ----------
    profile
        The profile, fitted to the model, for a codec that needs one.

    Raises
    ------
    ParameterError
        If the codec does not exist, or another distribution's codec cannot be used, or the profile
        is missing, was fitted for another codec, or lacks the level.
    """
    choice = choose_codec(name)
    if choice.config is None:
        return _plain(choice.label)
    if profile is None:
        raise ParameterError(f"codec {shown(name)} needs a profile: fit one with 'kvrag profile'")
    if not is_profile_of(profile, choice):
        raise ParameterError(
            f"the codec profile {profile.hash} was fitted for transform "
            f"{profile.config.transform.name!r} and quantiser {profile.config.quantiser.name!r}, "
            f"codec {shown(name)} has {choice.config.transform.name!r} and "
            f"{choice.config.quantiser.name!r}: fit one with 'kvrag profile --codec {name}'"
        )
    return codec_of(profile, choice.label, choice.level)


class RecordOpener:
    """Opens records of any codec. Each record names its codec, and its profile if it has one.

    Parameters
    ----------
    get_profile
        Finds profiles.
    model_fingerprint
        Fingerprint of the model that the records must belong to.
    """

    def __init__(self, get_profile: GetProfile, model_fingerprint: str) -> None:
        self._get_profile = get_profile
        self._model_fingerprint = model_fingerprint
        self._plain: dict[str, Codec] = {}
        self._by_profile: dict[str, Codec] = {}

    def open(self, key: ChunkKey, source: ByteSource, spec: KVSpec) -> EncodedChunk:
        """Read and check the header of a record.

        Raises
        ------
        RecordError
            If it is damaged, belongs to another key or shape, or its codec is not installed.
        ProfileError
            If its profile is not available, or was fitted to another model.
        StoreError
            If the store cannot deliver the header.
        """
        reader = RecordReader(source, key)
        if not reader.header.profile:
            return self._plain_of(reader).open_record(reader, spec)
        codec = self._by_profile.get(reader.header.profile)
        if codec is None:
            profile = self._get_profile(reader.header.profile)
            if profile.model_fingerprint != self._model_fingerprint:
                raise ProfileError(
                    f"record {key} was coded with profile {profile.hash} of a model with "
                    f"fingerprint {profile.model_fingerprint}, expected {self._model_fingerprint}; "
                    "ingest its document again"
                )
            codec = codec_of(profile)
            self._by_profile[profile.hash] = codec
        return codec.open_record(reader, spec)

    def _plain_of(self, reader: RecordReader) -> Codec:
        """Return the codec that a record without a profile names. Raises RecordError."""
        name = reader.header.codec
        if name not in self._plain:
            try:
                self._plain[name] = _plain(name)
            except (KeyError, ParameterError) as error:
                why = "" if isinstance(error, KeyError) else f" ({error})"
                reader.refuse(
                    "codec without a profile",
                    f"one of {', '.join(PLAIN)}",
                    f"{shown(name)}{why}",
                    "install the distribution that has this codec, or ingest the document again",
                )
        return self._plain[name]


def _plain(name: str) -> Codec:
    """Return a codec without a profile. Raises KeyError and ParameterError."""
    codec = PLAIN[name]()
    if not isinstance(codec, Codec) or codec.name != name or codec.label != name:
        PLAIN.refuse(name, f"a class of codecs whose name and label are {shown(name)}", repr(codec))
    return codec


def is_profile_of(profile: Profile, choice: CodecChoice) -> bool:
    """Return whether a profile was fitted for the stages of a codec. Its levels may differ."""
    config = choice.config
    return config is not None and (profile.config.transform, profile.config.quantiser) == (
        config.transform,
        config.quantiser,
    )


def codec_of(profile: Profile, label: str = "", level: str | None = None) -> Codec:
    """Return a codec that reads every level of a profile, and writes one, by default the first."""
    if isinstance(profile.transform, FittedBands):
        return PackedCodec(profile)
    if isinstance(profile.config.quantiser, Exact):
        return LosslessCodec(profile)
    return PipelineCodec(profile, label, profile.levels[0].name if level is None else level)
