"""The tokens whose stored KV is furthest from fresh KV: CacheBlend's criterion."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.errors import ParameterError
from kvrag.fusion.policies.base import PromptRows, RecomputePolicy, check_ratio


@dataclass(frozen=True)
class DeviationPolicy(RecomputePolicy):
    """Compute the tokens of highest KV deviation (HKVD) again, chosen once on layer 1.

    Source: CacheBlend (arXiv 2405.16444) §4.2-4.3 with one check layer. Layer 0 runs for all
    tokens: its K/V depend on no other token, so layer 1 is the first where stored and fresh KV
    can differ, and the first to choose on.

    Deviations: fresh K/V of the check layer are written for all tokens, chosen or not, since
    they have been computed anyway and are exact; the paper's gradual filtering over later
    layers is not in this policy.

    Parameters
    ----------
    ratio
        Share of the reused, inexact tokens that is computed again from layer 1 on, 0..1.
    on
        ``"v"`` measures values (the paper's code), ``"k"`` keys (LMCache's choice).
    """

    name: ClassVar[str] = "deviation"
    ratio: float = 0.15
    on: str = "v"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if self.on not in ("k", "v"):
            raise ParameterError(f"deviation on={self.on!r}: expected 'k' or 'v'")

    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        if self.ratio == 0.0:
            return torch.empty(0, dtype=torch.long)
        return prompt.reused()

    @property
    def check_layer(self) -> int | None:
        return 1 if self.ratio < 1.0 else None

    def keep(self, key_deviation: torch.Tensor, value_deviation: torch.Tensor) -> torch.Tensor:
        deviation = value_deviation if self.on == "v" else key_deviation
        num_kept = math.ceil(self.ratio * len(deviation))
        mask = torch.zeros(len(deviation), dtype=torch.bool, device=deviation.device)
        mask[deviation.topk(num_kept).indices] = True
        return mask
