from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load, save

from kvrag.codec.bands import Bands
from kvrag.codec.config import LayerGroups, PipelineConfig, Rans, RateDistortion, choose_codec
from kvrag.codec.fitting import fit_profile
from kvrag.codec.pca import PCA
from kvrag.codec.profile import Profile, profile_hash
from kvrag.codec.registry import codec_of, get_codec
from kvrag.codec.tables import (
    Exact,
    PerChannel,
    Uniform,
)
from kvrag.codec.transforms import NoTransform
from kvrag.errors import ParameterError, ProfileError
from kvrag.kvcache import ChunkKV, KVSpec
from kvrag_testing.codec_contract import KEY, decode, random_kv
from tests.support.codecs import FINGERPRINT, fit, smooth_kv

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float32)
CONFIG = PipelineConfig(PCA(), RateDistortion((3.0, 1.0)), Uniform(refinements=1), Rans(8))

CONFIGS = [
    CONFIG,
    PipelineConfig(
        PCA(group_layers=1, joint=False, normalise=True), RateDistortion((2.0,)), Uniform()
    ),
    PipelineConfig(NoTransform(), LayerGroups((0.5, 2.0), (1.0,)), PerChannel(0.2)),
    PipelineConfig(NoTransform(), LayerGroups((1.0,), (1.0,)), Exact()),
    PipelineConfig(Bands(), LayerGroups((1.0,), (1.0,)), Uniform(0.0)),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.transform.name}-{c.quantiser.name}")
def test_a_configuration_and_its_profile_survive_being_written(config: PipelineConfig) -> None:
    assert PipelineConfig.from_json(config.to_json()) == config
    profile = fit(config, SPEC)
    again = Profile.from_bytes(profile.content, profile.hash)
    assert again.content == profile.content
    assert again.hash == profile.hash
    assert again.config == config
    assert [level.name for level in again.levels] == list(config.allocation.level_names())
    assert profile.num_tokens == 12 * 40


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ('{"transform": {}}', "must have the stages"),
        (CONFIG.to_json().replace('"pca"', '"dct"'), "no transform 'dct'; known: companded_bands"),
        (CONFIG.to_json().replace('"pca"', '"anchor_delta"'), "'anchor_delta' left kvrag with 0.3"),
        (CONFIG.to_json().replace('"joint"', '"join"'), "'pca' has no parameter 'join'"),
        (CONFIG.to_json().replace('"joint": true', '"joint": 3'), "joint must be a bool, found 3"),
        (
            CONFIG.to_json().replace('"group_layers": 0', '"group_layers": -1'),
            "at least 0, found -1",
        ),
        (CONFIG.to_json().replace("[3.0, 1.0]", "[3.0, 99]"), "0.05 to 12"),
        (CONFIG.to_json().replace("[3.0, 1.0]", "[1.0, 1.0]"), "appears twice"),
        (CONFIG.to_json().replace('"classes": 8', '"classes": 0'), "classes must be 1 to 1024"),
        (CONFIG.to_json().replace('"refinements": 1', '"refinements": 9'), "0 to 4, found 9"),
        (CONFIG.to_json().replace('"rate_weight": 0.1', '"rate_weight": 2.0'), "0 to 1, found 2"),
    ],
)
def test_bad_configurations(text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        PipelineConfig.from_json(text)


def test_one_chunk_will_do_but_not_a_handful_of_tokens() -> None:
    assert fit_profile(CONFIG, SPEC, FINGERPRINT, [smooth_kv(SPEC, 256)]).num_tokens == 256
    with pytest.raises(ParameterError, match=r"256 tokens or more.*found 255"):
        fit_profile(CONFIG, SPEC, FINGERPRINT, [smooth_kv(SPEC, 255)])
    with pytest.raises(ParameterError, match="found 0"):
        fit_profile(CONFIG, SPEC, FINGERPRINT, [])


@pytest.mark.parametrize("value", [0.0, 2.5])
def test_kv_in_which_nothing_varies(value: float) -> None:
    shape = (SPEC.num_layers, SPEC.num_kv_heads, 300, SPEC.head_dim)
    constant = ChunkKV(torch.full(shape, value), torch.full(shape, value))
    for config in CONFIGS:
        profile = fit_profile(config, SPEC, FINGERPRINT, [constant])
        codec = codec_of(profile)
        found = decode(codec, KEY, codec.encode(KEY, constant), SPEC)
        assert torch.allclose(found.keys, constant.keys, atol=1e-3)


def test_chunks_all_of_whose_tokens_are_wild() -> None:
    wild = random_kv(SPEC, 40)
    wild.keys.mul_(1e20)
    for config in CONFIGS:
        profile = fit_profile(config, SPEC, FINGERPRINT, [wild, smooth_kv(SPEC, 300)])
        assert profile.num_tokens == 300


def test_a_model_too_wide_for_the_machine() -> None:
    with pytest.raises(ParameterError, match=r"GB.*codec cachegen"):
        PCA().fitter(KVSpec(4000, 64, 128, torch.bfloat16))


def test_memory_is_bounded_by_the_model_not_by_the_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrag.codec.fitting._MAX_KEPT_NUMBERS", smooth_kv(SPEC, 80).keys.numel())
    seen = 0

    def chunks() -> object:
        nonlocal seen
        for seed in range(200):
            seen += 1
            yield smooth_kv(SPEC, 40, seed)

    profile = fit_profile(CONFIG, SPEC, FINGERPRINT, chunks())  # type: ignore[arg-type]
    assert (seen, profile.num_tokens) == (200, 8000)


def damaged(content: bytes, change: object) -> bytes:
    """Return a profile's file with its tensors and metadata changed by a function."""
    tensors = load(content)
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["kvrag_profile"])
    change(tensors, metadata)  # type: ignore[operator]
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return save(tensors, metadata={"kvrag_profile": json.dumps(metadata)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, m: t.pop("mean.0"), "lacks 'mean.0'"),
        (lambda t, m: t.update({"mean.0": t["mean.0"][:5]}), "expected torch.float32"),
        (lambda t, m: t.update({"mean.0": t["mean.0"] / 0}), "NaN or infinity"),
        (lambda t, m: t.update({"basis.0": t["basis.0"].float()}), "expected torch.float16"),
        (lambda t, m: t["level.0.classes"].fill_(99), "names a class it lacks"),
        (lambda t, m: t["level.0.classes"].fill_(-1), "negative"),
        (lambda t, m: t["level.0.plane.0.frequencies"].add_(1), "do not match its classes"),
        (lambda t, m: t["level.0.plane.1.num_rows"].fill_(9999), "do not match its matrices"),
        (lambda t, m: t["level.0.steps.0.0"].mul_(-1), "does not fit its rows"),
        (lambda t, m: t.update({"level.0.steps.0.0": torch.ones(999)}), "does not fit its rows"),
        (lambda t, m: m.update(version=7), "of version 1, found 7"),
        (lambda t, m: m.update(levels=[]), "no level"),
        (lambda t, m: m.update(num_layers=50), "expected torch.float32"),
        (lambda t, m: m.update(num_layers=20_000_000), "'num_layers' is 20000000"),
        (lambda t, m: m["levels"][0].update(relative_error=10**400), "too large|inf"),
        (lambda t, m: m["config"].update(quantiser={"name": "exact"}), "not lossless"),
        (
            lambda t, m: t.update(
                {"level.0.plane.0.frequencies": torch.full((20000, 256), 16, dtype=torch.int16)}
            ),
            "more than 16384 tables",
        ),
        (lambda t, m: m.pop("config"), "config"),
    ],
)
def test_damaged_profiles(change: object, message: str) -> None:
    content = fit(CONFIG, SPEC).content
    with pytest.raises(ProfileError, match=message):
        Profile.from_bytes(damaged(content, change))


