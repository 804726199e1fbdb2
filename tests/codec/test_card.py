"""Decoding on a card, played by Triton's interpreter: numbers are the host's to the bit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from kvrag.codec import card
from kvrag.codec.bands import Bands
from kvrag.codec.card import CardDecoding, Coded, can_decode
from kvrag.codec.packed import PackedCodec
from kvrag.codec.profile import Profile
from kvrag.errors import RecordError
from kvrag.kvcache import KVSpec
from kvrag.native.gpu import tiled
from kvrag_bench.codec.cutting import cut_record
from kvrag_bench.codec.played import play
from kvrag_testing.codec_contract import KEY, BytesSource
from tests.codec import forge
from tests.codec.test_pipeline import CONFIGS, PACKED, fitting_codec
from tests.support.codecs import fit, smooth_kv
from tests.support.properties import in_turn

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
CPU = torch.device("cpu")
TOKENS = (1, 33, 12)
KINDS = {"transform": 1, "apart": 1, "cachegen": 0, "packed": 0}


class _Setting:
    """Records of some lengths, decoded from a payload into staged memory."""

    def __init__(
        self, name: str, dtype: torch.dtype, damaged: bool = False, hides_escapes: bool = False
    ) -> None:
        self.hides_escapes = hides_escapes
        self.spec = KVSpec(2, 1, 16, dtype)
        codec: Any = fitting_codec(name).of(self.spec)
        self.profile: Profile = codec.profile
        num_blocks = len(self.profile.transform.plans)
        self.chunks: list[Any] = []
        for number, num_tokens in enumerate(TOKENS):
            kv = smooth_kv(self.spec, num_tokens, seed=number)
            kv.keys[:, :, num_tokens // 2] *= 50  # kept raw
            kv.values[:, 0, 0, 3] *= 7  # escaped
            record = codec.encode(KEY, kv)
            if name == "transform" and number:  # of fewer planes
                record = cut_record(record, 2, num_blocks)
            if damaged and number == 1:
                blocks = codec.open(KEY, BytesSource(record), self.spec)._reader.header.blocks
                content = bytearray(record)
                content[blocks[0].offset + blocks[0].size_bytes - 5] ^= 4
                forge.reseal_blocks(content)
                record = forge.reseal(content, blocks[0].offset)
            self.chunks.append(codec.open(KEY, BytesSource(record), self.spec))
        self.started: list[str] = []

    def decoded(self, in_kernel: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the staged layers of each batch, and the flags; note what was started."""
        decoding = CardDecoding(self.chunks, CPU)
        start = decoding._start

        def noted(name: str, grid: Any, *given: Any, **more: Any) -> None:
            if name == "synthesise":
                self.numbers = given[0].clone()
            if 0 not in grid:
                # Of another alignment, a kernel would be compiled again.
                assert all(
                    one.data_ptr() % 16 == 0 for one in given if isinstance(one, torch.Tensor)
                )
                self.started.append(name)
                if in_kernel:
                    start(name, grid, *given, **more)
                else:
                    play(name, *given, **more)

        decoding._start = noted  # type: ignore[method-assign]

        def changed(number: int, parts: Any) -> Any:
            if not (self.hides_escapes and number == 1):
                return parts
            assert any(part.num_escaped for part in parts)
            return [replace(part, num_escaped=0) for part in parts]

        return _staged(decoding, self.chunks, self.spec, changed), decoding.flags

    def assert_same_numbers(self) -> None:
        """Compare whole numbers with the host's, to the bit."""
        end = 0
        for chunk in self.chunks:
            for block in range(len(self.profile.transform.plans)):
                rows = max(plane.num_rows[block] for plane in chunk.coder.level.planes)
                of_block = self.numbers[end : end + rows * chunk.num_tokens]
                end += len(of_block)
                expected = torch.from_numpy(chunk.block(block).values)
                found = of_block.view(rows, chunk.num_tokens)[: len(expected)]
                assert torch.equal(found, expected)
        assert end == len(self.numbers)


