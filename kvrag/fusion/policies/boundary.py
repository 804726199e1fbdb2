"""The first tokens of each chunk: where the missing context before it weighs most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.errors import ParameterError
from kvrag.fusion.policies.base import PromptRows, RecomputePolicy


@dataclass(frozen=True)
class BoundaryPolicy(RecomputePolicy):
    """Compute the first `tokens` tokens of each chunk again, in every layer.

    Source: EPIC (arXiv 2410.15332), "LegoLink": each chunk's own attention sink is the first
    thing to lose its place when the chunk is no longer first.

    Parameters
    ----------
    tokens
        Tokens a chunk, 1 or more.
    """

    name: ClassVar[str] = "boundary"
    tokens: int = 16

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ParameterError(
                f"boundary tokens {self.tokens}: expected at least 1 (policy 'none' computes none)"
            )

    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        starts = [
            torch.arange(span.prompt_start, min(span.prompt_end, span.prompt_start + self.tokens))
            for span in prompt.spans
        ]
        return torch.cat(starts) if starts else torch.empty(0, dtype=torch.long)
