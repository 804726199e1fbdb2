"""What a recompute policy is: one small class that says which reused tokens are computed again."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

import torch

from kvrag.errors import ParameterError
from kvrag.fusion.layout import ReusedSpan
from kvrag.parameters import check_fields, describe


@dataclass(frozen=True)
class PromptRows:
    """What a policy may know before it names its candidates.

    Attributes
    ----------
    num_tokens
        N.
    num_layers
        L.
    spans
        Stretches of reused tokens that are not exact, in prompt order.
    relevance
        ``[M, n]`` float32, over the tokens of `reused`: what the question gathers from each in the
        M layers that the policy looks at (see `QuestionAttention`); None where it looks at none.
    """

    num_tokens: int
    num_layers: int
    spans: tuple[ReusedSpan, ...]
    relevance: torch.Tensor | None = None

    def reused(self) -> torch.Tensor:
        """Return the ascending positions ``[n]`` of all tokens in `spans`."""
        if not self.spans:
            return torch.empty(0, dtype=torch.long)
        return torch.cat([torch.arange(span.prompt_start, span.prompt_end) for span in self.spans])

    @property
    def num_reused(self) -> int:
        """N."""
        return sum(span.length for span in self.spans)


@dataclass(frozen=True)
class CandidateStats:
    """What a policy knows about ``m`` candidates when it has to drop some of them.

    Attributes
    ----------
    positions
        ``[m]`` ascending.
    deviation
        ``[m]`` float32 each, squared L2 distances over heads and channels. Either ``"k"`` and
        ``"v"``: stored against fresh keys (values) in the layer computed last. Or
        ``"attention"``: what a candidate gathers in layer 0 from all tokens, against what it
        gathers from its own chunk.
    """

    positions: torch.Tensor
    deviation: Mapping[str, torch.Tensor]


class RecomputePolicy(ABC):
    """Chooses reused tokens to compute again.

    A policy is a frozen dataclass of its parameters. It names candidates before the first layer;
    what `counts` then takes away from layer to layer is what scores lowest.

    Raises
    ------
    ParameterError
        For a parameter of another type than its field's, or out of range.
    """

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_fields(self, "policy")

    def question_layers(self, num_layers: int) -> range:  # noqa: ARG002
        """Return the layers in which the question's attention is wanted before `candidates`.

        The question is then computed over the stored KV of all layers up to the last of them.
        """
        return range(0)

    @abstractmethod
    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        """Return ascending positions ``[n]`` of reused tokens computed from the first layer on."""

    def num_candidates(self, prompt: PromptRows) -> int:
        """Return how many there are; asked many times where policies are weighed."""
        return len(self.candidates(prompt))

    def counts(self, prompt: PromptRows) -> Sequence[int] | None:  # noqa: ARG002
        """Return how many candidates each of the L layers computes, or None: all of them in all.

        A layer never computes more than the layer before it. The first layer that computes fewer
        is where the policy chooses. In layer 0 it chooses by what the candidates gather there;
        in a later layer by their fresh K/V, which stay in the buffer even for those it drops.
        A model whose attention cannot be compared puts a choice in layer 0 off to layer 1.
        """
        return None

    def score(self, prompt: PromptRows, stats: CandidateStats) -> torch.Tensor:
        """Return ``[m]`` float32: the higher, the longer a candidate stays."""
        raise NotImplementedError(f"{self.name} drops no candidates")

    def __str__(self) -> str:
        return describe(self)


def planned_counts(policy: RecomputePolicy, prompt: PromptRows) -> Sequence[int]:
    """Return how many reused tokens each layer will recompute, before the question is asked."""
    counts = policy.counts(prompt)
    return [policy.num_candidates(prompt)] * prompt.num_layers if counts is None else counts


def planned_rows(policy: RecomputePolicy, prompt: PromptRows, num_fresh: int) -> int:
    """Return the rows, summed over layers, that a prompt will cost, before it is fused."""
    asked = policy.question_layers(prompt.num_layers).stop * num_fresh
    return asked + num_fresh * prompt.num_layers + sum(planned_counts(policy, prompt))


def chooses_by_attention(policy: RecomputePolicy, prompt: PromptRows) -> bool:
    """Return whether the policy drops candidates in layer 0 already, by what they gather there."""
    counts = policy.counts(prompt)
    return counts is not None and counts[0] < policy.num_candidates(prompt)


def num_whole_layers(policy: RecomputePolicy, prompt: PromptRows) -> int:
    """Return how many layers, from the first on, recompute all reused tokens.

    Nothing has to be loaded for those layers.
    """
    num_reused = prompt.num_reused
    if policy.question_layers(prompt.num_layers) or policy.num_candidates(prompt) < num_reused:
        return 0
    num_whole = sum(1 for _ in takewhile(num_reused.__eq__, planned_counts(policy, prompt)))
    # To be compared, all of them are computed in layer 0, whatever is dropped there.
    return max(num_whole, int(chooses_by_attention(policy, prompt)))


def check_ratio(ratio: float) -> None:
    """Raise ParameterError unless `ratio` lies in 0..1."""
    if not 0.0 <= ratio <= 1.0:
        raise ParameterError(f"ratio {ratio}: expected a share between 0 and 1")


def share_of(ratio: float, num_tokens: int) -> int:
    """Return how many of so many tokens a ratio allows, rounded up."""
    # 0.15 * 100 is a little over 15 in binary; that little is not another token.
    return min(num_tokens, math.ceil(ratio * num_tokens - 1e-9))


def mean_count(counts: Sequence[int]) -> int:
    """Return how many tokens a layer computes again in the mean, all layers but the first.

    Rounded up: what is computed in one layer only is not nothing. In the first layer K/V depend on
    no other token: what is computed there is not repaired, but needed by those that choose behind
    it.
    """
    counted = counts[1:] or counts
    return math.ceil(sum(counted) / len(counted))


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ascending indices of the `count` highest scores; of equals, the first."""
    return scores.sort(descending=True, stable=True).indices[:count].sort().values
