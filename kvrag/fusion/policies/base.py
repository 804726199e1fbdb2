"""The base class of recompute policies, and ``none``; turns a ratio into a number of tokens."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

import numpy as np
import torch

from kvrag.errors import ParameterError
from kvrag.fusion.layout import ReusedSpan
from kvrag.optiontable import check_fields, describe


@dataclass(frozen=True)
class PromptRows:
    """The input of a policy before it chooses its candidates.

    Attributes
    ----------
    num_tokens
        N, the number of rows in the prompt.
    num_layers
        L, the number of layers.
    spans
        Spans of reused tokens that are not exact, in prompt order.
    relevance
        ``[M, n]`` float32, over the tokens of `reused`: how much the question gathers from each in
        the M layers that the policy observes (see `QuestionAttention`); None if it observes none.
    num_leading
        Rows before all of `spans` that are computed in any case: a look at all layers settles them.
    """

    num_tokens: int
    num_layers: int
    spans: tuple[ReusedSpan, ...]
    relevance: torch.Tensor | None = None
    num_leading: int = 0

    def reused(self) -> torch.Tensor:
        """Return the ascending positions ``[n]`` of all tokens in `spans`."""
        return joined_ranges(range(one.prompt_start, one.prompt_end) for one in self.spans)

    @property
    def num_reused(self) -> int:
        """Number of tokens in `spans`."""
        return sum(span.length for span in self.spans)


@dataclass(frozen=True)
class CandidateStats:
    """A policy's knowledge about its ``m`` candidates when it has to drop some of them.

    Attributes
    ----------
    positions
        ``[m]``: ascending positions of the candidates.
    deviation
        ``"k"`` and ``"v"``: squared L2 distances over heads and channels, ``[m]`` float32 each,
        between stored and fresh keys (values) in the layer computed last.
    """

    positions: torch.Tensor
    deviation: Mapping[str, torch.Tensor]


class RecomputePolicy(ABC):
    """Chooses reused tokens to compute again.

    A policy is a frozen dataclass of its parameters. It chooses candidates before the first layer.
    From layer to layer, as `counts` falls, the candidates with the lowest scores are dropped.

    Raises
    ------
    ParameterError
        If a parameter has another type than its field, or is out of range.
    """

    name: ClassVar[str]

    @property
    def looks_back(self) -> bool:
        """Whether it recomputes the same tokens of a span whatever follows the span."""
        return False

    def __post_init__(self) -> None:
        check_fields(self, "policy")

    def question_layers(self, num_layers: int) -> range:  # noqa: ARG002
        """Return the layers in which to observe the question's attention before `candidates`.

        The question is then computed over the stored KV of all layers up to the last of these.
        """
        return range(0)

    def kept_layers(self, num_layers: int) -> int:  # noqa: ARG002
        """Return in how many first layers the question stays as it was then computed.

        They are fewer than the layers that it was computed in.
        """
        return 0

    @abstractmethod
    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        """Return the ascending positions ``[n]`` of reused tokens to compute from layer 0 on."""

    def num_candidates(self, prompt: PromptRows) -> int:
        """Return the number of candidates; a controller that compares policies calls this often."""
        return len(self.candidates(prompt))

    def counts(self, prompt: PromptRows) -> Sequence[int] | None:  # noqa: ARG002
        """Return the number of candidates to compute in each of the L layers; None means all.

        A layer never computes more candidates than the layer before it. The policy chooses in the
        first layer that computes fewer, from layer 1 on: by their fresh K/V, which stay in the
        buffer even for dropped candidates. K/V of layer 0 never differ.
        """
        return None

    def score(self, prompt: PromptRows, stats: CandidateStats) -> torch.Tensor:
        """Return ``[m]`` float32: candidates with higher scores are kept longer."""
        raise NotImplementedError(f"{self.name} drops no candidates")

    def __str__(self) -> str:
        return describe(self)


def joined_ranges(ranges: Iterable[range]) -> torch.Tensor:
    """Return the numbers of ranges ``[n]``, one range after the other."""
    # torch takes ten times as long to make a range.
    parts = [np.arange(one.start, one.stop) for one in ranges]
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts]))


def planned_counts(policy: RecomputePolicy, prompt: PromptRows) -> Sequence[int]:
    """Return how many reused tokens each layer will recompute.

    It needs no observation of the question.
    """
    counts = policy.counts(prompt)
    return [policy.num_candidates(prompt)] * prompt.num_layers if counts is None else counts


def planned_rows(policy: RecomputePolicy, prompt: PromptRows, num_fresh: int) -> int:
    """Return how many rows, summed over layers, fusing a prompt will compute at most."""
    asked = policy.question_layers(prompt.num_layers).stop * num_fresh
    again = sum(fresh_rows(policy, prompt, num_fresh))
    return asked + again + sum(planned_counts(policy, prompt))


def fresh_rows(policy: RecomputePolicy, prompt: PromptRows, num_fresh: int) -> list[int]:
    """Return how many rows each layer computes, at most, besides chosen ones and the look's."""
    num_layers = prompt.num_layers
    looked = policy.question_layers(num_layers).stop
    kept = policy.kept_layers(num_layers) if looked else 0
    num_question = num_fresh - prompt.num_leading
    return [
        num_question * (layer >= kept) + prompt.num_leading * (layer >= looked)
        for layer in range(num_layers)
    ]


def num_whole_layers(policy: RecomputePolicy, prompt: PromptRows) -> int:
    """Return the number of first layers that recompute all reused tokens.

    These layers need no stored KV.
    """
    num_reused = prompt.num_reused
    if policy.question_layers(prompt.num_layers) or policy.num_candidates(prompt) < num_reused:
        return 0
    return sum(1 for _ in takewhile(num_reused.__eq__, planned_counts(policy, prompt)))


def check_ratio(ratio: float) -> None:
    """Raise ParameterError unless `ratio` is between 0 and 1."""
    if not 0.0 <= ratio <= 1.0:
        raise ParameterError(f"ratio {ratio}: expected a share between 0 and 1")


def share_of(ratio: float, num_tokens: int) -> int:
    """Return how many of `num_tokens` tokens a ratio allows, rounded up."""
    # The tolerance keeps a rounding error of the product from adding a token.
    return min(num_tokens, math.ceil(ratio * num_tokens - 1e-9))


def mean_count(counts: Sequence[int]) -> int:
    """Return the mean number of tokens recomputed per layer, without the first layer.

    It is rounded up, so that computing in one layer only does not count as nothing. The first
    layer's K/V depend on no other token: computing there repairs nothing, and only serves policies
    that choose in a later layer.
    """
    counted = counts[1:] or counts
    return math.ceil(sum(counted) / len(counted))


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ascending indices of the `count` highest scores; ties take the first."""
    return scores.sort(descending=True, stable=True).indices[:count].sort().values


@dataclass(frozen=True)
class NonePolicy(RecomputePolicy):
    """Reuse stored KV as it is, at its new positions (Prompt Cache §3; KVLink without links)."""

    name: ClassVar[str] = "none"

    @property
    def looks_back(self) -> bool:
        return True

    def candidates(self, prompt: PromptRows) -> torch.Tensor:  # noqa: ARG002
        return torch.empty(0, dtype=torch.long)
