"""Golden records of the codecs that need a profile, read by docs/format.md alone, without kvrag."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load

from kvrag.codec.bands import Bands
from kvrag.codec.config import LayerGroups, PipelineConfig, Rans, RateDistortion
from kvrag.codec.pca import PCA
from kvrag.codec.profile import Profile
from kvrag.codec.registry import codec_of
from kvrag.codec.tables import Exact, Uniform
from kvrag.codec.transforms import NoTransform
from kvrag.errors import ProfileError
from kvrag.kvcache import KVSpec
from kvrag_testing.codec_contract import KEY, decode

GOLDEN = Path(__file__).parent / "golden"
SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.float32)
CONFIGS = {
    "transform": PipelineConfig(
        PCA(1), RateDistortion((2.0, 4.0)), Uniform(refinements=2), Rans(3)
    ),
    "lossless": PipelineConfig(NoTransform(), LayerGroups((1.0,), (1.0,)), Exact(), Rans(3)),
    "packed": PipelineConfig(Bands(4.2, 8), LayerGroups((1.0,), (1.0,)), Uniform(0.0), Rans(3)),
}
L, H, D, T = SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim, 37
N = 2 * H * D  # channels of a block: one layer, keys and values


def expected(name: str) -> dict[str, torch.Tensor]:
    arrays = load((GOLDEN / f"{name}-v2.decoded").read_bytes())
    return {kind: torch.from_numpy(array) for kind, array in arrays.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_golden_records(name: str) -> None:
    profile = Profile.from_bytes((GOLDEN / f"{name}-v2.profile").read_bytes())
    assert profile.config == CONFIGS[name]
    record = (GOLDEN / f"{name}-v2.kv").read_bytes()
    found = decode(codec_of(profile), KEY, record, SPEC)
    exact = 0.0 if name == "lossless" else 1e-4
    for kind, true in expected(name).items():
        torch.testing.assert_close(getattr(found, kind), true, rtol=exact, atol=exact)


class Reader:
    """The fields of a block, one after the other."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def take(self, kind: str, count: int) -> NDArray[Any]:
        size = np.dtype(kind).itemsize * count
        found = np.frombuffer(self.content[:size], kind)
        assert len(found) == count
        self.content = self.content[size:]
        return found


