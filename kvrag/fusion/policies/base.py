"""What a recompute policy is: one small class that says which reused tokens are computed again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from kvrag.errors import ParameterError
from kvrag.fusion.layout import ReusedSpan


@dataclass(frozen=True)
class PromptRows:
    """What a policy may know before any layer has run.

    Attributes
    ----------
    num_tokens
        N.
    spans
        Stretches of reused tokens that are not exact, in prompt order.
    """

    num_tokens: int
    spans: tuple[ReusedSpan, ...]

    def reused(self) -> torch.Tensor:
        """Return the ascending positions ``[n]`` of all tokens in `spans`."""
        if not self.spans:
            return torch.empty(0, dtype=torch.long)
        return torch.cat([torch.arange(span.prompt_start, span.prompt_end) for span in self.spans])


class RecomputePolicy(ABC):
    """Chooses reused tokens to compute again.

    A policy is a frozen dataclass of its parameters. It names candidates before the first
    layer; on its check layer, if it has one, it sees how far the stored K/V of the candidates
    are from fresh ones and keeps some. What is kept is computed in that layer and all after it.
    """

    name: ClassVar[str]

    @abstractmethod
    def candidates(self, prompt: PromptRows) -> torch.Tensor:
        """Return ascending positions ``[n]`` of reused tokens computed from the first layer on."""

    @property
    def check_layer(self) -> int | None:
        """The layer before which `keep` is asked, or None where all candidates stay."""
        return None

    def keep(self, key_deviation: torch.Tensor, value_deviation: torch.Tensor) -> torch.Tensor:
        """Return a boolean mask ``[n]`` over the candidates.

        Parameters
        ----------
        key_deviation, value_deviation
            ``[n]`` float32: squared L2 distance, over heads and channels, between stored and
            fresh keys (values) of each candidate in the check layer.
        """
        raise NotImplementedError(f"{self.name} has no check layer")

    def __str__(self) -> str:
        parameters = ", ".join(
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)  # type: ignore[arg-type]  # subclasses are dataclasses
        )
        return f"{self.name}({parameters})" if parameters else self.name


def check_ratio(ratio: float) -> None:
    """Raise ParameterError unless `ratio` lies in 0..1."""
    if not 0.0 <= ratio <= 1.0:
        raise ParameterError(f"ratio {ratio}: expected a share between 0 and 1")
