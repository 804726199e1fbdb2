"""Packed rows against plain torch, for every instruction set."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.errors import ParameterError
from kvrag.native.kernels import instruction_sets, use_instruction_set
from kvrag.native.packed import (
    LEVELS,
    MOST_BITS,
    POWERS,
    SLACK,
    USUAL,
    PackedBands,
    pack_rows,
    place_packed,
)
from kvrag.native.reconstruction import Rotation
from tests.native.reference_reconstruction import rotate
from tests.native.test_reconstruction import RELATIVE, make_rotation
from tests.support.instructions import kept_instruction_set, torch_threads
from tests.support.properties import examples


def fields(row: np.ndarray, widths: np.ndarray) -> list[int]:
    """Return a band's numbers, bit by bit."""
    found, at = [], 0
    for width in widths:
        word = int.from_bytes(row[at : at + width].tobytes(), "little")
        found += [word >> (i * int(width)) & ((1 << int(width)) - 1) for i in range(8)]
        at += int(width)
    return found


def meaning(numbers: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return what a band's numbers stand for, as docs/format.md has it."""
    each = np.repeat(widths.astype(int), 8)
    return np.where(each > 0, 2 * LEVELS[(1 << each) + numbers].astype(int) - 127, 0)


Kind = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Widths, basis, scales and means."""


def expected(
    rows: np.ndarray, widths: np.ndarray, basis: np.ndarray, scales: np.ndarray, mean: np.ndarray
) -> torch.Tensor:
    """Return channels float64 ``[N, T]``, as docs/format.md has them."""
    every, at = [], 0
    for width, matrix, scale in zip(widths, basis, scales, strict=True):
        size = 1 + int(width.sum())
        found = np.array([fields(row[at + 1 : at + size], width) for row in rows])
        odd = meaning(found, width)
        power = np.exp2((rows[:, at].astype(float) - 128) / 8)
        every.append((odd @ matrix.astype(np.int64)) * power[:, None] * float(scale))
        at += size
    return torch.from_numpy(np.concatenate(every, axis=1) + mean).T


def draw_kind(rng: np.random.Generator, channels: int, groups: int, num_bands: int) -> Kind:
    num_bands = num_bands if channels % num_bands == 0 else 1
    width = rng.integers(0, MOST_BITS + 1, groups).astype(np.uint8)
    widths = np.stack([rng.permutation(width) for _ in range(num_bands)])
    basis = rng.integers(-127, 128, (num_bands, 8 * groups, channels // num_bands)).astype(np.int8)
    scales = rng.random(num_bands).astype(np.float32) / 100
    return widths, basis, scales, rng.normal(size=channels).astype(np.float32)


@settings(max_examples=examples(40))
@given(data=st.data())
def test_placing_matches_torch(data: st.DataObject) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    num_heads, head_dim = draw(st.sampled_from([(1, 5), (1, 8), (3, 64), (2, 96), (4, 32)]))
    kinds = [
        draw_kind(
            rng, num_heads * head_dim, draw(st.integers(1, 12)), draw(st.sampled_from([1, 2, 3]))
        )
        for _ in range(draw(st.sampled_from([1, 2])))
    ]
    bands = [PackedBands(*kind) for kind in kinds]
    used = sum(one.row_bytes for one in bands)
    num_tokens, before = draw(st.sampled_from([1, 3, 15, 16, 31, 32, 70])), draw(st.integers(0, 5))
    stride = used + draw(st.integers(0, 9))
    content = rng.integers(0, 256, before + num_tokens * stride + SLACK, dtype=np.uint8)
    rows = content[before : before + num_tokens * stride].reshape(num_tokens, stride)
    parts = np.split(rows[:, :used], [bands[0].row_bytes], axis=1)
    for part, (widths, *_) in zip(parts, kinds, strict=False):
        size = 1 + int(widths[0].sum())
        part[:, ::size] = rng.integers(100, 150, (num_tokens, len(widths)))
    start = draw(st.integers(0, num_tokens))
    tokens = slice(start, draw(st.integers(start, num_tokens)))
    count, position = tokens.stop - tokens.start, draw(st.integers(0, 4))
    rotation = part_of = None
    if draw(st.booleans()):
        width = draw(st.sampled_from([0, head_dim // 2 * 2, head_dim // 4 * 2]))
        rotation = make_rotation(torch.Generator().manual_seed(1), position + count, width)
        part_of = Rotation(rotation.cos[position:], rotation.sin[position:])
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    with kept_instruction_set():
        for name in instruction_sets():
            use_instruction_set(name)
            buffers = [torch.full((count + 2, num_heads + 1, head_dim), 5.0, dtype=dtype)] * 2
            buffers = [buffer.clone() for buffer in buffers]
            outs = [buffer[1 : count + 1, :num_heads].transpose(0, 1) for buffer in buffers]
            into = list(zip(bands, outs, strict=False))
            place_packed(
                content, before, stride, tokens, *into, rotation=rotation, first_position=position
            )
            for part, kind, out, turned in zip(parts, kinds, outs, (part_of, None), strict=False):
                true = expected(part, *kind).T[tokens]
                true = rotate(true.view(count, num_heads, head_dim).transpose(0, 1), turned)
                scale = float(true.abs().max()) if count else 0.0
                near = true.abs() * RELATIVE[dtype] + scale * 1e-6
                assert (out.double() - true).abs().le(near).all()
                out.fill_(5.0)
            assert all((buffer == 5.0).all() for buffer in buffers)


@settings(max_examples=examples(40))
@given(data=st.data())
def test_packing_takes_the_scale_and_the_numbers_that_lose_least(data: st.DataObject) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    widths = np.array(draw(st.lists(st.integers(0, MOST_BITS), min_size=1, max_size=9)), np.uint8)
    size = draw(st.sampled_from([1e-3, 0.3, 500.0]))
    numbers = (rng.standard_t(4, (20, 8 * len(widths))) * size).astype(np.float32)
    numbers *= np.repeat(USUAL[widths], 8)
    numbers[:2] = 0.0
    weights = rng.random(len(widths)).astype(np.float32)
    each = np.repeat(widths.astype(int), 8)

    def lost(row: np.ndarray, byte: int) -> float:
        scale = float(POWERS[byte])
        total = 0.0
        for width, weight, eight in zip(widths, weights, row.reshape(-1, 8), strict=True):
            odd = 2.0 * LEVELS[1 << width : 2 << width] - 127 if width else np.zeros(1)
            total += float(weight) * np.square(eight[:, None] - odd * scale).min(1).sum()
        return float(total)

    def tried(row: np.ndarray) -> range:
        most = np.where(each > 0, 2.0 * LEVELS[(2 << each) - 1] - 127, np.inf)
        needed = np.float32(np.abs(row / most).max(initial=0))
        first = min(int(np.searchsorted(POWERS, needed)), 255)
        return range(max(first - 11, 0), first + 1)

    with kept_instruction_set():
        for name in instruction_sets():
            use_instruction_set(name)
            rows = np.zeros((20, 3 + int(widths.sum())), np.uint8)
            given = numbers[None], widths[None], weights[None]
            (losses,) = pack_rows(*given, rows[:, 1:-1])
            assert not rows[:, [0, -1]].any()
            twice = np.zeros((20, 2 * rows.shape[1]), np.uint8)
            both = pack_rows(*(np.concatenate([one, one]) for one in given), twice[:, 1:-3])
            assert (both == losses).all()
            assert (twice[:, 1:-3] == np.tile(rows[:, 1:-1], 2)).all()
            for row, packed, told in zip(numbers, rows[:, 1:-1], losses, strict=True):
                scale = float(POWERS[packed[0]])
                odd = meaning(np.array(fields(packed[1:], widths)), widths)
                found = float(np.repeat(weights, 8) @ np.square(row - odd * scale))
                least = min(lost(row, byte) for byte in tried(row))
                assert found <= 1.001 * least + 1e-30
                assert packed[0] in tried(row)
                assert told == pytest.approx(found, rel=1e-4)


def test_records_keep_their_bytes(isa: str) -> None:
    """Those of the first kernel, with any instruction set."""
    rng = np.random.RandomState(7)
    widths = np.array([6, 5, 4, 4, 0, 3, 2, 1], np.uint8)
    numbers = rng.standard_normal((400, 64)) * np.repeat(2.0 ** np.arange(7, -1, -1), 8)
    numbers *= np.exp(rng.standard_normal((400, 1)))
    weights = rng.uniform(0.5, 2, 8).astype(np.float32)
    rows = np.zeros((400, 26), np.uint8)
    pack_rows(numbers.astype(np.float32)[None], widths[None], weights[None], rows)
    assert hashlib.sha256(rows.tobytes()).hexdigest().startswith("7d3beec2e8444676")


def test_threads_change_nothing(isa: str) -> None:
    rng = np.random.default_rng(3)
    widths = np.full((1, 24), 4, np.uint8)
    basis = rng.integers(-127, 128, (1, 192, 192)).astype(np.int8)
    bands = PackedBands(widths, basis, np.ones(1, np.float32), np.zeros(192, np.float32))
    content = rng.integers(0, 256, 400 * 97 + SLACK, dtype=np.uint8)
    outs = [torch.empty(3, 400, 64, dtype=torch.bfloat16) for _ in range(2)]
    for threads, out in zip((1, 3), outs, strict=True):
        with torch_threads(threads):
            place_packed(content, 0, 97, slice(0, 400), (bands, out))
    assert torch.equal(*outs)


def test_mistakes_of_the_caller() -> None:
    one, basis = np.ones(1, np.float32), np.ones((1, 8, 8), np.int8)
    bands = PackedBands(np.full((1, 1), 4, np.uint8), basis, one, np.zeros(8, np.float32))
    out, content, every = torch.empty(1, 3, 8), np.zeros(3 * 5 + SLACK, np.uint8), slice(0, 3)
    place_packed(content, 0, 5, every, (bands, out))
    table = torch.zeros(3, 8)
    for wrong in (
        (content[1:], 0, 5, every, (bands, out)),
        (content, 1, 5, every, (bands, out)),
        (content, -1, 5, every, (bands, out)),
        (content, 0, 4, every, (bands, out)),
        (content, 0, 5, slice(0, 4), (bands, torch.empty(1, 4, 8))),
        (content, 0, 5, slice(0, 2), (bands, out)),
        (content, 0, 5, every, (bands, torch.empty(1, 3, 9))),
        (content, 0, 5, every, (bands, torch.empty(1, 8, 3).transpose(1, 2))),
        (content, 0, 5, every, (bands, out.double())),
        (content, 0, 5, every, (bands, out), (bands, out)),
        (content, 0, 5, every, (bands, out), None, Rotation(table[1:], table[1:])),
        (content, 0, 5, every, (bands, out), None, Rotation(table, table), 1),
        (content, 0, 5, every, (bands, out), None, Rotation(table.double(), table.double())),
    ):
        with pytest.raises(ParameterError):
            place_packed(*wrong)
    four, one = np.array([[4]], np.uint8), one[None]
    with pytest.raises(ParameterError):
        PackedBands(np.full((1, 1), 7, np.uint8), basis, one[0], np.zeros(8, np.float32))
    with pytest.raises(ParameterError):
        pack_rows(np.zeros((1, 2, 8), np.float32), four, one, np.zeros((2, 4), np.uint8))
    with pytest.raises(ParameterError):
        pack_rows(np.zeros((1, 2, 8), np.float32), four, np.ones(2), np.zeros((2, 5), np.uint8))
