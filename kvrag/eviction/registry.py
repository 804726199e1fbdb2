"""The eviction policies by name: CORM, and those of `kvrag_testing.baselines`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from kvrag.arguments import cut, shown
from kvrag.errors import ParameterError
from kvrag.eviction import NO_EVICTION
from kvrag.eviction.base import EvictionPolicy, HeldKeys, check_counts
from kvrag.optiontable import parse_spec
from kvrag.plugins import loaded


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


_CLASSES = {
    "corm": "kvrag.eviction.registry:CormPolicy",
    "streaming": "kvrag_testing.baselines:StreamingPolicy",
    "h2o": "kvrag_testing.baselines:H2OPolicy",
    "snapkv": "kvrag_testing.baselines:SnapKVPolicy",
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
    policy: Any = loaded(_CLASSES[name])
    accepted = [field.name for field in fields(policy)]
    for key in given:
        if key not in accepted:
            raise ParameterError(
                f"eviction {name!r} has no parameter {cut(key)}; it has "
                f"{', '.join(sorted(accepted))}"
            )
    made: EvictionPolicy = policy(**given)
    return made
