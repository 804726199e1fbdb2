"""The policy ``boundary``: each chunk's first tokens."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.errors import ParameterError
from kvrag.fusion.policies.base import (
    PromptRows,
    RecomputePolicy,
    check_ratio,
    joined_ranges,
    share_of,
)

DEFAULT_TOKENS = 16


@dataclass(frozen=True)
class BoundaryPolicy(RecomputePolicy):
    """Compute the first tokens of each chunk again, in every layer.

    Source: EPIC (arXiv 2410.15332), "LegoLink": a chunk's first tokens are its attention sink,
    which is wrong when the chunk is no longer first.

    Parameters
    ----------
    tokens
        Tokens per chunk, 1 or more; 16 if no ratio is given either.
    ratio
        Alternative to `tokens`: a share of the reused, inexact tokens, 0..1. Every chunk gets the
        same number of tokens, the smallest that reaches this share.
    """

    name: ClassVar[str] = "boundary"
    tokens: int | None = None
    ratio: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens is None and self.ratio is None:
            object.__setattr__(self, "tokens", DEFAULT_TOKENS)
        if self.tokens is not None and self.ratio is not None:
            raise ParameterError(
                f"{self.name} tokens {self.tokens} and ratio {self.ratio}: expected one of the two"
            )
        if self.tokens is not None and self.tokens < 1:
            raise ParameterError(
                f"{self.name} tokens {self.tokens}: expected at least 1 (to recompute none, use "
                "policy 'none')"
            )
        if self.ratio is not None:
            check_ratio(self.ratio)

    @property
    def looks_back(self) -> bool:
        return self.tokens is not None

    def tokens_of(self, prompt: PromptRows) -> int:
        """Return how many tokens of each chunk to compute again."""
        if self.tokens is not None:
            return self.tokens
        assert self.ratio is not None
        wanted = share_of(self.ratio, prompt.num_reused)
        lengths = [span.length for span in prompt.spans]

        def num_tokens(tokens: int) -> int:
            return sum(min(length, tokens) for length in lengths)

        return bisect_left(range(max(lengths, default=0)), wanted, key=num_tokens)

    def num_candidates(self, prompt: PromptRows) -> int:
        tokens = self.tokens_of(prompt)
        return sum(min(span.length, tokens) for span in prompt.spans)

    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        tokens = self.tokens_of(prompt)
        return joined_ranges(
            range(one.prompt_start, one.prompt_start + min(one.length, tokens))
            for one in prompt.spans
        )
