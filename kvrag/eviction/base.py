"""What an eviction policy is: one small class that says which keys of a head are forgotten."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.errors import ParameterError
from kvrag.parameters import check_fields, describe


@dataclass(frozen=True)
class HeldKeys:
    """The keys of A key heads of one layer, in K slots each.

    In a batch the heads of all prompts stand one after another. Keys are numbered within their
    prompt, padding left out; the numbers have nothing to do with positions, which are in the keys.

    Attributes
    ----------
    places
        ``[A, K]`` int64: how many tokens of its prompt came before the key's.
    held
        ``[A, K]`` bool: which slots hold a key.
    marks
        ``[A, K]`` float32: a policy's own note of each key, 0 at first; it follows the key.
    num_seen
        ``[A, 1]`` int64: tokens of the head's prompt and answer so far.
    num_prompt
        ``[A, 1]`` int64: of these, the prompt's.
    num_noted
        ``[A, 1]`` int64: queries that the policy was shown.
    """

    places: torch.Tensor
    held: torch.Tensor
    marks: torch.Tensor
    num_seen: torch.Tensor
    num_prompt: torch.Tensor
    num_noted: torch.Tensor

    def part(self, heads: slice, slots: slice) -> HeldKeys:
        """Return some heads and slots as views: what is noted there is noted here."""
        return HeldKeys(
            self.places[heads, slots],
            self.held[heads, slots],
            self.marks[heads, slots],
            self.num_seen[heads],
            self.num_prompt[heads],
            self.num_noted[heads],
        )

    def first(self, num_slots: int) -> HeldKeys:
        """Return the first slots of all heads, as views."""
        return HeldKeys(
            self.places[:, :num_slots],
            self.held[:, :num_slots],
            self.marks[:, :num_slots],
            self.num_seen,
            self.num_prompt,
            self.num_noted,
        )

    def is_recent(self, count: int | torch.Tensor) -> torch.Tensor:
        """Return ``[A, K]`` bool: which keys are among the last `count` (an int or ``[A, 1]``)."""
        return self.places >= self.num_seen - count


class EvictionPolicy(ABC):
    """Chooses keys to forget. A policy is a frozen dataclass of its parameters and holds no state.

    Raises
    ------
    ParameterError
        For a parameter of another type than its field's, or out of range.
    """

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_fields(self, "eviction")

    @property
    def num_queries(self) -> int:
        """Of the prompt's last queries, how many `note` is shown; of each decoded one always."""
        return 0

    def note(  # noqa: B027 (many policies do without)
        self, keys: HeldKeys, weights: torch.Tensor, num_visible: torch.Tensor
    ) -> None:
        """Take note, in ``keys.marks``, of what some queries attend to.

        Parameters
        ----------
        keys
            ``num_noted`` counts the queries before these.
        weights
            ``[A, G, q, K]`` float32: attention weights of q queries in order, G query heads that
            share each key head. 0 where a query does not see a key, or a slot holds none.
        num_visible
            ``[A, q]`` int64: keys that each query sees.
        """

    @abstractmethod
    def after_prompt(self, keys: HeldKeys) -> torch.Tensor | None:
        """Return ``[A, K]`` bool, which keys go once the prompt is there; None: no key."""

    def after_step(self, keys: HeldKeys) -> torch.Tensor | None:
        """Return likewise which keys go once another token is there."""
        return self.after_prompt(keys)

    def __str__(self) -> str:
        return describe(self)


MAX_COUNT = 1 << 31
"""Of keys or queries; the sum of two fits what counts them."""


def check_counts(policy: EvictionPolicy, at_least: int = 1, **counts: int) -> None:
    """Raise ParameterError unless every count is `at_least` that and at most `MAX_COUNT`."""
    for name, count in counts.items():
        if not at_least <= count <= MAX_COUNT:
            bound = f"{at_least} or more" if count < at_least else f"{MAX_COUNT} at the most"
            raise ParameterError(f"eviction {policy.name!r}: {name}={count}: expected {bound}")


def check_budget(policy: EvictionPolicy, share: float | None, **counts: int | None) -> None:
    """Raise ParameterError unless a policy says what it keeps in one way.

    Parameters
    ----------
    share
        Of the prompt's keys, above 0 and at most 1; or None.
    counts
        What it stands in place of: 1 or more each where there is no share, else None.
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
            f"eviction {policy.name!r}: share={share} stands in place of {', '.join(given)}: leave "
            "one out"
        )


def budget_of(keys: HeldKeys, share: float | None, tokens: int) -> torch.Tensor:
    """Return ``[A, 1]`` int64: keys that a head may keep, a share of the prompt's or so many.

    Parameters
    ----------
    share
        Of the prompt's tokens, rounded up; None takes `tokens`.
    """
    if share is None:
        return torch.full_like(keys.num_prompt, tokens)
    # 0.15 * 100 is a little over 15 in binary; that little is not another key.
    budgets = [math.ceil(share * count - 1e-9) for count in keys.num_prompt[:, 0].tolist()]
    return torch.tensor(budgets, device=keys.num_prompt.device)[:, None]


def lowest(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor | None:
    """Return which scores of each row are its lowest ones; None where no row has any to name.

    Parameters
    ----------
    scores
        ``[A, K]`` float32.
    counts
        ``[A, 1]`` int64: how many of each row, below 1 none.
    """
    most = int(counts.max())
    if most < 1:
        return None
    # Of equal scores the first go, whatever stands beside them: answers have to come again.
    if most == 1:
        order = scores.argmin(1, keepdim=True)
    else:
        order = scores.sort(dim=1, stable=True).indices[:, :most]
    among = torch.arange(order.shape[1], device=scores.device) < counts
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, among)
