"""The contract of a codec. Subclass `CodecContract` and give it a codec."""

from __future__ import annotations

import threading

import torch

from kvrag.chunk import ChunkKey
from kvrag.codec.base import Codec, Destination
from kvrag.errors import ParameterError, RecordError
from kvrag.kvcache import ChunkKV, KVSpec
from kvrag.positions.rotary import RotaryTable
from kvrag_testing.needs import pytest

KEY = ChunkKey("0123456789" * 4)
OTHER_KEY = ChunkKey("9876543210" * 4)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class BytesSource:
    """A record in memory that remembers its largest read."""

    def __init__(self, record: bytes) -> None:
        self._record = record
        self.largest_read = 0

    @property
    def size_bytes(self) -> int:
        return len(self._record)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        assert 0 <= offset <= offset + buffer.nbytes <= len(self._record)
        self.largest_read = max(self.largest_read, buffer.nbytes)
        buffer[:] = self._record[offset : offset + buffer.nbytes]


def spec_of(dtype: torch.dtype = torch.float32, num_layers: int = 3) -> KVSpec:
    return KVSpec(num_layers=num_layers, num_kv_heads=2, head_dim=8, dtype=dtype)


def random_kv(spec: KVSpec, num_tokens: int, seed: int = 0) -> ChunkKV:
    generator = torch.Generator().manual_seed(seed)
    shape = (spec.num_layers, spec.num_kv_heads, num_tokens, spec.head_dim)
    keys, values = (torch.randn(shape, generator=generator).to(spec.dtype) for _ in range(2))
    return ChunkKV(keys, values)