def _staged(
    decoding: CardDecoding,
    chunks: Sequence[Any],
    spec: KVSpec,
    changed: Callable[[int, Any], Any] = lambda _, parts: parts,
) -> list[torch.Tensor]:
    """Decode all layers of records from one payload; return each ``[L, 2, H, T, D]``."""
    layers = range(spec.num_layers)
    read, payload, staged = [], torch.zeros(0, dtype=torch.uint8), []
    for number, chunk in enumerate(chunks):
        memory = torch.zeros(chunk.coded_bytes(layers), dtype=torch.uint8)
        parts = changed(number, chunk.read_coded(layers, memory.numpy().data))
        shape = (len(layers), 2, spec.num_kv_heads, chunk.num_tokens, spec.head_dim)
        into = torch.full(shape, torch.nan, dtype=spec.dtype)
        staged.append(into)
        read.append(Coded(number, len(payload), parts, into.flatten(), into[0].numel()))
        payload = torch.cat([payload, memory])
    decoding.decode(layers, payload, read, torch.clone)
    return staged


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_half"), in_turn(KINDS))
def test_kernels_decode_as_the_host_does(name: str, is_half: bool) -> None:
    dtype = torch.float16 if is_half else torch.float32
    setting = _Setting(name, dtype)
    staged, flags = setting.decoded(in_kernel=True)
    assert not flags.any()
    most = {torch.float32: 1e-4, torch.float16: 4e-3}[dtype]
    for number, chunk in enumerate(setting.chunks):
        found = staged[number]
        expected = torch.stack([torch.stack(chunk.read_layer(one)) for one in range(2)])
        torch.testing.assert_close(found, expected, rtol=most, atol=most)
    if name == "packed":
        assert setting.started == ["unpack", "kept"]
        return
    # All records and layers together: one launch for a plane, not for a block or a record.
    planes = max(chunk.num_planes for chunk in setting.chunks)
    assert setting.started.count("rans") == planes
    more = {"escapes", "synthesise"} | ({"kept"} if name != "cachegen" else set())
    assert {*setting.started} == {"rans", *more}
    assert len(setting.started) == planes + len(more)
    setting.assert_same_numbers()


@pytest.mark.parametrize(("name", "in_kernel"), in_turn(("transform", "cachegen")))
def test_streams_that_lie_raise_their_record_s_flag_alone(name: str, in_kernel: bool) -> None:
    setting = _Setting(name, torch.float32, damaged=True)
    staged, flags = setting.decoded(in_kernel)
    assert flags.bool().tolist() == [False, True, False]
    for number in (0, 2):
        chunk = setting.chunks[number]
        expected = torch.stack([torch.stack(chunk.read_layer(one)) for one in range(2)])
        found = staged[number]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "in_kernel"), in_turn(("transform", "cachegen")))
def test_escapes_in_a_record_that_says_it_has_none_raise_its_flag(
    name: str, in_kernel: bool
) -> None:
    setting = _Setting(name, torch.float32, hides_escapes=True)
    _, flags = setting.decoded(in_kernel)
    assert flags.tolist() == [0, 8, 0]


_SHAPES = {
    "a band of two heads, two of another": (3, 16, Bands(2.0, most_channels=32), (1, 65, 12)),
    "a band of half a head": (1, 40, Bands(4.2, most_channels=24), (63, 64)),
    "all in six bits": (2, 24, Bands(6.0), (130,)),
    "bands wider than a tile": (2, 96, Bands(1.0, most_channels=192), (9, 66)),
}


@pytest.mark.parametrize(("shape", "is_half"), in_turn(_SHAPES))
def test_rows_of_fixed_width_become_what_the_host_makes_of_them(shape: str, is_half: bool) -> None:
    dtype = torch.float16 if is_half else torch.float32
    num_heads, head_dim, bands, tokens = _SHAPES[shape]
    spec = KVSpec(2, num_heads, head_dim, dtype)
    codec = PackedCodec(fit(replace(PACKED, transform=bands), spec))
    widths = torch.stack(codec.transform.widths)
    assert len(widths.unique()) > 1 or shape == "all in six bits"
    chunks = []
    for number, num_tokens in enumerate(tokens):
        kv = smooth_kv(spec, num_tokens, seed=number)
        kv.values[0, :, num_tokens - 1] *= 90  # kept raw, in one layer
        chunks.append(codec.open(KEY, BytesSource(codec.encode(KEY, kv)), spec))
    staged = _staged(CardDecoding(chunks, CPU), chunks, spec)
    # Sums are whole numbers and exact; a product and a sum may be rounded once, or each.
    most = {torch.float32: 1e-6, torch.float16: 1e-3}[dtype]
    for found, chunk in zip(staged, chunks, strict=True):
        expected = torch.stack([torch.stack(chunk.read_layer(one)) for one in range(2)])
        torch.testing.assert_close(found, expected, rtol=most, atol=most * float(expected.std()))


@pytest.mark.parametrize("name", KINDS)
def test_a_thousand_records_fit_a_card_s_grid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "_on_card", cache(card._on_card))
    setting = _Setting(name, torch.float32)
    chunk, layers, many = setting.chunks[0], range(2), 17_000
    memory = torch.zeros(chunk.coded_bytes(layers), dtype=torch.uint8)
    parts = chunk.read_coded(layers, memory.numpy().data)
    decoding, grids = CardDecoding([chunk] * many, CPU), []
    monkeypatch.setattr(decoding, "_start", lambda _, grid, *__, **___: grids.append(grid))
    read = [Coded(number, 0, parts, torch.empty(99), 1) for number in range(many)]
    decoding.decode(layers, memory, read, torch.clone)
    assert max(grid[0] for grid in grids) > 65_535
    assert all(size < 65_536 for grid in grids for size in grid[1:])


