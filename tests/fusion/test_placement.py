"""Placing staged rows: by PyTorch as one by one, by the kernel in Triton's interpreter as that."""

from __future__ import annotations

from importlib.util import find_spec
from random import Random

import pytest
import torch

from kvrag.fusion.card import Part, Placement, is_right
from kvrag.positions.rotary import RotaryTable
from tests.support.properties import in_turn

# One rounding: a product and a sum may be computed in one step, or in two.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
LAYERS, FIRST = 5, 2


class Setting:
    """Records of three layers in a slot, and a buffer that is NaN where nobody has written."""

    def __init__(self, dtype: torch.dtype, num_heads: int, head_dim: int, num_rotated: int) -> None:
        random, made = Random(head_dim), torch.Generator().manual_seed(head_dim)
        self.parts: list[Part] = []
        self.expected: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        pieces, offset, row = [], 0, 3
        spans: list[tuple[int, int, int, int, int, int]] = []
        for num_tokens in (40, 1, 70):
            stored = torch.randn(3, 2, num_heads, num_tokens, head_dim, generator=made).to(dtype)
            gap = 2 * head_dim  # padding of a layer
            padded = torch.cat([stored.flatten(1), torch.zeros(3, gap, dtype=dtype)], 1)
            stride = padded.shape[1]
            for _ in range(random.randint(1, 2)):
                first = random.randrange(num_tokens)
                num_rows = random.randint(1, num_tokens - first)
                spans.append((offset, stride, num_tokens, first, row, num_rows))
                tokens = slice(first, first + num_rows)
                self.expected.append((stored[:, 0, :, tokens], stored[:, 1, :, tokens], row))
                row += num_rows + random.randrange(4)
            pieces.append(padded.flatten())
            offset += padded.numel()
        staged = torch.cat(pieces)
        # The first record has memory of its own.
        own = pieces[0].clone()
        for offset, stride, *rest in spans:
            memory = staged if offset else own
            self.parts.append(Part(memory, offset, stride, FIRST - 1, *rest))
        angles = torch.randn(row, num_rotated // 2, generator=made).repeat(1, 2)
        self.table = RotaryTable(1.3 * angles.cos(), 1.3 * angles.sin())
        shape = (2, LAYERS, num_heads, row + 5, head_dim)
        self.buffer = torch.full(shape, torch.nan, dtype=dtype)

    def placed(self) -> torch.Tensor:
        """Return the buffer after the second and third layer were placed."""
        keys, values = buffer = self.buffer.clone()
        widths = {self.table.cos.shape[-1]}
        placement = Placement([[], self.parts], keys, values, widths, torch.clone)
        placement.place(0, range(FIRST), self.table)
        placement.place(1, range(FIRST, FIRST + 2), self.table)
        return buffer

    def one_by_one(self) -> torch.Tensor:
        keys, values = buffer = self.buffer.clone()
        for stored_keys, stored_values, row in self.expected:
            rows = slice(row, row + stored_keys.shape[2])
            for layer in (1, 2):
                into = keys[FIRST + layer - 1, :, rows]
                self.table.place(stored_keys[layer], rows, into)
                values[FIRST + layer - 1, :, rows] = stored_values[layer]
        return buffer


SHAPES = [(1, 16, 16), (2, 64, 64), (4, 128, 128), (2, 80, 32), (2, 96, 96), (1, 64, 16)]


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize(("shape", "is_half"), in_turn(SHAPES))
def test_the_kernel_places_as_pytorch_does(
    shape: tuple[int, int, int], is_half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, head_dim, rotated = shape
    dtype = torch.float16 if is_half else torch.float32
    setting = Setting(dtype, heads, head_dim, rotated)
    assert is_right(dtype, torch.device("cpu"), head_dim, frozenset([rotated]))
    started: list[None] = []
    start = Placement._start
    monkeypatch.setattr(Placement, "_start", lambda *given: started.append(start(*given)))
    found = setting.placed()
    assert started
    monkeypatch.setenv("KVRAG_GPU_KERNELS", "off")
    expected = setting.placed()
    assert len(started) == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype], equal_nan=True)
