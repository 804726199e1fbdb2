from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch

from kvrag.codec.bands import Bands
from kvrag.codec.base import Codec, Destination
from kvrag.codec.config import LayerGroups, PipelineConfig, RateDistortion, choose_codec
from kvrag.codec.packed import PackedCodec
from kvrag.codec.pca import PCA
from kvrag.codec.pipeline import PipelineCodec
from kvrag.codec.profile import Profile
from kvrag.codec.tables import Exact, PerChannel, Uniform
from kvrag.codec.transforms import NoTransform
from kvrag.errors import ParameterError, RecordError
from kvrag.kvcache import ChunkKV, KVSpec
from kvrag.positions.rotary import RotaryTable
from kvrag_bench.codec.cutting import cut_record
from kvrag_testing.codec_contract import KEY, BytesSource, CodecContract, decode
from tests.support.codecs import FittingCodec, fit, smooth_kv

SPEC = KVSpec(num_layers=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
TRANSFORM = PipelineConfig(PCA(group_layers=2), RateDistortion((4.0, 1.0)), Uniform(refinements=2))
CACHEGEN = PipelineConfig(NoTransform(), LayerGroups(), PerChannel(0.0))
PACKED = PipelineConfig(Bands(6.0, 24), LayerGroups((1.0,), (1.0,)), Uniform(0.0))
CONFIGS = {
    "transform": (dataclasses.replace(TRANSFORM, transform=PCA(group_layers=1)), "4"),
    "apart": (
        PipelineConfig(PCA(joint=False, normalise=True), RateDistortion((3.0,)), Uniform(0.0)),
        "3",
    ),
    "cachegen": (CACHEGEN, "1"),
    "packed": (PACKED, "1"),
}


LOSSLESS = PipelineConfig(NoTransform(), LayerGroups((1.0,), (1.0,)), Exact())


@functools.cache
def fitting_codec(name: str) -> FittingCodec:
    return FittingCodec(LOSSLESS, "1") if name == "lossless" else FittingCodec(*CONFIGS[name])


class TestLossless(CodecContract):
    @pytest.fixture
    def codec(self) -> Codec:
        return fitting_codec("lossless")


@pytest.mark.parametrize("name", CONFIGS)
class TestPipeline(CodecContract):
    @pytest.fixture
    def codec(self, name: str) -> Codec:
        # In `packed`, components that hardly vary in the sample cannot vary much elsewhere.
        self.most = 0.5 if name == "packed" else 0.3
        return fitting_codec(name)

    def assert_close(self, decoded: ChunkKV, original: ChunkKV) -> None:
        for found, true in ((decoded.keys, original.keys), (decoded.values, original.values)):
            assert found.shape == true.shape
            assert found.dtype == true.dtype
            # The contract's KV is white noise the codec was not fitted to: tokens it cannot
            # describe are kept raw, the others lie within what their level allows.
            error = (found.double() - true.double()).square().sum()
            assert error <= self.most * true.double().square().sum()

    def test_a_damaged_layer_spares_the_others(self, codec: Codec, name: str) -> None:
        if name == "apart":
            pytest.skip("all its layers are in one block")
        spec = KVSpec(4, 2, 8, torch.float32)
        record = bytearray(codec.encode(KEY, smooth_kv(spec, 40)))
        record[-1] ^= 1
        chunk = codec.open(KEY, BytesSource(bytes(record)), spec)
        chunk.read_layer(0)
        with pytest.raises(RecordError, match="checksum"):
            chunk.read_layer(3)


def errors(found: ChunkKV, true: ChunkKV) -> float:
    pairs = ((found.keys, true.keys), (found.values, true.values))
    return float(sum((a - b).square().sum() for a, b in pairs))


@pytest.fixture(scope="module")
def profile() -> Profile:
    return fit(TRANSFORM, SPEC)


@pytest.fixture(scope="module")
def codec(profile: Profile) -> PipelineCodec:
    return PipelineCodec(profile, "transform:4", "4")


def test_smooth_kv_takes_the_bits_asked_for(profile: Profile) -> None:
    kv = smooth_kv(SPEC, 400, seed=7)
    for name, bits in (("4", 4.0), ("1", 1.0)):
        codec = PipelineCodec(profile, "", name)
        record = codec.encode(KEY, kv)
        measured = 8 * len(record) / (2 * kv.keys.numel())
        # 2 planes of 3 streams of 128 bytes, header and padding weigh something at this size.
        assert bits * 0.85 < measured < bits * 1.1 + 0.35
        level = profile.levels[profile.level_index(name)]
        assert level.bits == pytest.approx(bits, rel=0.1)


def test_every_plane_brings_the_kv_nearer(codec: PipelineCodec) -> None:
    kv = smooth_kv(SPEC, 100, seed=5)
    record = codec.encode(KEY, kv)
    num_blocks = len(codec.profile.transform.plans)
    found, sizes = [], []
    for num_planes in (1, 2, 3):
        cut = cut_record(record, num_planes, num_blocks)
        sizes.append(len(cut))
        found.append(errors(decode(codec, KEY, cut, SPEC), kv))
    assert cut == record
    assert sizes[0] < sizes[1] < sizes[2]
    # Each plane makes the step a third, hence the squared error about a ninth.
    assert found[0] > 4 * found[1] > 16 * found[2]
    for num_planes in (0, 4):
        with pytest.raises(ParameterError, match="planes"):
            cut_record(record, num_planes, num_blocks)


def test_another_profile_is_refused(codec: PipelineCodec) -> None:
    other = PipelineCodec(fit(TRANSFORM, SPEC, num_chunks=8), "", "4")
    record = other.encode(KEY, smooth_kv(SPEC, 20))
    with pytest.raises(RecordError, match=f"profile: expected {codec.profile.hash}, found"):
        codec.open(KEY, BytesSource(record), SPEC)


def test_another_model_is_refused_at_encoding(codec: PipelineCodec) -> None:
    with pytest.raises(ParameterError, match="was fitted to KV of"):
        codec.encode(KEY, smooth_kv(dataclasses.replace(SPEC, num_layers=3), 20))


@pytest.mark.parametrize(
    ("dtype", "num_rotated"), [(torch.float32, 16), (torch.bfloat16, 8), (torch.float16, 16)]
)
@pytest.mark.parametrize(
    ("name", "in_pairs"), [*((name, False) for name in CONFIGS), ("packed", True), ("apart", True)]
)
def test_placing_equals_reading_and_rotating(
    name: str, in_pairs: bool, dtype: torch.dtype, num_rotated: int
) -> None:
    spec = dataclasses.replace(SPEC, dtype=dtype)
    codec = fitting_codec(name)
    kv = smooth_kv(spec, 70, seed=3)
    kv.keys[:, :, 33] *= 20  # kept raw where a basis was fitted to other tokens
    chunk = codec.open(KEY, BytesSource(codec.encode(KEY, kv)), spec)
    angles = torch.randn(200, num_rotated // 2, generator=torch.Generator().manual_seed(0))
    cos, sin = (torch.cat([f(angles)] * 2, dim=1) for f in (torch.cos, torch.sin))
    table = RotaryTable(cos, sin, in_pairs=in_pairs)
    buffers = [torch.full((spec.num_kv_heads, 200, spec.head_dim), 7.0).to(dtype) for _ in "kv"]
    tokens, rows = slice(10, 61), slice(100, 151)
    for layer_index in range(spec.num_layers):
        into = Destination(buffers[0][:, rows], buffers[1][:, rows], tokens, table, rows)
        chunk.place_layer(layer_index, into)
        keys, values = chunk.read_layer(layer_index)
        expected = torch.empty_like(keys[:, tokens])
        table.place(keys[:, tokens], rows, expected)
        exact = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
        torch.testing.assert_close(into.keys, expected, rtol=exact, atol=10 * exact)
        torch.testing.assert_close(into.values, values[:, tokens], rtol=0, atol=0)
    for buffer in buffers:
        assert (buffer[:, :100] == 7).all()
        assert (buffer[:, 151:] == 7).all()


@pytest.mark.parametrize("name", ["transform:1", "packed"])
def test_tokens_like_no_other_are_kept_raw(name: str, profile: Profile) -> None:
    codec = fitting_codec(name) if name == "packed" else PipelineCodec(profile, name, "1")
    kv = smooth_kv(SPEC, 60, seed=4)
    kv.keys[:, :, 17] = 50 * torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0))
    kv.values[:, :, 59] = 1e30
    found = decode(codec, KEY, codec.encode(KEY, kv), SPEC)
    for token in (17, 59):
        assert torch.equal(found.keys[:, :, token], kv.keys[:, :, token])
        assert torch.equal(found.values[:, :, token], kv.values[:, :, token])
    rest = [token for token in range(60) if token not in (17, 59)]
    assert (found.keys[:, :, rest] - kv.keys[:, :, rest]).abs().max() < 1.0


@pytest.mark.parametrize(("heads", "size"), [(1, 262), (2, 179)])
def test_packed_is_small_where_only_a_large_prime_divides_the_channels(
    heads: int, size: int
) -> None:
    spec = KVSpec(1, heads, size, torch.bfloat16)
    profile = fit(choose_codec("packed").config, spec, num_chunks=80)
    kv, codec = smooth_kv(spec, 33, seed=3), PackedCodec(profile)
    record = codec.encode(KEY, kv)
    assert len(record) < kv.size_bytes / 3
    assert errors(decode(codec, KEY, record, spec), kv) < 0.002 * float(kv.keys.square().sum())


def test_a_fit_whose_errors_are_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = np.full(40, np.inf)
    monkeypatch.setattr("kvrag.codec.bands.FittedBands.pack", lambda *_: lost)
    with pytest.raises(ParameterError, match="far larger than the KV it was fitted"):
        fit(choose_codec("packed").config, SPEC)
