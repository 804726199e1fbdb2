"""Rows that are far apart attend in parts, each to the keys that it may see."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvrag.models.attention import RowMask, _row_attention

SPREAD = torch.arange(0, 1280, 10)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("positions", [SPREAD, torch.arange(1000, 1128), torch.tensor([5])])
def test_parts_attend_as_one_would(positions: torch.Tensor, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    first_key = 0 if window is None else max(0, int(positions[0]) - window + 1)
    num_keys = int(positions[-1]) + 1 - first_key
    query = torch.randn(1, 6, len(positions), 16, generator=generator)
    key, value = torch.randn(2, 1, 2, num_keys, 16, generator=generator)
    mask = RowMask(positions, first_key, window)
    output, _ = _row_attention(torch.nn.Identity(), query, key, value, mask, scaling=0.3)
    expected = scaled_dot_product_attention(
        query, key, value, mask.dense(num_keys), scale=0.3, enable_gqa=True
    )
    assert torch.allclose(output, expected.transpose(1, 2), atol=1e-5)


def test_only_rows_far_apart_are_parted() -> None:
    parts = list(RowMask(SPREAD, 0, None).parts(1271))
    assert [rows.indices(128)[:2] for rows, _ in parts] == [(0, 32), (32, 64), (64, 96), (96, 128)]
    assert [num_keys for _, num_keys in parts] == [311, 631, 951, 1271]
    assert list(RowMask(torch.arange(1000, 1128), 0, None).parts(1128)) == [(slice(0, 128), 1128)]


def test_rows_that_see_what_a_mask_says_are_not_parted() -> None:
    visible = torch.ones(128, 1271, dtype=torch.bool)
    mask = RowMask(SPREAD, 0, None, visible=visible)
    assert list(mask.parts(1271)) == [(slice(0, 128), 1271)]