def decode(codec: Codec, key: ChunkKey, record: bytes, spec: KVSpec) -> ChunkKV:
    chunk = codec.open(key, BytesSource(record), spec)
    assert chunk.size_bytes == len(record)
    layers = []
    for layer_index in range(spec.num_layers):
        keys, values = chunk.read_layer(layer_index)
        layers.append((keys.clone(), values.clone()))
    kv = ChunkKV(*(torch.stack(tensors) for tensors in zip(*layers, strict=True)))
    assert chunk.num_tokens == kv.num_tokens
    return kv


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether shape, type and every bit are equal (so that -0.0 differs from 0.0)."""
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and torch.equal(
            first.contiguous().flatten().view(torch.uint8),
            second.contiguous().flatten().view(torch.uint8),
        )
    )


class CodecContract:
    """Override `codec`; a lossy codec overrides `assert_close` too."""

    @pytest.fixture
    def codec(self) -> Codec:
        raise NotImplementedError

    def assert_close(self, decoded: ChunkKV, original: ChunkKV) -> None:
        assert same_bits(decoded.keys, original.keys)
        assert same_bits(decoded.values, original.values)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 513])
    def test_round_trip(self, codec: Codec, dtype: torch.dtype, num_tokens: int) -> None:
        spec = spec_of(dtype)
        kv = random_kv(spec, num_tokens)
        self.assert_close(decode(codec, KEY, codec.encode(KEY, kv), spec), kv)

    @pytest.mark.parametrize(
        "shape",
        [
            *((1, 1, 1), (40, 1, 2), (2, 4, 48), (3, 3, 5)),
            pytest.param((200, 1, 1), marks=pytest.mark.slow),
            pytest.param((2, 16, 96), marks=pytest.mark.slow),
        ],
        ids=str,
    )
    def test_shapes(self, codec: Codec, shape: tuple[int, int, int]) -> None:
        spec = KVSpec(*shape, torch.bfloat16)
        kv = random_kv(spec, 3)
        self.assert_close(decode(codec, KEY, codec.encode(KEY, kv), spec), kv)

    def test_encoding_is_a_function_of_the_kv(self, codec: Codec) -> None:
        spec = spec_of()
        assert codec.encode(KEY, random_kv(spec, 5)) == codec.encode(KEY, random_kv(spec, 5))

    def test_strided_tensors_and_tensors_with_gradients(self, codec: Codec) -> None:
        spec = spec_of()
        kv = random_kv(spec, 5)
        strided = ChunkKV(
            kv.keys.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_(),
            kv.values.repeat_interleave(2, dim=2)[:, :, ::2],
        )
        assert codec.encode(KEY, strided) == codec.encode(KEY, kv)

    def test_layers_in_any_order_and_again(self, codec: Codec) -> None:
        spec = spec_of(num_layers=4)
        kv = random_kv(spec, 6)
        record = codec.encode(KEY, kv)
        whole = decode(codec, KEY, record, spec)
        chunk = codec.open(KEY, BytesSource(record), spec)
        for layer_index in (3, 0, 2, 0, 1, 3):
            keys, values = chunk.read_layer(layer_index)
            assert same_bits(keys, whole.keys[layer_index])
            assert same_bits(values, whole.values[layer_index])

    def test_stretches_of_a_layer(self, codec: Codec) -> None:
        spec = spec_of()
        record = codec.encode(KEY, random_kv(spec, 300))
        whole = decode(codec, KEY, record, spec)
        chunk = codec.open(KEY, BytesSource(record), spec)
        unrotated = RotaryTable(torch.ones(400, 8), torch.zeros(400, 8))
        buffers = torch.full((2, spec.num_kv_heads, 400, spec.head_dim), 7.0)
        stretches = [(slice(299, 300), 0), (slice(0, 1), 7), (slice(33, 257), 100)]
        for layer_index in range(spec.num_layers):
            into = [
                Destination(buffers[0, :, rows], buffers[1, :, rows], tokens, unrotated, rows)
                for tokens, start in stretches
                for rows in [slice(start, start + tokens.stop - tokens.start)]
            ]
            chunk.place_layer(layer_index, *into)
            for one in into:
                torch.testing.assert_close(one.keys, whole.keys[layer_index][:, one.tokens])
                torch.testing.assert_close(one.values, whole.values[layer_index][:, one.tokens])
        assert (buffers[:, :, 8:100] == 7).all()

    @pytest.mark.parametrize("layer_index", [-1, 3, 10**9])
    def test_no_such_layer(self, codec: Codec, layer_index: int) -> None:
        spec = spec_of()
        chunk = codec.open(KEY, BytesSource(codec.encode(KEY, random_kv(spec, 2))), spec)
        with pytest.raises(ParameterError, match=f"0 to 2, found {layer_index}"):
            chunk.read_layer(layer_index)

    def test_threads_do_not_share_scratch(self, codec: Codec) -> None:
        spec = spec_of(num_layers=8)
        kv = random_kv(spec, 50)
        record = codec.encode(KEY, kv)
        whole = decode(codec, KEY, record, spec)
        chunk = codec.open(KEY, BytesSource(record), spec)
        both_have_read = threading.Barrier(2)
        failures: list[object] = []

        def work(layers: list[int]) -> None:
            try:
                for layer_index in layers:
                    keys, values = chunk.read_layer(layer_index)
                    both_have_read.wait(10)
                    if not (
                        same_bits(keys, whole.keys[layer_index])
                        and same_bits(values, whole.values[layer_index])
                    ):
                        failures.append(layer_index)
                    both_have_read.wait(10)
            except Exception as error:
                failures.append(error)

        threads = [
            threading.Thread(target=work, args=(layers,)) for layers in ([0, 1, 2], [5, 6, 7])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []

    def test_what_is_read_is_an_ordinary_tensor(self, codec: Codec) -> None:
        spec = spec_of()
        chunk = codec.open(KEY, BytesSource(codec.encode(KEY, random_kv(spec, 300))), spec)
        with torch.inference_mode():
            chunk.read_layer(0)
        keys, _ = chunk.read_layer(1)
        assert not keys.is_inference()
        assert not keys.requires_grad
        assert keys.device.type == "cpu"

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("which", ["keys", "values"])
    def test_not_a_number(
        self, codec: Codec, dtype: torch.dtype, poison: float, which: str
    ) -> None:
        kv = random_kv(spec_of(dtype), 9)
        getattr(kv, which)[1, 0, 4, 2] = poison
        with pytest.raises(ParameterError, match=f"{which} of layer 1, head 0, token 4"):
            codec.encode(KEY, kv)

    def test_extreme_but_finite_numbers(self, codec: Codec) -> None:
        for dtype in DTYPES:
            spec = spec_of(dtype)
            kv = random_kv(spec, 3)
            info = torch.finfo(dtype)
            extremes = [info.max, info.min, info.tiny, info.smallest_normal / 2, -0.0, 0.0]
            kv.keys[0, 0, 0, :6] = torch.tensor(extremes, dtype=torch.float64).to(dtype)
            self.assert_close(decode(codec, KEY, codec.encode(KEY, kv), spec), kv)

    def test_no_tokens(self, codec: Codec) -> None:
        with pytest.raises(ParameterError, match="at least one token"):
            codec.encode(KEY, random_kv(spec_of(), 0))

    def test_keys_and_values_that_differ(self, codec: Codec) -> None:
        kv = random_kv(spec_of(), 4)
        for values in (kv.values[:, :, :3], kv.values.half(), kv.values[0]):
            with pytest.raises(ParameterError, match="the same shape"):
                codec.encode(KEY, ChunkKV(kv.keys, values))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
    def test_other_types(self, codec: Codec, dtype: torch.dtype) -> None:
        kv = random_kv(spec_of(), 4)
        with pytest.raises(ParameterError, match=str(dtype)):
            codec.encode(KEY, ChunkKV(kv.keys.to(dtype), kv.values.to(dtype)))

    def test_another_key(self, codec: Codec) -> None:
        record = codec.encode(KEY, random_kv(spec_of(), 4))
        with pytest.raises(RecordError, match=f"{OTHER_KEY}.*key.*found {KEY}"):
            codec.open(OTHER_KEY, BytesSource(record), spec_of())

    @pytest.mark.parametrize(
        "spec",
        [
            KVSpec(2, 2, 8, torch.float32),
            KVSpec(3, 4, 8, torch.float32),
            KVSpec(3, 2, 16, torch.float32),
            KVSpec(3, 2, 8, torch.float16),
            KVSpec(3, 4, 4, torch.float32),
            KVSpec(3, 2, 16, torch.bfloat16),
        ],
        ids=str,
    )
    def test_another_shape(self, codec: Codec, spec: KVSpec) -> None:
        record = codec.encode(KEY, random_kv(spec_of(), 4))
        with pytest.raises(RecordError, match="shape of the KV"):
            codec.open(KEY, BytesSource(record), spec)

    def test_every_truncation(self, codec: Codec) -> None:
        spec = spec_of(num_layers=2)
        record = codec.encode(KEY, random_kv(spec, 2))
        for size in range(len(record)):
            with pytest.raises(RecordError, match=str(KEY)):
                decode(codec, KEY, record[:size], spec)

    def test_every_flipped_bit(self, codec: Codec) -> None:
        spec = spec_of(num_layers=1)
        record = bytearray(codec.encode(KEY, random_kv(spec, 1)))
        for position in range(8 * len(record)):
            byte, bit = divmod(position, 8)
            record[byte] ^= 1 << bit
            with pytest.raises(RecordError, match=str(KEY)):
                decode(codec, KEY, bytes(record), spec)
            record[byte] ^= 1 << bit

    def test_a_damaged_layer_spares_the_others(self, codec: Codec) -> None:
        spec = spec_of(num_layers=3)
        kv = random_kv(spec, 4)
        record = bytearray(codec.encode(KEY, kv))
        record[-1] ^= 1
        chunk = codec.open(KEY, BytesSource(bytes(record)), spec)
        chunk.read_layer(0)
        chunk.read_layer(1)
        with pytest.raises(RecordError, match=r"block \d+: checksum"):
            chunk.read_layer(2)

    @pytest.mark.parametrize(
        "foreign",
        [
            b"",
            b"\0" * 4096,
            b"PK\x03\x04" + b"x" * 4096,
            b"\x80\x04\x95" + b"." * 4096,
            b"<!doctype html>" * 100,
            (2**63).to_bytes(8, "little") + b'{"__metadata__":{}}' * 50,
        ],
        ids=["empty", "zeros", "zip", "pickle", "html", "safetensors"],
    )
    def test_foreign_bytes(self, codec: Codec, foreign: bytes) -> None:
        with pytest.raises(RecordError, match=str(KEY)):
            codec.open(KEY, BytesSource(foreign), spec_of())

    def test_reads_are_no_longer_than_the_record(self, codec: Codec) -> None:
        spec = spec_of()
        source = BytesSource(codec.encode(KEY, random_kv(spec, 1)))
        chunk = codec.open(KEY, source, spec)
        for layer_index in range(spec.num_layers):
            chunk.read_layer(layer_index)
        assert source.largest_read <= source.size_bytes
