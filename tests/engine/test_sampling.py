"""Draws follow the shares that Transformers leaves, and need no sorting of a whole vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvrag.engine.options import Sampling
from kvrag.engine.sampling import Sampler, _likely
from kvrag.errors import ModelLoadError

CPU = torch.device("cpu")


def by_transformers(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits[None])
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    return scores[0].softmax(-1)


def shares_of(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    shares, tokens = _likely(logits, sampling)
    found = torch.zeros(len(logits))
    found[slice(None) if tokens is None else tokens] = shares
    return found / found.sum()


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])  # from flat, where top-p needs many, to steep
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 64},
        {"top_k": 9000},
        {"top_p": 0.9},
        {"top_p": 1e-6},
        {"min_p": 0.3},
        {"top_k": 20, "top_p": 0.7, "min_p": 0.1},
        {"top_p": 0.99, "min_p": 0.01},
    ],
)
def test_shares_are_those_of_transformers(options: dict[str, Any], spread: float) -> None:
    sampling = Sampling(temperature=0.8, **options)
    logits = spread * torch.randn(5000, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        shares_of(logits, sampling), by_transformers(logits, sampling), atol=1e-6, rtol=1e-4
    )


def test_tokens_as_likely_as_the_last_one_stay() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 1.0, 1.0, -2.0])
    found = shares_of(logits, Sampling(temperature=1.0, top_k=2))
    assert found.nonzero()[:, 0].tolist() == [1, 2, 3, 4]


def test_draws_follow_the_shares() -> None:
    sampling = Sampling(temperature=1.0, top_k=4, seed=5)
    logits = torch.tensor([2.0, -torch.inf, 1.0, 0.0, 1.5, -1.0])
    sampler, counts = Sampler(sampling, CPU), torch.zeros(6)
    for _ in range(4000):
        counts[sampler.next_token(logits, torch.tensor([0]))] += 1
    # Three standard errors of a share of a half.
    torch.testing.assert_close(counts / 4000, shares_of(logits, sampling), atol=0.024, rtol=0)
    assert counts[1] == counts[5] == 0


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_logits_without_a_number_are_refused(value: float) -> None:
    for sampling in (Sampling(temperature=1.0, top_p=0.9), Sampling(temperature=0.0)):
        with pytest.raises(ModelLoadError, match=r"no token can be drawn.*kvrag models check"):
            Sampler(sampling, CPU).next_token(torch.full((600,), value), torch.tensor([0]))


def test_one_logit_that_is_no_number_is_not_taken_for_the_greatest() -> None:
    logits = torch.zeros(600)
    logits[7] = torch.nan
    with pytest.raises(ModelLoadError, match="hold NaN"):
        Sampler(Sampling(temperature=0.0), CPU).next_token(logits, torch.tensor([0]))
