"""The tokens whose stored KV is furthest from fresh KV: CacheBlend's criterion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.errors import ParameterError
from kvrag.fusion.policies.base import (
    CandidateStats,
    PromptRows,
    RecomputePolicy,
    check_ratio,
    share_of,
)

ON = ("k", "v", "kv", "attention")


@dataclass(frozen=True)
class DeviationPolicy(RecomputePolicy):
    """Compute the tokens of highest KV deviation (HKVD) again.

    Source: CacheBlend (arXiv 2405.16444) §4.2-4.3. Layer 0 runs for all tokens: its K/V depend on
    no other token, so layer 1 is the first where stored and fresh KV can differ, and the first to
    choose on; the choice holds for all layers (`GradualPolicy` goes on choosing).

    Deviations: fresh K/V of layer 1 are written for all tokens, chosen or not, since they have
    been computed anyway and are exact. On ``"attention"`` the choice is made in layer 0 already, by
    what makes those of layer 1 differ: how far what a token gathers from all tokens is from what
    it gathers from its own chunk's. The MLP of layer 0, most of what the paper's criterion costs,
    then runs for the chosen only.

    Parameters
    ----------
    ratio
        Share of the reused, inexact tokens that is computed again from layer 1 on, 0..1 (on
        attention: in all layers).
    on
        ``"v"`` measures values (the paper's code), ``"k"`` keys (LMCache's choice), ``"kv"`` both,
        each against its mean; ``"attention"`` what tokens gather in layer 0. Of BLOOM, MPT and
        Falcon that cannot be told: there it stands for ``"v"``.
    """

    name: ClassVar[str] = "deviation"
    ratio: float = 0.15
    on: str = "v"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self.ratio)
        if self.on not in ON:
            raise ParameterError(
                f"{self.name} on={self.on!r}: expected 'k', 'v', 'kv' or 'attention'"
            )

    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        if self.ratio == 0.0:
            return torch.empty(0, dtype=torch.long)
        return prompt.reused()

    def counts(self, prompt: PromptRows) -> Sequence[int] | None:
        if self.ratio == 1.0:
            return None
        kept = share_of(self.ratio, prompt.num_reused)
        first = kept if self.on == "attention" else prompt.num_reused
        return [first] + [kept] * (prompt.num_layers - 1)

    def score(self, prompt: PromptRows, stats: CandidateStats) -> torch.Tensor:  # noqa: ARG002
        return _combined(stats.deviation, self.on)


def _combined(deviation: Mapping[str, torch.Tensor], on: str) -> torch.Tensor:
    """Return ``[m]``: by attention where that was compared, else by K, V or both.

    Of both, each counts against its mean. V counts where attention was wanted and not compared.
    """
    if "attention" in deviation:
        return deviation["attention"]
    if on != "kv":
        return deviation["k" if on == "k" else "v"]
    parts = [deviation[one] for one in on]
    return torch.stack([part / part.mean().clamp(min=1e-30) for part in parts]).sum(0)
