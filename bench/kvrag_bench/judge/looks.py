"""One look at the question for all policies that are judged on a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from kvrag.fusion.fuser import FusedPrompt
from kvrag.fusion.policies.base import CandidateStats, PromptRows, RecomputePolicy
from kvrag.fusion.repair import Repair


class Looks:
    """What the question of one prompt gathers from its stored KV, layer by layer.

    All policies that look see the same, at every ratio, so the first one looks for the others. Only
    for fusions of one layout with the same records and links.

    Parameters
    ----------
    num_layers
        The model's layers.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._relevance: dict[range, torch.Tensor] = {}
        self._seconds_a_layer = 0.0

    def share(self, repair: Repair) -> Repair:
        """Return a repair that does not look where another has looked."""
        layers = repair.policy.question_layers(self._num_layers)
        if layers.stop < self._num_layers:
            return repair  # none, or one that leaves more than what it has seen
        return replace(repair, policy=_Sharing(repair.policy, self, layers))

    def find(self, layers: range) -> torch.Tensor | None:
        """Return the relevance in some layers; None if nobody has looked at all of them."""
        for known, relevance in self._relevance.items():
            if known.start <= layers.start and layers.stop <= known.stop:
                return relevance[layers.start - known.start : layers.stop - known.start]
        return None

    def add(self, layers: range, relevance: torch.Tensor) -> None:
        """Keep what a policy has seen in some layers."""
        self._relevance[layers] = relevance

    def settle(self, fused: FusedPrompt, repair: Repair) -> tuple[FusedPrompt, float]:
        """Count the look of another policy as the prompt's own.

        Parameters
        ----------
        fused
            What a repair that `share` returned made of the prompt.
        repair
            What `share` was given.

        Returns
        -------
        FusedPrompt
            With the report of one that has looked.
        float
            The seconds that it saved.
        """
        report, layers = fused.report, repair.policy.question_layers(self._num_layers)
        if report.rows_asked:
            self._seconds_a_layer = report.seconds["ask"] / layers.stop
        if report.rows_asked or not layers or self.find(layers) is None:
            return fused, 0.0
        num_settled = 0
        if layers.stop == self._num_layers:
            # Its own look would have left these rows as they are.
            first = fused.picks[0][:1].tolist()
            if repair.shift:
                spans = fused.layout.spans
                first = [one.prompt_start for one in spans if not fused.layout.is_exact(one)]
            num_settled = int((fused.fresh < min([*first, int(fused.fresh[-1])])).sum())
        share = 1.0 - num_settled / len(fused.fresh)
        seconds = self._seconds_a_layer * layers.stop * share
        report = replace(
            report,
            rows_by_layer=tuple(rows - num_settled for rows in report.rows_by_layer),
            rows_asked=len(fused.fresh) * layers.stop,
            seconds={**report.seconds, "ask": seconds},
        )
        return replace(fused, report=report), seconds


class _Sharing(RecomputePolicy):
    """A policy that looks, or knows what it would see."""

    name: ClassVar[str] = "sharing a look"

    def __init__(self, policy: RecomputePolicy, looks: Looks, layers: range) -> None:
        self._policy = policy
        self._looks = looks
        self._layers = layers
        self._known = looks.find(layers)

    def question_layers(self, num_layers: int) -> range:  # noqa: ARG002
        return self._layers if self._known is None else range(0)

    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        if prompt.relevance is not None:
            self._looks.add(self._layers, prompt.relevance)
        return self._policy.candidates(self._seen(prompt))

    def num_candidates(self, prompt: PromptRows) -> int:
        # As for a policy that looks: each layer needs its stored KV, none chooses by attention.
        return self._policy.num_candidates(prompt) if self._known is None else 0

    def counts(self, prompt: PromptRows) -> Sequence[int] | None:
        return self._policy.counts(prompt)

    def score(self, prompt: PromptRows, stats: CandidateStats) -> torch.Tensor:
        return self._policy.score(self._seen(prompt), stats)

    def __str__(self) -> str:
        return str(self._policy)

    def _seen(self, prompt: PromptRows) -> PromptRows:
        return prompt if self._known is None else replace(prompt, relevance=self._known)
