"""Work is counted where it is done: in PyTorch, and in the compiled kernel."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kvrag.models.attention import _NAME, MassObserver, RowMask
from kvrag.models.implementations import own_attention
from kvrag.models.linears import fast_modules
from kvrag_bench.work import operations_spent


def test_attention_counts_what_rows_see() -> None:
    attend = own_attention(SimpleNamespace(_attn_implementation=_NAME))
    positions = torch.tensor([10, 40, 90])
    query = torch.randn(1, 6, 3, 16)
    key, value = torch.randn(2, 1, 2, 91, 16)

    def spent(mask: RowMask, dtype: torch.dtype = torch.float32) -> int:
        parts = [part.to(dtype) for part in (query, key, value)]
        return operations_spent(lambda: attend(torch.nn.Identity(), *parts, mask))

    assert spent(RowMask(positions, 0, None)) == 4 * 6 * 16 * (11 + 41 + 91)
    assert spent(RowMask(positions, 0, 30)) == 4 * 6 * 16 * (11 + 30 + 30)
    look = MassObserver(40, lambda *_: None)
    assert spent(RowMask(positions, 0, None, look)) == 4 * 6 * 16 * (11 + 41 + 91)
    # PyTorch multiplies masked keys too.
    assert spent(RowMask(positions, 0, None), torch.float16) >= 4 * 6 * 16 * 3 * 91


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("num_rows", [1, 4, 40])
def test_linear_layers_count_whatever_computes_them(num_rows: int, precision: str) -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32))
    rows = torch.randn(num_rows, 64)

    def compute() -> None:
        with torch.inference_mode(), fast_modules(model, precision):
            model(rows)

    assert operations_spent(compute) == 2 * num_rows * (64 * 96 + 96 * 32)
