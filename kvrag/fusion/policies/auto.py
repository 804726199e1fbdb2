"""The policy and ratio that a budget allows, by what the referee measured for the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from kvrag.errors import ParameterError
from kvrag.fusion.policies.base import (
    PromptRows,
    RecomputePolicy,
    Resolved,
    check_ratio,
    mean_count,
    share_of,
)
from kvrag.fusion.policies.none import NonePolicy
from kvrag.loading.cost import ChunkDecision

if TYPE_CHECKING:
    from kvrag.fusion.calibration import Calibration, Estimate, Measured

# Estimates that differ by less are taken for the same.
_SAME = 1.02


@dataclass(frozen=True)
class AutoPolicy(RecomputePolicy):
    """Choose policy and ratio for each prompt, from a calibration.

    Of what the budget allows, the cheapest that loses no more than `loss` is taken; where all lose
    more, the one that loses least; where the budget allows nothing, the cheapest of all. Where it
    was measured what loading costs, a policy that loses less and hides behind loading is taken in
    place of the cheapest.

    Source: CacheBlend (arXiv 2405.16444) §5.1, the loading controller: the share at which computing
    takes as long as loading, and no less than quality needs. Deviations: the criterion is chosen as
    well as the share, among those that were measured; quality is measured for the model instead of
    assumed.

    Parameters
    ----------
    ratio
        Greatest share of the reused tokens that may be computed again; None sets no bound.
    ttft
        Seconds that fusing may take, as the calibration's machine would; None sets no bound.
    loss
        Share of full prefill's quality that may be lost.
    calibration
        What was measured for the model.
    """

    name: ClassVar[str] = "auto"
    ratio: float | None = None
    ttft: float | None = None
    loss: float = 0.01
    calibration: Calibration | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio is not None:
            check_ratio(self.ratio)
        if self.ttft is not None and not 0.0 < self.ttft < math.inf:
            raise ParameterError(f"auto ttft {self.ttft}: expected seconds above 0, and finite")
        if not 0.0 <= self.loss <= 1.0:
            raise ParameterError(f"auto loss {self.loss}: expected a share between 0 and 1")

    def require_calibration(self) -> Calibration:
        """Return the calibration; ParameterError when there is none."""
        if self.calibration is None or not self.calibration.policies:
            raise ParameterError(
                "policy 'auto' chooses by what was measured for the model: run 'kvrag calibrate'"
            )
        return self.calibration

    def calibrated(self, load: Callable[[], Calibration | None]) -> RecomputePolicy:
        found = self if self.calibration is not None else replace(self, calibration=load())
        found.require_calibration()
        return found

    @property
    def weighs_loading(self) -> bool:
        return self.calibration is not None and self.calibration.loading is not None

    def decide(self, prompt: PromptRows, num_fresh: int) -> Sequence[ChunkDecision]:
        """Compute the chunks without whose loading the prompt is expected to be done sooner.

        They are taken in the order of what computing saves, as many as make the estimate of the
        whole prompt least: a chunk that is slower to load than to compute is loaded all the same
        where that hides behind what is computed anyway.

        Source: CacheBlend §5.1 weighs loading against computing for a whole prompt. Deviation:
        chunk by chunk, by where each of them is.
        """
        calibration = self.require_calibration()
        loading = calibration.loading
        if loading is None or not prompt.records:
            return ()
        records = prompt.records
        per_token = calibration.cost.seconds_per_row * prompt.num_layers
        decisions = [
            ChunkDecision(
                chunk_id=record.chunk_id,
                tier=len(loading.tiers) - 1 if record.tier is None else record.tier,
                num_tokens=record.num_rows,
                is_computed=False,
                expected_load_seconds=loading.tier(record.tier).of(record.num_rows),
                expected_compute_seconds=per_token * record.num_rows,
            )
            for record in records
        ]
        saved = [one.expected_load_seconds - one.expected_compute_seconds for one in decisions]
        order = sorted(range(len(saved)), key=saved.__getitem__, reverse=True)
        policy = self._choose(prompt, num_fresh, is_free=False)[1]
        seconds = [calibration.estimate(policy, prompt, num_fresh).seconds]
        for number in order:
            prompt = prompt.without(records[number])
            num_fresh += records[number].num_rows
            repairing = policy if prompt.spans else NonePolicy()
            seconds.append(calibration.estimate(repairing, prompt, num_fresh).seconds)
        num_computed = min(range(len(seconds)), key=seconds.__getitem__)
        if _SAME * seconds[num_computed] < seconds[0]:
            for number in order[:num_computed]:
                decisions[number] = replace(decisions[number], is_computed=True)
        return decisions

    def resolve(self, prompt: PromptRows, num_fresh: int) -> Resolved:
        # What hides behind loading is free: the least loss for the same time is taken.
        is_free = self.weighs_loading
        loss, policy, found = self._choose(prompt, num_fresh, is_free=is_free)
        return Resolved(policy, loss, found.seconds, found.load_seconds)

    def _choose(
        self, prompt: PromptRows, num_fresh: int, *, is_free: bool
    ) -> tuple[float, RecomputePolicy, Estimate]:
        """Return the loss, the policy and its estimate that the budget allows.

        With `is_free`, what is as fast as the cheapest may be taken in its place.
        """
        calibration = self.require_calibration()
        if not prompt.spans:
            # Nothing is off, so nothing is lost.
            nothing = NonePolicy()
            return 0.0, nothing, calibration.estimate(nothing, prompt, num_fresh)
        most_tokens = math.inf if self.ratio is None else share_of(self.ratio, prompt.num_reused)
        most_seconds = math.inf if self.ttft is None else self.ttft
        estimates: dict[Measured, Estimate] = {}
        policies: dict[Measured, RecomputePolicy] = {}
        allowed = []
        for measured in calibration.policies:
            policy = policies[measured] = measured.make()
            estimates[measured] = calibration.estimate(policy, prompt, num_fresh)
            num_tokens = mean_count(planned_counts(policy, prompt))
            if num_tokens <= most_tokens and estimates[measured].seconds <= most_seconds:
                allowed.append(measured)
        good = [measured for measured in allowed if measured.loss <= self.loss]
        if good:
            chosen = min(good, key=lambda measured: (estimates[measured].seconds, measured.loss))
            if is_free:
                limit = _SAME * estimates[chosen].seconds
                free = [measured for measured in good if estimates[measured].seconds <= limit]
                chosen = min(free, key=lambda one: (one.loss, estimates[one].seconds))
        elif allowed:
            chosen = min(allowed, key=lambda one: (one.loss, estimates[one].seconds))
        else:
            chosen = min(estimates, key=lambda measured: estimates[measured].seconds)
        return chosen.loss, policies[chosen], estimates[chosen]

    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        raise NotImplementedError("auto names no tokens itself: it is resolved first")


def planned_rows(policy: RecomputePolicy, prompt: PromptRows, num_fresh: int) -> int:
    """Return the rows, summed over layers, that a prompt will cost, before it is fused."""
    asked = policy.question_layers(prompt.num_layers).stop * num_fresh
    return asked + num_fresh * prompt.num_layers + sum(planned_counts(policy, prompt))


def planned_counts(policy: RecomputePolicy, prompt: PromptRows) -> Sequence[int]:
    """Return how many reused tokens each layer will compute again, before the question's look."""
    counts = policy.counts(prompt)
    return [policy.num_candidates(prompt)] * prompt.num_layers if counts is None else counts