def test_a_profile_has_no_more_channels_than_its_tensors() -> None:
    content = fit(CONFIGS[-1], SPEC).content
    primes = {"num_kv_heads": 65_521, "head_dim": 65_519}  # their product has few divisors
    with pytest.raises(ProfileError, match=r"mean\.0"):
        Profile.from_bytes(damaged(content, lambda t, m: m.update(primes)))


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\xff" * 8, b"\x02" + b"\0" * 7 + b"{}"])
def test_foreign_files(content: bytes) -> None:
    with pytest.raises(ProfileError, match="not a codec profile"):
        Profile.from_bytes(content)


def test_a_profile_is_known_by_its_hash() -> None:
    content = fit(CONFIG, SPEC).content
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    with pytest.raises(ProfileError, match=f"has hash {profile_hash(flipped)}"):
        Profile.from_bytes(flipped, profile_hash(content))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zip", "no codec 'zip'; known codecs: raw, raw-heads, lossless"),
        ("raw:1", "no codec 'raw:1'"),
        ("", "no codec ''"),
        ("cachegen:5", "'cachegen' has no level '5'; it has 1, 2, 3, 4"),
        ("lossless:2", "no level '2'"),
        ("transform:much", "a number of bits"),
        ("transform:nan", "0.05 to 12"),
    ],
)
def test_names_of_no_codec(name: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        choose_codec(name)


def test_a_codec_needs_a_profile_with_its_level() -> None:
    with pytest.raises(ParameterError, match="needs a profile"):
        get_codec("transform:1")
    config = dataclasses.replace(choose_codec("transform:3").config, coder=Rans(8))
    with pytest.raises(ParameterError, match=r"no level '2'; it has 3"):
        get_codec("transform:2", fit(config, SPEC))
    with pytest.raises(ParameterError, match="was fitted for transform"):
        get_codec("cachegen:2", fit(config, SPEC))
