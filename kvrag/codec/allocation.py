"""Which rows get how many bits: the steps of the quantiser, and the levels of a profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from kvrag.errors import ParameterError

MAX_LEVELS = 16


class Allocation(Protocol):
    """Steps for rows, in one or more levels from fine to coarse or the other way round."""

    name: ClassVar[str]

    def level_names(self) -> tuple[str, ...]:
        """Return what the levels are called on the command line, in the order of the profile."""
        ...

    def target_bits(self, level: int) -> float | None:
        """Return the bits per element a level must have, or None where its steps are fixed."""
        ...

    def relative_steps(self, level: int, layers: torch.Tensor, num_layers: int) -> torch.Tensor:
        """Return float32 ``[R]``: what each row's unit is multiplied by.

        Parameters
        ----------
        layers
            int64 ``[R]``: the layer of each row, or -1.
        """
        ...


@dataclass(frozen=True)
class LayerGroups:
    """CacheGen's: steps grow from the first third of the layers to the last.

    Source: CacheGen (SIGCOMM 2024, section 5.2): errors in early layers hurt more, so their bins
    are finer: 0.5, 1 and 1.5 at the default level, here in units of the quantiser's scale.

    Attributes
    ----------
    bins
        Step of each third.
    factors
        What they are multiplied by at each level, finest first.
    """

    name: ClassVar[str] = "layer_groups"
    bins: tuple[float, ...] = (0.5, 1.0, 1.5)
    factors: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)

    def __post_init__(self) -> None:
        for what, values in (("bins", self.bins), ("factors", self.factors)):
            if not 1 <= len(values) <= MAX_LEVELS or not all(1e-3 <= v <= 1e3 for v in values):
                raise ParameterError(
                    f"layer_groups: {what} are 1 to {MAX_LEVELS} numbers from 0.001 to 1000, "
                    f"found {values}"
                )

    def level_names(self) -> tuple[str, ...]:
        """Return "1", "2", ..."""
        return tuple(str(number + 1) for number in range(len(self.factors)))

    def target_bits(self, level: int) -> None:
        """Steps are fixed."""

    def relative_steps(self, level: int, layers: torch.Tensor, num_layers: int) -> torch.Tensor:
        """Return the bin of each row's third, times the level's factor."""
        third = (layers.clamp(min=0) * len(self.bins)) // num_layers
        return torch.tensor(self.bins)[third] * self.factors[level]


@dataclass(frozen=True)
class RateDistortion:
    """Reverse water-filling: one step for all rows, found so that a level has the bits asked for.

    Where errors of all rows count alike, equal distortion in every row that is coded, and no bits
    for rows that vary less than that, is the least distortion at a rate (Cover and Thomas, 10.3.3).
    Rows whose numbers all round to 0 are left out of the record.

    Attributes
    ----------
    bits
        Target of each level, in bits per element of KV, tables and headers left out.
    """

    name: ClassVar[str] = "rate_distortion"
    bits: tuple[float, ...] = (4.0, 2.0, 1.0, 0.5)

    def __post_init__(self) -> None:
        if not 1 <= len(self.bits) <= MAX_LEVELS or not all(0.05 <= b <= 12 for b in self.bits):
            raise ParameterError(
                f"rate_distortion: bits are 1 to {MAX_LEVELS} numbers from 0.05 to 12, "
                f"found {self.bits}"
            )
        if len(set(self.bits)) < len(self.bits):
            raise ParameterError(f"rate_distortion: a target comes twice in {self.bits}")

    def level_names(self) -> tuple[str, ...]:
        """Return the targets as they are typed: "4", "2", "0.5"."""
        return tuple(f"{value:g}" for value in self.bits)

    def target_bits(self, level: int) -> float:
        """Return the target."""
        return self.bits[level]

    def relative_steps(self, level: int, layers: torch.Tensor, num_layers: int) -> torch.Tensor:
        """Return ones."""
        return torch.ones(len(layers))
