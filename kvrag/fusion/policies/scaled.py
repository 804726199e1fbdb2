"""A modifier of any policy: reused tokens are attended to with a temperature and a scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvrag.errors import ParameterError
from kvrag.fusion.policies.base import PromptRows, RecomputePolicy, Resolved, Seen
from kvrag.loading.cost import ChunkDecision
from kvrag.models.scaling import KeyScaling

if TYPE_CHECKING:
    from kvrag.fusion.calibration import Calibration

TEMPERATURE, SCALE = "temperature", "scale"
# Beyond these the scores leave float32, and all answers are of not-a-number.
_COLDEST, _HOTTEST, _LARGEST_SCALE = 1e-4, 1e4, 1e4
MODIFIERS = (TEMPERATURE, SCALE)


@dataclass(frozen=True)
class ScaledPolicy(RecomputePolicy):
    """Another policy, with the attention of APE to what it leaves reused.

    Source: APE (arXiv 2502.05431) §4; deviations: see `kvrag.models.scaling`. Nothing more is
    computed for it; generation goes on with the same attention.

    Parameters
    ----------
    policy
        Which tokens are computed again.
    temperature
        Scores of reused keys are divided by it, 0.0001 to 10,000.
    scale
        The log-sum-exp of reused keys is multiplied by it, 0 to 10,000.
    """

    policy: RecomputePolicy
    temperature: float = 1.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _COLDEST <= self.temperature <= _HOTTEST:
            raise ParameterError(
                f"temperature {self.temperature}: expected {_COLDEST} to {_HOTTEST:,.0f}"
            )
        if not 0.0 <= self.scale <= _LARGEST_SCALE:
            raise ParameterError(f"scale {self.scale}: expected 0 to {_LARGEST_SCALE:,.0f}")

    @property
    def name(self) -> str:  # type: ignore[override]  # of the policy that it is a form of
        """That of the policy."""
        return self.policy.name

    def scaling(self) -> KeyScaling | None:
        if self.temperature == self.scale == 1.0:
            return None
        return KeyScaling(self.temperature, self.scale)

    def calibrated(self, load: Callable[[], Calibration | None]) -> RecomputePolicy:
        return replace(self, policy=self.policy.calibrated(load))

    @property
    def weighs_loading(self) -> bool:
        return self.policy.weighs_loading

    def decide(self, prompt: PromptRows, num_fresh: int) -> Sequence[ChunkDecision]:
        return self.policy.decide(prompt, num_fresh)

    def question_layers(self, num_layers: int) -> range:
        return self.policy.question_layers(num_layers)

    def resolve(self, prompt: PromptRows, num_fresh: int) -> Resolved:
        chosen = self.policy.resolve(prompt, num_fresh)
        # What was measured without scaling says nothing of the loss with it.
        known = None if self.scaling() is not None else chosen.loss
        scaled = ScaledPolicy(chosen.policy, self.temperature, self.scale)
        return chosen._replace(policy=scaled, loss=known)

    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        return self.policy.candidates(prompt)

    @property
    def compares_attention(self) -> bool:
        return self.policy.compares_attention

    def num_candidates(self, prompt: PromptRows) -> int:
        return self.policy.num_candidates(prompt)

    def counts(self, prompt: PromptRows) -> Sequence[int] | None:
        return self.policy.counts(prompt)

    def score(self, prompt: PromptRows, seen: Seen) -> torch.Tensor:
        return self.policy.score(prompt, seen)

    def __str__(self) -> str:
        name, _, parameters = str(self.policy).partition("(")
        own = f"temperature={self.temperature}, scale={self.scale}"
        return f"{name}({parameters[:-1]}, {own})" if parameters else f"{name}({own})"
