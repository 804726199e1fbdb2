"""The base class of eviction policies, which choose the keys of a head to forget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrag.errors import ParameterError
from kvrag.optiontable import check_fields, describe


@dataclass(frozen=True)
class HeldKeys:
    """The keys of A key heads of one layer, in K slots for each head.

    In a batch, the heads of all prompts follow each other. Keys are numbered within their prompt,
    without padding. These numbers are not positions; keys are already rotated to those.

    Attributes
    ----------
    places
        ``[A, K]`` int64: how many tokens of its prompt came before the key's.
    held
        ``[A, K]`` bool: which slots hold a key.
    marks
        ``[A, K]`` float32: a policy's note about each key, 0 at first. It moves with the key.
    num_seen
        ``[A, 1]`` int64: tokens of the head's prompt and answer so far.
    num_prompt
        ``[A, 1]`` int64: tokens of the head's prompt.
    num_noted
        ``[A, 1]`` int64: queries that the policy has seen.
    """

    places: torch.Tensor
    held: torch.Tensor
    marks: torch.Tensor
    num_seen: torch.Tensor
    num_prompt: torch.Tensor
    num_noted: torch.Tensor

    @classmethod
    def of_prompts(cls, real: torch.Tensor, num_kv_heads: int) -> HeldKeys:
        """Return all keys of prompts; ``real`` ``[B, N]``: which rows are tokens, not padding."""
        held = real.repeat_interleave(num_kv_heads, dim=0)
        num_tokens = held.sum(1, keepdim=True)
        return cls(
            places=held.cumsum(1) - 1,
            held=held,
            marks=torch.zeros(held.shape, device=real.device),
            num_seen=num_tokens,
            num_prompt=num_tokens,
            num_noted=torch.zeros_like(num_tokens),
        )

    def part(self, heads: slice, slots: slice) -> HeldKeys:
        """Return some heads and slots as views: changes to them appear here too."""
        of_slots = (one[heads, slots] for one in (self.places, self.held, self.marks))
        of_heads = (one[heads] for one in (self.num_seen, self.num_prompt, self.num_noted))
        return HeldKeys(*of_slots, *of_heads)

    def first(self, num_slots: int) -> HeldKeys:
        """Return the first slots of all heads, as views."""
        return self.part(slice(None), slice(num_slots))

    def is_recent(self, count: int | torch.Tensor) -> torch.Tensor:
        """Return ``[A, K]`` bool: which keys are among the last `count` (an int or ``[A, 1]``)."""
        return self.places >= self.num_seen - count


class EvictionPolicy(ABC):
    """Chooses keys to forget. A policy is a frozen dataclass of its parameters, without state.

    Raises
    ------
    ParameterError
        For a parameter of the wrong type, or out of range.
    """

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_fields(self, "eviction")

    @property
    def num_queries(self) -> int:
        """How many of the prompt's last queries `note` sees. It sees all decoded queries."""
        return 0

    def note(  # noqa: B027 (many policies do without)
        self, keys: HeldKeys, weights: torch.Tensor, num_visible: torch.Tensor
    ) -> None:
        """Note in ``keys.marks`` what some queries attend to.

        Parameters
        ----------
        keys
            The keys. ``num_noted`` counts the queries before these.
        weights
            ``[A, G, q, K]`` float32: attention weights of q queries in order, for the G query heads
            that share each key head. 0 if a query does not see a key, or a slot holds none.
        num_visible
            ``[A, q]`` int64: keys that each query sees.
        """

    def observe(self, keys: HeldKeys, weights: torch.Tensor, num_visible: torch.Tensor) -> None:
        """Note what the next queries attend to, and count them; parameters as in `note`.

        `num_visible` may be ``[q]``: what all heads see.
        """
        self.note(keys, weights, num_visible.expand(len(weights), -1))
        keys.num_noted.add_(weights.shape[2])

    @abstractmethod
    def after_prompt(self, keys: HeldKeys) -> torch.Tensor | None:
        """Return the keys to forget after the prompt, ``[A, K]`` bool; None for no key."""

    def after_step(self, keys: HeldKeys) -> torch.Tensor | None:
        """Return the keys to forget after each further token, as `after_prompt` does."""
        return self.after_prompt(keys)

    def __str__(self) -> str:
        return describe(self)


MAX_COUNT = 1 << 31
"""The most keys or queries: the sum of two such counts still fits into an int64."""


def check_counts(policy: EvictionPolicy, at_least: int = 1, **counts: int) -> None:
    """Raise ParameterError unless every count is from `at_least` to `MAX_COUNT`."""
    for name, count in counts.items():
        if not at_least <= count <= MAX_COUNT:
            bound = f"{at_least} or more" if count < at_least else f"at most {MAX_COUNT}"
            raise ParameterError(f"eviction {policy.name!r}: {name}={count}: expected {bound}")
