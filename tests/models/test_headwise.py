"""Attention by head is attention, and shows what it does."""

from __future__ import annotations

import pytest
import torch

from kvrag.models.attention import attend_densely
from kvrag.native.attention import Scores


@pytest.mark.parametrize("at_once", [(1, 32), (2, 7), (2, 100)])  # as the CPU does, and a card
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sees", ["before", "window", "any"])
def test_it_is_attention_as_written_out(
    sees: str, softcap: float | None, at_once: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 6, 70, 16, generator=generator)
    key, value = torch.randn(2, 1, 2, 90, 16, generator=generator)
    allowed = torch.ones(70, 90, dtype=torch.bool).tril(20)
    if sees == "window":
        allowed &= ~torch.ones(70, 90, dtype=torch.bool).tril(-15)
    elif sees == "any":
        # Rows in no order, and keys hidden in between.
        allowed = torch.rand(70, 90, generator=generator) < 0.5
    seen = torch.zeros(2, 3, 70, 90)

    def observe(heads: slice, rows: slice, weights: torch.Tensor, values: torch.Tensor) -> None:
        seen[heads, :, rows] = weights
        assert torch.equal(values, value[0, heads])

    given = query, key, value, allowed, Scores(0.3, softcap or 0.0)
    output = attend_densely(*given, observe=observe, at_once=at_once)
    scores = torch.einsum("hgnd,hkd->hgnk", query.view(2, 3, 70, 16), key[0]) * 0.3
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    expected = torch.einsum("hgnk,hkd->nhgd", weights, value[0]).reshape(1, 70, 6, 16)
    assert torch.allclose(output, expected, atol=1e-5)
    assert torch.allclose(seen, weights, atol=1e-6)
