"""Codecs that fit themselves to any shape of a test, and KV that can be compressed."""

import dataclasses

import torch

from kvrag.chunk import ChunkKey
from kvrag.codec.bands import Bands
from kvrag.codec.base import Codec, EncodedChunk, check_kv
from kvrag.codec.config import PipelineConfig
from kvrag.codec.container import ByteSource, RecordReader
from kvrag.codec.fitting import fit_profile
from kvrag.codec.lossless import LosslessCodec
from kvrag.codec.packed import PackedCodec
from kvrag.codec.pipeline import PipelineCodec
from kvrag.codec.profile import Profile
from kvrag.codec.tables import Exact
from kvrag.kvcache import DTYPES, ChunkKV, KVSpec

FINGERPRINT = "0123456789abcdef" * 2 + "01234567"


def smooth_kv(spec: KVSpec, num_tokens: int, seed: int = 0, rank: int = 12) -> ChunkKV:
    """Return KV whose channels mix `rank` numbers for each token, plus a little noise."""
    mixing = torch.Generator().manual_seed(1234)
    generator = torch.Generator().manual_seed(seed)
    shape = (2, spec.num_layers, spec.num_kv_heads, spec.head_dim)
    mix = torch.randn((rank, *shape), generator=mixing)
    mean = 3 * torch.randn(shape, generator=mixing)
    hidden = torch.randn(num_tokens, rank, generator=generator)
    noise = torch.randn((num_tokens, *shape), generator=generator)
    both = torch.einsum("tr,r...->t...", hidden, mix) + mean + 0.02 * noise
    keys, values = both.permute(1, 2, 3, 0, 4).to(spec.dtype).contiguous()
    return ChunkKV(keys, values)


def fit(config: PipelineConfig, spec: KVSpec, num_chunks: int = 12, tokens: int = 40) -> Profile:
    """Fit a configuration to smooth KV."""
    chunks = [smooth_kv(spec, tokens, seed=100 + number) for number in range(num_chunks)]
    return fit_profile(config, spec, FINGERPRINT, chunks)


class FittingCodec:
    """A codec for any shape; it fits a profile when it first meets a shape."""

    def __init__(self, config: PipelineConfig, level: str) -> None:
        self._config = config
        self._level = level
        self._codecs: dict[KVSpec, Codec] = {}
        self.name = self.label = "fitting"

    def of(self, spec: KVSpec) -> Codec:
        if spec.dtype not in DTYPES.values():  # no profile can have such a type
            spec = dataclasses.replace(spec, dtype=torch.float32)
        if spec not in self._codecs:
            profile = fit(self._config, spec)
            if isinstance(self._config.transform, Bands):
                self._codecs[spec] = PackedCodec(profile)
            elif isinstance(self._config.quantiser, Exact):
                self._codecs[spec] = LosslessCodec(profile)
            else:
                self._codecs[spec] = PipelineCodec(profile, "fitting", self._level)
        return self._codecs[spec]

    def encode(self, key: ChunkKey, kv: ChunkKV) -> bytes:
        return self.of(check_kv(kv)).encode(key, kv)

    def open(self, key: ChunkKey, source: ByteSource, spec: KVSpec) -> EncodedChunk:
        return self.of(spec).open(key, source, spec)

    def open_record(self, reader: RecordReader, spec: KVSpec) -> EncodedChunk:
        return self.of(spec).open_record(reader, spec)
