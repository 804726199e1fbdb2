"""Codecs of other distributions, and records that are opened by the name in their header."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvrag.codec.base import Codec
from kvrag.codec.config import choose_codec
from kvrag.codec.names import expected_bytes_per_token, parse_codec
from kvrag.codec.profile import Profile
from kvrag.codec.raw import RawCodec
from kvrag.codec.registry import RecordOpener, get_codec
from kvrag.errors import ParameterError, ProfileError, RecordError
from kvrag_testing.codec_contract import KEY, BytesSource, random_kv, same_bits, spec_of
from tests.support.distributions import installed

MIRROR = """
from kvrag.codec.raw import RawCodec


class MirrorCodec(RawCodec):
    name = label = "mirror"
"""
POINTS = {"kvrag.codecs: mirror": "mirror_codec:MirrorCodec"}


def no_profile(profile_hash: str) -> Profile:
    raise ProfileError(f"no profile {profile_hash}")


@pytest.fixture
def mirror(tmp_path: Path) -> Codec:
    with installed(tmp_path / "site", "mirror_codec", MIRROR, POINTS):
        yield get_codec("mirror")


def test_it_is_named_as_kvrags_own_are(mirror: Codec) -> None:
    assert type(mirror).__name__ == "MirrorCodec"
    assert parse_codec("mirror").label == choose_codec("mirror").label == "mirror"
    assert not parse_codec("mirror").takes_profile
    assert expected_bytes_per_token("mirror", 1024, 2) == 1024
    with pytest.raises(
        ParameterError, match="no codec 'mirror:2'; known codecs: raw, raw-heads, mirror, "
    ):
        parse_codec("mirror:2")


def test_records_without_a_profile_are_opened_by_their_codecs_name(mirror: Codec) -> None:
    kv = random_kv(spec_of(), 9)
    opener = RecordOpener(no_profile, "any model")
    for codec in (mirror, RawCodec(), mirror):
        chunk = opener.open(KEY, BytesSource(codec.encode(KEY, kv)), spec_of())
        keys, values = chunk.read_layer(1)
        assert same_bits(keys, kv.keys[1])
        assert same_bits(values, kv.values[1])
    with pytest.raises(RecordError, match="codec: expected 'raw', found 'mirror'"):
        RawCodec().open(KEY, BytesSource(mirror.encode(KEY, kv)), spec_of())


def test_a_record_whose_codec_is_not_installed(tmp_path: Path) -> None:
    with installed(tmp_path, "mirror_codec", MIRROR, POINTS):
        record = get_codec("mirror").encode(KEY, random_kv(spec_of(), 2))
    expected = "codec without a profile: expected one of raw, raw-heads, found 'mirror'; install"
    with pytest.raises(RecordError, match=expected):
        RecordOpener(no_profile, "").open(KEY, BytesSource(record), spec_of())
    with pytest.raises(
        ParameterError, match="no codec 'mirror'; known codecs: raw, raw-heads, lossless"
    ):
        get_codec("mirror")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("import no_such_library", "ModuleNotFoundError: .*no_such_library"),
        ("class MirrorCodec: pass", "a class of codecs whose name and label are 'mirror'"),
        (MIRROR.replace('"mirror"', '"other"'), "a class of codecs whose name and label are 'mir"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, module: str, message: str) -> None:
    with installed(tmp_path / "good", "mirror_codec", MIRROR, POINTS):
        record = get_codec("mirror").encode(KEY, random_kv(spec_of(), 2))
    place = "entry point 'kvrag.codecs: mirror = mirror_codec:MirrorCodec' of mirror_codec 1.5"
    with installed(tmp_path / "bad", "mirror_codec", module, POINTS):
        with pytest.raises(ParameterError, match=f"{place}: expected .*{message}"):
            get_codec("mirror")
        with pytest.raises(RecordError, match=re.escape(place)):  # a miss, not the end of a prompt
            RecordOpener(no_profile, "").open(KEY, BytesSource(record), spec_of())
