"""The policy ``random``: tokens chosen at random, which any criterion has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.errors import ParameterError
from kvrag.fusion.policies.base import PromptRows, RecomputePolicy, check_ratio, share_of


@dataclass(frozen=True)
class RandomPolicy(RecomputePolicy):
    """Compute a random share of the reused tokens again, in every layer, as a control.

    Parameters
    ----------
    ratio
        Share of the reused, inexact tokens, 0..1.
    seed
        0 or more; the same seed chooses the same tokens in prompts with the same number of reused
        tokens.
    """

    name: ClassVar[str] = "random"
    ratio: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self.ratio)
        if not 0 <= self.seed < 2**63:
            raise ParameterError(f"random seed {self.seed}: expected 0 to {2**63 - 1}")

    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randperm(prompt.num_reused, generator=generator)
        drawn = drawn[: share_of(self.ratio, prompt.num_reused)]
        return prompt.reused()[drawn.sort().values]
