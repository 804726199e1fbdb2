"""Rates of attention, measured in a moment."""

from __future__ import annotations

import pytest
import torch

from kvrag_bench.attention import AttentionOptions, run_attention_bench


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_has_a_rate(dtype: torch.dtype) -> None:
    options = AttentionOptions(4, 2, 16, num_tokens=1000, ratio=0.2, dtype=dtype, repeats=1)
    rows = list(run_attention_bench(options))
    assert [row.way for row in rows][:2] == ["kernel", "kernel, with the mass of keys"]
    assert len(rows) == 5
    assert all(0.01 < row.gflops < 10_000 for row in rows)