def read_streams(
    payload: bytes,
    shape: tuple[int, int],
    tables: NDArray[np.int64],
    classes: NDArray[np.int64],
    context: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Decode 32-lane rANS in plain Python."""
    num_rows, num_columns = shape
    out = np.zeros(shape, dtype=np.int64)
    if not out.size:
        assert payload == b""
        return out
    reader = Reader(payload)
    (num_streams,) = reader.take("<u4", 1)
    for number, size in enumerate(reader.take("<u4", num_streams)):
        stream = Reader(bytes(reader.take("u1", size)))
        states = [int(state) for state in stream.take("<u4", 32)]
        words = iter(stream.take("<u2", len(stream.content) // 2).tolist())
        first, last = (n * num_rows // int(num_streams) for n in (number, number + 1))
        for row in range(first, last):
            for start in range(0, num_columns, 32):
                columns = range(start, min(start + 32, num_columns))
                for column in columns:
                    lane = column % 32
                    one = int(classes[row]) + (0 if context is None else int(context[row, column]))
                    ends = np.cumsum(tables[one])
                    slot = states[lane] % 4096
                    symbol = int(np.searchsorted(ends, slot, side="right"))
                    begin = int(ends[symbol] - tables[one][symbol])
                    states[lane] = int(tables[one][symbol]) * (states[lane] >> 12) + slot - begin
                    out[row, column] = symbol
                for column in columns:
                    if states[column % 32] < 65536:
                        states[column % 32] = states[column % 32] << 16 | next(words)
        assert states == [65536] * 32
        assert next(words, None) is None
    assert reader.content == b""
    return out


def read_numbers(reader: Reader, num_escaped: int, size: int, *layout: Any) -> NDArray[np.int64]:
    escaped = reader.take("<i2", num_escaped)
    symbols = read_streams(bytes(reader.take("u1", size)), *layout)
    numbers = symbols - 128
    numbers[symbols == 0] = escaped
    return numbers


class Record:
    """A golden record and its profile, taken apart."""

    def __init__(self, name: str) -> None:
        profile = (GOLDEN / f"{name}-v2.profile").read_bytes()
        (length,) = struct.unpack("<Q", profile[:8])
        metadata = json.loads(profile[8 : 8 + length])["__metadata__"]["kvrag_profile"]
        self.metadata = json.loads(metadata)
        self.tensors = load(profile)
        record = (GOLDEN / f"{name}-v2.kv").read_bytes()
        self.level, num_blocks, zero, profile_hash = struct.unpack("<3I20s", record[80:112])
        assert zero == 0
        assert profile_hash == hashlib.blake2b(profile, digest_size=20).digest()
        index = [struct.unpack_from("<QQQ", record, 112 + 24 * b) for b in range(num_blocks)]
        self.blocks = [record[offset : offset + size] for offset, size, _ in index]
        self.classes = self.of_level("classes").astype(np.int64)

    def of_level(self, name: str) -> NDArray[Any]:
        return self.tensors[f"level.{self.level}.{name}"]

    def tables(self, plane: int) -> NDArray[np.int64]:
        return self.of_level(f"plane.{plane}.frequencies").astype(np.int64)


def kv_of_channels(channels: NDArray[Any]) -> dict[str, torch.Tensor]:
    """Return keys and values ``[H, T, D]`` of one layer's channels ``[N, T]``."""
    both = torch.from_numpy(channels.astype(np.float32)).view(2, H, D, T).transpose(2, 3)
    return {"keys": both[0], "values": both[1]}


def test_the_documented_layout_of_transform() -> None:
    record = Record("transform")
    assert len(record.blocks) == 3 * L
    num_rows = [record.of_level(f"plane.{plane}.num_rows") for plane in range(3)]
    first_class = 0
    for layer in range(L):
        steps = record.of_level(f"steps.{layer}.0")
        classes = record.classes[first_class : first_class + len(steps)]
        first_class += len(steps)
        reader = Reader(record.blocks[layer])
        (num_raw,) = reader.take("<u4", 1)
        num_escaped, size = reader.take("<u4", 2)
        raw_tokens = reader.take("<u4", num_raw)
        raw = reader.take("<f4", num_raw * N).reshape(num_raw, N)
        rows = int(num_rows[0][layer])
        numbers = np.zeros((len(steps), T), dtype=np.int64)
        numbers[:rows] = read_numbers(
            reader, num_escaped, size, (rows, T), record.tables(0), classes[:rows]
        )
        assert reader.content == b""
        for plane in (1, 2):
            reader = Reader(record.blocks[plane * L + layer])
            (size,) = reader.take("<u4", 1)
            rows = int(num_rows[plane][layer])
            known = numbers[:rows]
            streams = bytes(reader.take("u1", size))
            assert reader.content == b""
            context = np.minimum(np.abs(known), 2)
            symbols = read_streams(
                streams, (rows, T), record.tables(plane), 3 * classes[:rows], context
            )
            numbers[:rows] = 3 * known + np.where(known < 0, -1, 1) * (symbols - 128)
        shrink = record.of_level("plane.2.shrink")[classes][:, None]
        scaled = (numbers - np.sign(numbers) * shrink) * steps[:, None]
        basis = record.tensors[f"basis.{layer}"][: len(steps)].astype(np.float64)
        channels = (basis.T @ scaled) / record.tensors[f"weight.{layer}"][:, None]
        channels += record.tensors[f"mean.{layer}"][:, None]
        channels[:, raw_tokens.astype(np.int64)] = raw.T
        for kind, found in kv_of_channels(channels).items():
            true = expected("transform")[kind][layer]
            torch.testing.assert_close(found, true, rtol=1e-3, atol=1e-3)


def test_the_documented_layout_of_lossless() -> None:
    record = Record("lossless")
    for layer in range(L):
        reader = Reader(record.blocks[layer])
        num_escaped, size = reader.take("<u4", 2)
        classes = record.classes[layer * N : (layer + 1) * N]
        numbers = read_numbers(reader, num_escaped, size, (N, T), record.tables(0), classes)
        steps = record.of_level(f"steps.{layer}.0")
        exponents = numbers + (steps.view(np.int32) >> 23)[:, None]
        rest = sum(
            reader.take("u1", N * T).astype(np.int64).reshape(N, T) << shift for shift in (0, 8, 16)
        )
        assert reader.content == b""
        bits = (rest >> 23) << 31 | exponents << 23 | rest & 0x7FFFFF
        channels = bits.astype(np.uint32).view(np.float32)
        for kind, found in kv_of_channels(channels).items():
            assert torch.equal(found, expected("lossless")[kind][layer])


def test_the_documented_layout_of_packed() -> None:
    record = Record("packed")
    text = (GOLDEN.parents[2] / "docs/format.md").read_text("utf-8")
    documented: list[list[int]] = [[0]]
    for listed in re.findall(r"`([\d,]+)`[;.]", text.partition("1, 2, ... 6 bits")[2])[:6]:
        positive = [int(one) for one in listed.split(",")]
        documented.append([-one for one in reversed(positive)] + positive)
    assert [len(levels) for levels in documented] == [1, 2, 4, 8, 16, 32, 64]
    assert (record.level, len(record.blocks)) == (0, L)
    for layer in range(L):
        reader = Reader(record.blocks[layer])
        (num_raw,) = reader.take("<u4", 1)
        raw_tokens = reader.take("<u4", num_raw)
        raw = reader.take("<f4", num_raw * N).reshape(num_raw, N)
        names = [f"{2 * layer + kind}" for kind in range(2)]
        sizes = [1 + int(record.tensors[f"widths.{name}"].sum()) for name in names]
        rows = reader.take("u1", T * sum(sizes)).reshape(T, sum(sizes))
        assert reader.content == b""
        channels = []
        for name, part in zip(names, np.split(rows, sizes[:1], axis=1), strict=True):
            (basis,), (widths,) = (record.tensors[f"{what}.{name}"] for what in ("basis", "widths"))
            odd, at = np.zeros((T, len(basis))), 1
            for group, width in enumerate(widths.tolist()):
                for token in range(T):
                    word = int.from_bytes(part[token, at : at + width].tobytes(), "little")
                    for number in range(8):
                        found = word >> number * width & (1 << width) - 1
                        odd[token, 8 * group + number] = documented[width][found]
                at += width
            power = 2.0 ** ((part[:, :1].astype(np.float64) - 128) / 8)
            scaled = odd @ basis.astype(np.float64) * power * record.tensors[f"scale.{name}"]
            channels.append((scaled + record.tensors[f"mean.{name}"]).T)
        both = np.concatenate(channels)
        both[:, raw_tokens.astype(np.int64)] = raw.T
        for kind, found in kv_of_channels(both).items():
            true = expected("packed")[kind][layer]
            torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-4)


def test_a_profile_of_a_codec_that_left() -> None:
    with pytest.raises(ProfileError, match=r"'anchor_delta' left kvrag with 0.3: ingest the doc"):
        Profile.from_bytes((GOLDEN / "anchors-v2.profile").read_bytes())
