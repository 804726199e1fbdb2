"""Tokens drawn by chance: what any criterion has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.fusion.policies.base import PromptRows, RecomputePolicy, check_ratio, share_of


@dataclass(frozen=True)
class RandomPolicy(RecomputePolicy):
    """Compute a random share of the reused tokens again, in every layer: a control.

    Parameters
    ----------
    ratio
        Share of the reused, inexact tokens, 0..1.
    seed
        The same seed draws the same tokens of prompts with as many reused tokens.
    """

    name: ClassVar[str] = "random"
    ratio: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randperm(prompt.num_reused, generator=generator)
        drawn = drawn[: share_of(self.ratio, prompt.num_reused)]
        return prompt.reused()[drawn.sort().values]
