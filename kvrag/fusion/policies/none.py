"""The policy ``none``: plain reuse, the fastest policy and the baseline for quality."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.fusion.policies.base import PromptRows, RecomputePolicy


@dataclass(frozen=True)
class NonePolicy(RecomputePolicy):
    """Reuse stored KV as it is, at its new positions (Prompt Cache §3; KVLink without links)."""

    name: ClassVar[str] = "none"

    @property
    def looks_back(self) -> bool:
        return True

    def candidates(self, prompt: PromptRows) -> torch.Tensor:  # noqa: ARG002
        return torch.empty(0, dtype=torch.long)
