"""Lossless compression: exponents are entropy-coded, signs and mantissas are stored as they are.

The exponents of a channel are close together, so they take two to three bits instead of eight
(five in float16). Signs and mantissas are practically random and are not coded.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvrag.chunk import ChunkKey
from kvrag.codec.base import OpenedRecord, check_layer_index
from kvrag.codec.block import MATRIX, BlockReader, pack_streams
from kvrag.codec.container import RecordReader
from kvrag.codec.level import LevelCoder, ProfiledCodec
from kvrag.codec.profile import Profile
from kvrag.codec.tables import to_symbols
from kvrag.kvcache import ChunkKV, KVSpec

NAME = "lossless"
# dtype: signed integer of its width, bits of the exponent, bits of the mantissa
_LAYOUTS = {
    torch.float32: (torch.int32, 8, 23),
    torch.bfloat16: (torch.int16, 8, 7),
    torch.float16: (torch.int16, 5, 10),
}


class LosslessCodec(ProfiledCodec):
    """Compresses KV without loss: what is read equals the model's output, bit for bit.

    Parameters
    ----------
    profile
        A profile fitted with the quantiser `Exact`.
    """

    name = label = NAME

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self._coder = LevelCoder(profile, profile.levels[0])

    def encode(self, key: ChunkKey, kv: ChunkKV) -> bytes:
        spec = self.check_fitted(kv)
        blocks = []
        for block, plan in enumerate(self.profile.transform.plans):
            exponents, rest = split(plan.stack(kv.keys, kv.values))
            values = exponents - _centres(self._coder, block)[:, None]
            classes = self._coder.classes(block)
            frequencies = self._coder.level.planes[0].frequencies
            symbols, escaped = to_symbols(values, frequencies, classes)
            streams = pack_streams(self._coder.models[0], symbols, classes)
            head = MATRIX.pack(len(escaped), len(streams))
            packed = _pack_rest(rest, rest_bits(spec.dtype))
            blocks.append([head, escaped.tobytes(), streams, packed])
        return self.write(key, kv, blocks)

    def open_record(self, reader: RecordReader, spec: KVSpec) -> LosslessChunk:
        self.require(reader, spec)
        reader.require_blocks(spec.num_layers)
        return LosslessChunk(reader, self._coder)


class LosslessChunk(OpenedRecord):
    """An opened record of the lossless codec (an `EncodedChunk`)."""

    def __init__(self, reader: RecordReader, coder: LevelCoder) -> None:
        super().__init__(reader)
        self._coder = coder

    def read_layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self._reader.header.spec
        check_layer_index(layer_index, spec.num_layers)
        with torch.inference_mode(False), torch.no_grad():
            channels = self._channels(layer_index)
            shape = (2, spec.num_kv_heads, spec.head_dim, self.num_tokens)
            keys, values = channels.view(shape).transpose(2, 3).contiguous()
        return keys, values

    def _channels(self, layer_index: int) -> torch.Tensor:
        dtype = self._reader.header.spec.dtype
        fields = BlockReader(self._reader, layer_index)
        num_escaped, num_bytes = fields.unpack(MATRIX)
        classes = self._coder.classes(layer_index)
        numbers = fields.values(
            self._coder.models[0], classes, self.num_tokens, num_escaped, num_bytes
        )
        values = torch.from_numpy(numbers).int()
        exponents = values + _centres(self._coder, layer_index)[:, None]
        if not bool(((exponents >= 0) & (exponents < greatest_exponent(dtype))).all()):
            fields.refuse("exponents", "those of finite numbers", "others")
        rest = _unpack_rest(fields, tuple(exponents.shape), rest_bits(dtype))
        fields.end()
        return join(exponents, rest, dtype)


def _centres(coder: LevelCoder, block: int) -> torch.Tensor:
    """Return int32 ``[R]``: the exponent field of a typical number in each row."""
    steps = coder.level.steps[block]
    return split(steps.to(coder.profile.spec.dtype))[0]


def _pack_rest(rest: torch.Tensor, num_bits: int) -> bytes:
    """Return signs and mantissas as planes: one for each whole byte, then one of packed bits."""
    planes = []
    numbers: NDArray[np.int32] = rest.numpy()
    for shift in range(0, num_bits - num_bits % 8, 8):
        planes.append((numbers >> shift & 255).astype(np.uint8).tobytes())
    if num_bits % 8:
        top = numbers.flatten() >> (num_bits - num_bits % 8)
        bits = top[:, None] >> np.arange(num_bits % 8) & 1
        planes.append(np.packbits(bits.astype(np.uint8)).tobytes())
    return b"".join(planes)


def _unpack_rest(fields: BlockReader, shape: tuple[int, ...], num_bits: int) -> torch.Tensor:
    count = shape[0] * shape[1]
    numbers = np.zeros(count, dtype=np.int32)
    for shift in range(0, num_bits - num_bits % 8, 8):
        numbers |= fields.array("u1", count).astype(np.int32) << shift
    if num_bits % 8:
        packed = fields.array("u1", -(-count * (num_bits % 8) // 8))
        bits = np.unpackbits(packed)[: count * (num_bits % 8)].reshape(count, -1).astype(np.int32)
        numbers |= (bits << np.arange(num_bits % 8)).sum(axis=1) << (num_bits - num_bits % 8)
    return torch.from_numpy(numbers).view(shape)


def split(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exponent fields int32, and sign and mantissa int32 (sign above the mantissa)."""
    integer, exponent_bits, mantissa_bits = _LAYOUTS[numbers.dtype]
    bits = numbers.view(integer).int()
    exponents = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    sign = (bits >> (exponent_bits + mantissa_bits)) & 1
    return exponents, sign << mantissa_bits | bits & ((1 << mantissa_bits) - 1)


def join(exponents: torch.Tensor, rest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that `split` was given."""
    integer, exponent_bits, mantissa_bits = _LAYOUTS[dtype]
    sign = rest >> mantissa_bits
    mantissa = rest & ((1 << mantissa_bits) - 1)
    bits = sign << (exponent_bits + mantissa_bits) | exponents << mantissa_bits | mantissa
    return bits.to(integer).view(dtype)


def greatest_exponent(dtype: torch.dtype) -> int:
    """Return the exponent field that only NaN and infinity have."""
    return (1 << _LAYOUTS[dtype][1]) - 1


def rest_bits(dtype: torch.dtype) -> int:
    """Return the bits of sign and mantissa."""
    return 1 + _LAYOUTS[dtype][2]
