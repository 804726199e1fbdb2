"""Packed rows against plain torch, for every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.errors import ParameterError
from kvrag.native import PackedBands, instruction_sets, pack_rows, use_instruction_set
from kvrag.native.packed import POWERS, SLACK
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


def expected(
    rows: np.ndarray, widths: np.ndarray, basis: np.ndarray, scales: np.ndarray, mean: np.ndarray
) -> torch.Tensor:
    """Return channels float64 ``[N, T]``, as docs/format.md has them."""
    every, at = [], 0
    for width, matrix, scale in zip(widths, basis, scales, strict=True):
        size = 1 + int(width.sum())
        lowest = 1 - (1 << np.repeat(width.astype(np.int64), 8))
        odd = np.array([fields(row[at + 1 : at + size], width) for row in rows]) * 2 + lowest
        power = np.exp2((rows[:, at].astype(float) - 128) / 8)
        every.append((odd @ matrix.astype(np.int64)) * power[:, None] * float(scale))
        at += size
    return torch.from_numpy(np.concatenate(every, axis=1) + mean).T


@settings(max_examples=examples(40))
@given(data=st.data())
def test_placing_matches_torch(data: st.DataObject) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    num_bands, groups = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    num_heads, head_dim = draw(st.sampled_from([(1, 5), (1, 8), (3, 64), (2, 96), (4, 32)]))
    channels = num_heads * head_dim
    num_bands = num_bands if channels % num_bands == 0 else 1
    width = rng.integers(0, 8, groups).astype(np.uint8)
    widths = np.stack([rng.permutation(width) for _ in range(num_bands)])
    basis = rng.integers(-127, 128, (num_bands, 8 * groups, channels // num_bands)).astype(np.int8)
    scales = rng.random(num_bands).astype(np.float32) / 100
    mean = rng.normal(size=channels).astype(np.float32)
    bands = PackedBands(widths, basis, scales, mean)
    num_tokens, before = draw(st.sampled_from([1, 3, 31, 32, 70])), draw(st.integers(0, 5))
    stride = bands.row_bytes + draw(st.integers(0, 9))
    content = rng.integers(0, 256, before + num_tokens * stride + SLACK, dtype=np.uint8)
    rows = content[before : before + num_tokens * stride].reshape(num_tokens, stride)
    rows = rows[:, : bands.row_bytes]
    size = bands.row_bytes // num_bands
    rows[:, ::size] = rng.integers(100, 150, (num_tokens, num_bands))
    start = draw(st.integers(0, num_tokens))
    tokens = slice(start, draw(st.integers(start, num_tokens)))
    count = tokens.stop - tokens.start
    rotation = None
    if draw(st.booleans()):
        width = draw(st.sampled_from([0, head_dim // 2 * 2, head_dim // 4 * 2]))
        rotation = make_rotation(torch.Generator().manual_seed(1), count, width)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    true = expected(rows, widths, basis, scales, mean).T[tokens]
    true = rotate(true.view(count, num_heads, head_dim).transpose(0, 1), rotation)
    scale = float(true.abs().max()) if count else 0.0
    with kept_instruction_set():
        for name in instruction_sets():
            use_instruction_set(name)
            buffer = torch.full((count + 2, num_heads + 1, head_dim), 5.0, dtype=dtype)
            out = buffer[1 : count + 1, :num_heads].transpose(0, 1)
            bands.place(content, before, stride, num_tokens, out, rotation=rotation, tokens=tokens)
            near = true.abs() * RELATIVE[dtype] + scale * 1e-6
            assert (out.double() - true).abs().le(near).all()
            out.fill_(5.0)
            assert (buffer == 5.0).all()


@settings(max_examples=examples(40))
@given(data=st.data())
def test_packing_takes_the_scale_and_the_numbers_that_lose_least(data: st.DataObject) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    widths = np.array(draw(st.lists(st.integers(0, 7), min_size=1, max_size=9)), np.uint8)
    spread = np.repeat(2.0 ** widths.astype(float), 8) * draw(st.sampled_from([1e-3, 0.3, 500.0]))
    numbers = (rng.standard_t(4, (20, 8 * len(widths))) * spread / 3).astype(np.float32)
    numbers[:2] = 0.0
    most = np.repeat((1 << widths.astype(int)) - 1, 8).astype(float)

    def lost(row: np.ndarray, byte: int) -> float:
        scale = float(POWERS[byte])
        odd = 2 * np.floor((row / (2 * scale) + (most + 1) / 2).clip(0, most)) - most
        return float(np.square(row - odd * scale).sum())

    def tried(row: np.ndarray) -> range:
        needed = max((abs(x) / m for x, m in zip(row, most, strict=True) if m), default=0.0)
        first = min(int(np.searchsorted(POWERS, np.float32(needed))), 255)
        return range(max(first - 9, 0), first + 1)

    with kept_instruction_set():
        for name in instruction_sets():
            use_instruction_set(name)
            rows = np.zeros((20, 3 + int(widths.sum())), np.uint8)
            pack_rows(numbers, widths, rows[:, 1:-1])
            assert not rows[:, [0, -1]].any()
            for row, packed in zip(numbers, rows[:, 1:-1], strict=True):
                scale = float(POWERS[packed[0]])
                odd = 2 * np.array(fields(packed[1:], widths)) - most
                found = float(np.square(row - odd * scale).sum())
                assert found <= 1.001 * min(lost(row, byte) for byte in tried(row)) + 1e-30
                assert packed[0] in tried(row)


def test_threads_change_nothing(isa: str) -> None:
    rng = np.random.default_rng(3)
    widths = np.full((1, 24), 4, np.uint8)
    basis = rng.integers(-127, 128, (1, 192, 192)).astype(np.int8)
    bands = PackedBands(widths, basis, np.ones(1, np.float32), np.zeros(192, np.float32))
    content = rng.integers(0, 256, 400 * 97 + SLACK, dtype=np.uint8)
    outs = [torch.empty(3, 400, 64, dtype=torch.bfloat16) for _ in range(2)]
    for threads, out in zip((1, 3), outs, strict=True):
        with torch_threads(threads):
            bands.place(content, 0, 97, 400, out)
    assert torch.equal(*outs)


def test_mistakes_of_the_caller() -> None:
    one, basis = np.ones(1, np.float32), np.ones((1, 8, 8), np.int8)
    bands = PackedBands(np.full((1, 1), 4, np.uint8), basis, one, np.zeros(8, np.float32))
    out, content = torch.empty(1, 3, 8), np.zeros(3 * 5 + SLACK, np.uint8)
    bands.place(content, 0, 5, 3, out)
    for wrong in (
        (content[1:], 0, 5, 3),
        (content, 1, 5, 3),
        (content, 0, 4, 3),
        (content, 0, 5, 4),
    ):
        with pytest.raises(ParameterError):
            bands.place(*wrong, out)
    with pytest.raises(ParameterError):
        bands.place(content, 0, 5, 3, torch.empty(1, 3, 9))
    with pytest.raises(ParameterError):
        PackedBands(np.full((1, 1), 8, np.uint8), basis, one, np.zeros(8, np.float32))
    with pytest.raises(ParameterError):
        pack_rows(np.zeros((2, 8), np.float32), np.array([4], np.uint8), np.zeros((2, 4), np.uint8))