@pytest.mark.parametrize("heads", [range(1), range(1, 3), range(2, 3)])
@pytest.mark.parametrize(("name", "in_kernel"), in_turn(KINDS))
def test_some_heads_are_those_of_the_host(name: str, in_kernel: bool, heads: range) -> None:
    """A band of `packed` has two heads here, or all of them."""
    spec = KVSpec(2, 3, 16, torch.float32)
    config = replace(PACKED, transform=Bands(2.0, 16 * (1 + len(heads))))
    codec: Any = (
        PackedCodec(fit(config, spec)) if name == "packed" else fitting_codec(name).of(spec)
    )
    chunks = []
    for number, num_tokens in enumerate(TOKENS):
        kv = smooth_kv(spec, num_tokens, seed=number)
        kv.values[0, :, num_tokens // 2] *= 90  # kept raw
        chunks.append(codec.open(KEY, BytesSource(codec.encode(KEY, kv)), spec))
    decoding = CardDecoding(chunks, CPU, heads)
    if not in_kernel:
        decoding._start = (  # type: ignore[method-assign]
            lambda one, grid, *given, **more: 0 in grid or play(one, *given, **more)
        )
    staged = _staged(decoding, chunks, replace(spec, num_kv_heads=len(heads)))
    for found, chunk in zip(staged, chunks, strict=True):
        expected = torch.stack([torch.stack(chunk.read_layer(one)) for one in range(2)])
        expected = expected[:, :, heads.start : heads.stop]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_damaged_row_or_list_of_tokens_is_refused_before_the_card_gets_it() -> None:
    spec = KVSpec(2, 1, 16, torch.float32)
    kv = smooth_kv(spec, 9)
    kv.keys[1, :, 4] *= 90
    codec = fitting_codec("packed")
    record = bytearray(codec.encode(KEY, kv))
    (first, second) = codec.open(KEY, BytesSource(bytes(record)), spec)._reader.header.blocks
    memory = memoryview(bytearray(first.padded_bytes + second.padded_bytes))
    for place, change, reseals, told in (
        (first.offset + first.size_bytes - 1, 1, False, "block 0: checksum"),
        (second.offset + 4, 8, True, "block 1: tokens kept raw"),
        (second.offset, 2, True, "block 1: "),
    ):
        damaged = record.copy()
        damaged[place] ^= change
        if reseals:
            forge.reseal_blocks(damaged)
            damaged = bytearray(forge.reseal(damaged, first.offset))
        chunk = codec.open(KEY, BytesSource(bytes(damaged)), spec)
        with pytest.raises(RecordError, match=told):
            chunk.read_coded(range(2), memory)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_what_a_card_decodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "_trusted", {})
    monkeypatch.setattr(card, "_TRIAL_TOKENS", 7)
    spec = KVSpec(2, 1, 16, torch.float32)
    codec = fitting_codec(name)
    chunk: Any = codec.open(KEY, BytesSource(codec.encode(KEY, smooth_kv(spec, 9))), spec)
    assert can_decode(chunk.coder, chunk.num_planes, CPU) == (name in KINDS)
    assert len(tiled._trusted) == (name in KINDS)
    monkeypatch.setenv(tiled.VARIABLE, "off")
    assert not can_decode(chunk.coder, chunk.num_planes, CPU)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("transform", one) for one in ("rans", "synthesise", "kept", "escapes")),
        *(("packed", one) for one in ("unpack", "kept")),
    ],
)
def test_kernels_that_are_wrong_do_not_decode(
    name: str, wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tiled, "_trusted", {})
    monkeypatch.setattr(card, "_TRIAL_TOKENS", 7)

    def start(one: str, grid: Any, *given: Any, dtype: Any, device: Any, **more: Any) -> None:
        if one != wrong and 0 not in grid:
            play(one, *given, **more)
        elif one == "rans":
            given[2].zero_()  # an earlier trial may have left the right numbers in this memory

    monkeypatch.setattr(card.tiled, "start", start)
    spec = KVSpec(2, 1, 16, torch.float32)
    codec = fitting_codec(name)
    chunk: Any = codec.open(KEY, BytesSource(codec.encode(KEY, smooth_kv(spec, 9))), spec)
    with caplog.at_level(logging.WARNING):
        assert not can_decode(chunk.coder, chunk.num_planes, CPU)
        assert not can_decode(chunk.coder, chunk.num_planes, CPU)
    assert len(caplog.records) == 1
    assert "kernels for compressed records are not used" in caplog.text
