"""Selected rows attend as PyTorch's attention does, in the kernel or in PyTorch."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

from kvrag.models import attention
from kvrag.models.attention import (
    MassObserver,
    RowMask,
)
from kvrag.models.implementations import _functions
from kvrag.native.attention import Scores

MODULE: Any = GptOssAttention.__new__(GptOssAttention)
SPREAD = torch.arange(0, 1280, 10)


def make_inputs(positions: torch.Tensor, mask: RowMask, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    num_keys = int(positions[-1]) + 1 - mask.first_key
    query = torch.randn(1, 6, len(positions), 16, generator=generator)
    key, value = torch.randn(2, 1, 2, num_keys, 16, generator=generator)
    return [part.to(dtype) for part in (query, key, value)]


def assert_attends(mask: RowMask, query: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
    output, _ = _functions["kvrag_rows"](MODULE, query, *kv, mask, scaling=0.3)
    allowed = mask.dense(kv[0].shape[2])
    expected = scaled_dot_product_attention(
        *(part.float() for part in (query, *kv)), allowed, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    assert output.dtype == query.dtype
    rounding = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-10}[query.dtype]
    assert torch.allclose(output.float(), expected, atol=1e-5 + rounding, rtol=rounding)
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("positions", [SPREAD, torch.arange(1000, 1128), torch.tensor([5])])
def test_rows_attend_as_in_pytorch(
    positions: torch.Tensor, window: int | None, dtype: torch.dtype
) -> None:
    first_key = 0 if window is None else max(0, int(positions[0]) - window + 1)
    mask = RowMask(positions, first_key, window)
    assert_attends(mask, *make_inputs(positions, mask, dtype))


class Called(Exception):
    pass


def _called(*args: Any, **kwargs: Any) -> NoReturn:
    raise Called


def test_pytorch_attends_where_the_kernel_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "attend", _called)
    mask = RowMask(SPREAD, 0, None)
    inputs = make_inputs(SPREAD, mask, torch.float32)
    with pytest.raises(Called):
        assert_attends(mask, *inputs)
    visible = torch.rand(128, 1271, generator=torch.Generator().manual_seed(1)) < 0.5
    assert_attends(RowMask(SPREAD, 0, None, visible=visible), *inputs)
    assert_attends(mask, *make_inputs(SPREAD, mask, torch.float16))
    strided = [part.mT.contiguous().mT for part in inputs]
    assert_attends(mask, *strided)
    inputs[1].requires_grad_()
    assert_attends(mask, *inputs).sum().backward()
    assert inputs[1].grad is not None


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 100])
def test_keys_get_the_same_mass_in_the_kernel(window: int | None, softcap: float | None) -> None:
    noted: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(mask: RowMask, mass: torch.Tensor, value: torch.Tensor) -> None:
        noted.append((mass, value))

    positions = torch.arange(1000, 1030)
    mask = RowMask(positions, 900 if window else 0, window, MassObserver(1010, note))
    query, key, value = make_inputs(positions, mask, torch.float32)
    attends = _functions["kvrag_rows" if softcap is None else "kvrag_rows_eager"]
    output, _ = attends(MODULE, query, key, value, mask, 0.3, softcap=softcap)
    kernel, noted = noted, []
    assert torch.allclose(
        output, mask.show(query, key, value, Scores(0.3, softcap or 0.0)), atol=1e-5
    )
    (mass, shown), by_head = kernel[0], [torch.cat(parts) for parts in zip(*noted, strict=True)]
    assert len(kernel) == 1
    assert torch.allclose(mass, by_head[0], atol=1e-5)
    assert torch.equal(shown, by_head[1])
    assert torch.allclose(mass.sum(1), torch.full((len(mass),), 3.0 * 20), atol=1e-3)
