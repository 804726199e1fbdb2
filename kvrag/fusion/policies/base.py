"""What a recompute policy is: one small class that says which reused tokens are computed again."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from kvrag.errors import ParameterError
from kvrag.fusion.layout import ReusedSpan
from kvrag.loading.cost import ChunkDecision
from kvrag.models.scaling import KeyScaling
from kvrag.parameters import check_fields, describe

if TYPE_CHECKING:
    from kvrag.fusion.calibration import Calibration


@dataclass(frozen=True)
class StoredRows:
    """A record of a prompt, and what the prompt takes of it.

    Attributes
    ----------
    chunk_id, context_ids
        Which record: the chunk's that was encoded behind these tokens.
    num_rows
        Rows that the prompt takes.
    tier
        Of the store, where it would be loaded from, 0 the fastest; None where that is not known.
    """

    chunk_id: str
    context_ids: tuple[int, ...]
    num_rows: int
    tier: int | None = None


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
    records
        What is loaded for the prompt, exact ones too.
    """

    num_tokens: int
    num_layers: int
    spans: tuple[ReusedSpan, ...]
    relevance: torch.Tensor | None = None
    records: tuple[StoredRows, ...] = ()

    def without(self, record: StoredRows) -> PromptRows:
        """Return the prompt with a record's tokens computed."""
        return replace(
            self,
            spans=tuple(
                span
                for span in self.spans
                if (span.chunk_id, span.context_ids) != (record.chunk_id, record.context_ids)
            ),
            records=tuple(one for one in self.records if one is not record),
        )

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
class Seen:
    """What a policy knows of ``m`` candidates when some of them are to be dropped.

    Attributes
    ----------
    positions
        ``[m]`` ascending.
    deviation
        ``[m]`` float32 each, squared L2 distances over heads and channels: either ``"k"`` and
        ``"v"``, of stored and fresh keys (values) in the layer computed last, or ``"attention"``,
        of what candidates gather in layer 0 from all tokens and from their own chunk's.
    """

    positions: torch.Tensor
    deviation: Mapping[str, torch.Tensor]


class Resolved(NamedTuple):
    """A policy for one prompt.

    Attributes
    ----------
    policy
        Repairs it.
    loss
        Share of full prefill's quality that is expected to be lost; None where that is not known.
    seconds, load_seconds
        What the prompt is expected to take, and the loading in it, hidden or not; None likewise.
    """

    policy: RecomputePolicy
    loss: float | None = None
    seconds: float | None = None
    load_seconds: float | None = None


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

    def calibrated(
        self,
        load: Callable[[], Calibration | None],  # noqa: ARG002
    ) -> RecomputePolicy:
        """Return the policy with what `load` returns, if it chooses by that and has none yet.

        Raises ParameterError where nothing was measured.
        """
        return self

    @property
    def weighs_loading(self) -> bool:
        """Whether `decide` has something to say; only then is it asked where records are."""
        return False

    def decide(
        self,
        prompt: PromptRows,  # noqa: ARG002
        num_fresh: int,  # noqa: ARG002
    ) -> Sequence[ChunkDecision]:
        """Return of each of the prompt's records whether it is loaded or computed.

        Nothing means that all are loaded. Computing instead of loading is always right.

        Parameters
        ----------
        prompt
            Without the question's look, and before any record was opened.
        num_fresh
            Tokens that are computed in any case.
        """
        return ()

    def resolve(
        self,
        prompt: PromptRows,  # noqa: ARG002
        num_fresh: int,  # noqa: ARG002
    ) -> Resolved:
        """Return the policy that repairs this prompt, and what is to be expected if it is known.

        The policy is itself, unless it leaves the work to another.

        Parameters
        ----------
        prompt
            Without the question's look.
        num_fresh
            Tokens that are computed in any case.
        """
        return Resolved(self)

    def scaling(self) -> KeyScaling | None:
        """Return how tokens that stay reused are attended to; None: as all others are."""
        return None

    @abstractmethod
    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        """Return ascending positions ``[n]`` of reused tokens computed from the first layer on."""

    def num_whole_layers(self, prompt: PromptRows) -> int:
        """Return in how many layers, from the first on, all reused tokens are computed again.

        Of those layers nothing has to be loaded.
        """
        num_reused = prompt.num_reused
        if self.question_layers(prompt.num_layers) or self.num_candidates(prompt) < num_reused:
            return 0
        counts = self.counts(prompt)
        if counts is None:
            return prompt.num_layers
        num_whole = sum(1 for _ in takewhile(lambda count: count == num_reused, counts))
        # To be compared all have to be computed in layer 0, whatever is dropped there.
        return max(num_whole, int(self.compares_attention))

    @property
    def compares_attention(self) -> bool:
        """Whether the first choice is made in layer 0, by what candidates gather there.

        Otherwise it is made by their K/V in the first layer that is to compute fewer. Of models
        whose attention cannot be compared it is put off to layer 1 and made by K/V as well.
        """
        return False

    def num_candidates(self, prompt: PromptRows) -> int:
        """Return how many there are; asked many times where policies are weighed."""
        return len(self.candidates(prompt))

    def counts(self, prompt: PromptRows) -> Sequence[int] | None:  # noqa: ARG002
        """Return how many candidates each of the L layers computes, or None: all of them in all.

        Never more than in the layer before. In the first layer that has fewer, the K/V of those
        dropped are fresh all the same: they are what the choice is made by.
        """
        return None

    def score(self, prompt: PromptRows, seen: Seen) -> torch.Tensor:
        """Return ``[m]`` float32: the higher, the longer a candidate stays."""
        raise NotImplementedError(f"{self.name} drops no candidates")

    def __str__(self) -> str:
        return describe(self)


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
