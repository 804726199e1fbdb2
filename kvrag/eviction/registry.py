"""The eviction policies: CORM, H2O, SnapKV and StreamingLLM, by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch.nn.functional import max_pool1d

from kvrag.arguments import cut, shown
from kvrag.errors import ParameterError
from kvrag.eviction import NO_EVICTION
from kvrag.eviction.base import (
    EvictionPolicy,
    HeldKeys,
    budget_of,
    check_budget,
    check_counts,
    lowest,
)
from kvrag.optiontable import parse_spec


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


@dataclass(frozen=True)
class CormPolicy(EvictionPolicy):
    """Forget long-term minor keys.

    Source: Dai et al., *Sequence can Secretly Tell You What to Discard* (arXiv 2404.15949) §4. A
    query sees t keys. A key is important to the query if it gets at least 1/t of its attention;
    otherwise it is minor. A key that was minor to all of the last `window` queries is forgotten,
    unless it is among the last `recent` keys. Nothing is forgotten before `window` queries have
    been recorded; the prompt's last queries are the first of them.

    Deviations, where the paper is silent: t counts the keys that the head still holds (with a
    sliding window, those within it). If query heads share a key head, a key that is important to
    one of them is important.

    Evicting keys while the prompt is computed would change the queries after them. Here the whole
    prompt attends to the whole prompt, and keys are evicted at its end.

    Parameters
    ----------
    window
        Queries on record, 1 or more (the paper's first 256).
    recent
        Last keys that are always kept, 1 or more (the paper's second 256).
    threshold
        A factor for 1/t, above 0. 1 is the paper's rule; a larger factor forgets more.
    """

    name: ClassVar[str] = "corm"
    window: int = 256
    recent: int = 256
    threshold: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, window=self.window, recent=self.recent)
        if not 0.0 < self.threshold < math.inf:
            raise ParameterError(
                f"eviction 'corm': threshold={self.threshold}: expected more than 0, and finite"
            )

    @property
    def num_queries(self) -> int:
        return self.window

    def note(self, keys: HeldKeys, weights: torch.Tensor, num_visible: torch.Tensor) -> None:
        # A key's mark is the number, counted from 1, of the last query that found it important.
        important = weights.amax(1) >= (self.threshold / num_visible)[:, :, None]
        if weights.shape[2] == 1:
            torch.where(important[:, 0], keys.num_noted + 1.0, keys.marks, out=keys.marks)
            return
        numbers = keys.num_noted + torch.arange(1, weights.shape[2] + 1, device=weights.device)
        latest = torch.where(important, numbers[:, :, None], 0).amax(1)
        torch.maximum(keys.marks, latest.to(keys.marks.dtype), out=keys.marks)

    def after_prompt(self, keys: HeldKeys) -> torch.Tensor:
        # Marks are 0 or more, so before `window` queries nothing is forgotten. This runs at every
        # step, so it uses few large operations.
        oldest = keys.num_noted - self.window
        gone = keys.marks <= oldest.masked_fill(oldest < 0, -1)
        gone &= keys.places < keys.num_seen - self.recent
        return gone.logical_and_(keys.held)


_CLASSES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy for policy in (CormPolicy, StreamingPolicy, H2OPolicy, SnapKVPolicy)
}

EVICTIONS: tuple[str, ...] = (NO_EVICTION, *_CLASSES)


def make_eviction(spec: str | EvictionPolicy | None) -> EvictionPolicy | None:
    """Return the policy that `spec` names, such as ``"corm"`` or ``"corm:window=256:recent=256"``.

    Parameters
    ----------
    spec
        A name from `EVICTIONS`, followed by parameters, each after a colon. A policy is returned
        unchanged. ``"none"`` and None mean the full cache.

    Raises
    ------
    ParameterError
        For an unknown name, a value out of range, or a parameter that the policy does not have.
    """
    if spec is None or isinstance(spec, EvictionPolicy):
        return spec
    name, given = parse_spec(spec, "eviction", EVICTIONS)
    if name == NO_EVICTION:
        if given:
            raise ParameterError(f"eviction {shown(spec)}: {NO_EVICTION!r} takes no parameters")
        return None
    policy: Any = _CLASSES[name]
    accepted = [field.name for field in fields(policy)]
    for key in given:
        if key not in accepted:
            raise ParameterError(
                f"eviction {name!r} has no parameter {cut(key)}; it has "
                f"{', '.join(sorted(accepted))}"
            )
    made: EvictionPolicy = policy(**given)
    return made
