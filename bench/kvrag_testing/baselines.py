"""What others do, to compare with: recompute policies and eviction policies by their names.

`kvrag.fusion.policies.registry` and `kvrag.eviction.registry` find them here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import max_pool1d

from kvrag.errors import ParameterError
from kvrag.eviction.base import EvictionPolicy, HeldKeys, check_counts
from kvrag.fusion.policies.base import PromptRows, RecomputePolicy, check_ratio, share_of
from kvrag.fusion.policies.boundary import BoundaryPolicy


@dataclass(frozen=True)
class SeamPolicy(BoundaryPolicy):
    """Compute the first and the last tokens of each chunk again, in every layer.

    Text between chunks (blank lines, headings, the prompt's delimiters) is never stored, so it is
    computed in any case. A chunk's first tokens have lost the text before them, and its last
    tokens are the nearest context of the next chunk's first tokens.

    Parameters
    ----------
    tokens, ratio
        See `BoundaryPolicy`. Half of the tokens (plus one if the number is odd) are at the chunk's
        start, the others at its end.
    """

    name: ClassVar[str] = "seam"

    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        tokens = self.tokens_of(prompt)
        tail = tokens // 2
        head = tokens - tail
        pieces = [torch.empty(0, dtype=torch.long)]
        for span in prompt.spans:
            head_end = min(span.prompt_end, span.prompt_start + head)
            tail_start = max(head_end, span.prompt_end - tail)
            pieces += [
                torch.arange(span.prompt_start, head_end),
                torch.arange(tail_start, span.prompt_end),
            ]
        return torch.cat(pieces)


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


@dataclass(frozen=True)
class StreamingPolicy(EvictionPolicy):
    """Keep attention sinks and a window of recent keys.

    Source: Xiao et al., StreamingLLM (arXiv 2309.17453) §3. Deviation: keys keep their positions.
    The paper renumbers the remaining keys, for texts longer than the model's context.

    Parameters
    ----------
    sinks
        First keys kept, 0 or more.
    recent
        Last keys kept, 1 or more.
    share
        Replaces `recent`: sinks and recent keys together, as a share of the prompt's tokens.
    """

    name: ClassVar[str] = "streaming"
    sinks: int = 4
    recent: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent is None and self.share is None:
            object.__setattr__(self, "recent", 1020)
        check_budget(self, self.share, recent=self.recent)
        check_counts(self, at_least=0, sinks=self.sinks)

    def after_prompt(self, keys: HeldKeys) -> torch.Tensor:
        budget = budget_of(keys, self.share, self.sinks + (self.recent or 0))
        recent = (budget - self.sinks).clamp(min=1)
        return keys.held & (keys.places >= self.sinks) & ~keys.is_recent(recent)


@dataclass(frozen=True)
class SnapKVPolicy(EvictionPolicy):
    """Keep what an observation window at the prompt's end attends to, and the window itself.

    Source: Li et al., SnapKV (arXiv 2404.14469) §4. The window's attention is summed for each key,
    then pooled over neighbours so that kept keys form stretches. The keys with the highest sums are
    kept. Query heads that share a key head count by their mean.

    Parameters
    ----------
    budget
        Keys of the prompt to keep, the window's included, 1 or more; 1024 if no share is given.
    share
        Replaces it: a share of the prompt's tokens.
    window
        Queries of the observation window, 1 or more.
    pool
        Width of the pooling, an odd number of keys.
    """

    name: ClassVar[str] = "snapkv"
    budget: int | None = None
    share: float | None = None
    window: int = 32
    pool: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share is None:
            object.__setattr__(self, "budget", 1024 if self.budget is None else self.budget)
        check_budget(self, self.share, budget=self.budget)
        check_counts(self, window=self.window, pool=self.pool)
        if self.pool % 2 == 0:
            raise ParameterError(f"eviction 'snapkv': pool={self.pool}: expected an odd number")

    @property
    def num_queries(self) -> int:
        return self.window

    def note(self, keys: HeldKeys, weights: torch.Tensor, num_visible: torch.Tensor) -> None:  # noqa: ARG002
        keys.marks.add_(weights.mean(1).sum(1))

    def after_prompt(self, keys: HeldKeys) -> torch.Tensor | None:
        budget = budget_of(keys, self.share, self.budget or 0).clamp(min=1)
        # Slots are still in the order of the prompt.
        pooled = max_pool1d(keys.marks[:, None], self.pool, stride=1, padding=self.pool // 2)[:, 0]
        window = budget.clamp(max=self.window)
        spared = keys.is_recent(window).logical_or_(~keys.held)
        scores = pooled.masked_fill(spared, float("inf"))
        return lowest(scores, keys.held.sum(1, keepdim=True) - budget)

    def after_step(self, keys: HeldKeys) -> None:  # noqa: ARG002
        return None


@dataclass(frozen=True)
class H2OPolicy(EvictionPolicy):
    """Keep heavy hitters and recent keys.

    Source: Zhang et al., H2O (arXiv 2306.14048) §4. A key's score is the attention that it has
    drawn from all queries. Over budget, the key with the lowest score is forgotten at every step.

    Deviations: only the last `window` queries of the prompt count. So no prompt needs all its
    attention weights in memory, and prompts of reused chunks, which have no others, work too. Query
    heads that share a key head count by their mean.

    Parameters
    ----------
    heavy
        Keys kept for their score, 1 or more; 768 if no share is given.
    recent
        Last keys kept, 1 or more; 256 if no share is given.
    share
        Replaces both: the keys kept, as a share of the prompt's tokens; half of them the last ones.
    window
        How many of the prompt's last queries count, 1 or more.
    """

    name: ClassVar[str] = "h2o"
    heavy: int | None = None
    recent: int | None = None
    share: float | None = None
    window: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share is None:
            object.__setattr__(self, "heavy", 768 if self.heavy is None else self.heavy)
            object.__setattr__(self, "recent", 256 if self.recent is None else self.recent)
        check_budget(self, self.share, heavy=self.heavy, recent=self.recent)
        check_counts(self, window=self.window)

    @property
    def num_queries(self) -> int:
        return self.window

    def note(self, keys: HeldKeys, weights: torch.Tensor, num_visible: torch.Tensor) -> None:  # noqa: ARG002
        keys.marks.add_(weights.mean(1).sum(1))

    def after_prompt(self, keys: HeldKeys) -> torch.Tensor | None:
        budget = budget_of(keys, self.share, (self.heavy or 0) + (self.recent or 0))
        recent = budget // 2 if self.recent is None else self.recent
        spared = keys.is_recent(recent).logical_or_(~keys.held)
        scores = keys.marks.masked_fill(spared, float("inf"))
        return lowest(scores, keys.held.sum(1, keepdim=True) - budget.clamp(min=1))


def check_budget(policy: EvictionPolicy, share: float | None, **counts: int | None) -> None:
    """Raise ParameterError unless a policy has either a valid share or valid counts.

    Parameters
    ----------
    share
        The share of the prompt's keys to keep, above 0 and at most 1; or None.
    counts
        The parameters that `share` replaces: None with a share, 1 or more without.
    """
    if share is None:
        check_counts(policy, **{name: count or 0 for name, count in counts.items()})
        return
    if not 0.0 < share <= 1.0:
        raise ParameterError(
            f"eviction {policy.name!r}: share={share}: expected a share above 0, at most 1"
        )
    given = [f"{name}={count}" for name, count in counts.items() if count is not None]
    if given:
        raise ParameterError(
            f"eviction {policy.name!r}: share={share} replaces {', '.join(given)}: leave one out"
        )


def budget_of(keys: HeldKeys, share: float | None, tokens: int) -> torch.Tensor:
    """Return how many keys each head may keep, ``[A, 1]`` int64.

    Parameters
    ----------
    share
        A share of the prompt's tokens, rounded up; None means `tokens`.
    """
    if share is None:
        return torch.full_like(keys.num_prompt, tokens)
    # 0.15 * 100 is slightly more than 15 in binary, which must not round up to 16.
    budgets = [math.ceil(share * count - 1e-9) for count in keys.num_prompt[:, 0].tolist()]
    return torch.tensor(budgets, device=keys.num_prompt.device)[:, None]


def lowest(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor | None:
    """Return the lowest scores of each row, ``[A, K]`` bool; None if all counts are below 1.

    Parameters
    ----------
    scores
        ``[A, K]`` float32.
    counts
        ``[A, 1]`` int64: how many to return for each row; none if below 1.
    """
    most = int(counts.max())
    if most < 1:
        return None
    # Ties go to the first slots, whatever the other rows hold, so that answers are reproducible.
    if most == 1:
        order = scores.argmin(1, keepdim=True)
    else:
        order = scores.sort(dim=1, stable=True).indices[:, :most]
    among = torch.arange(order.shape[1], device=scores.device) < counts
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, among)
