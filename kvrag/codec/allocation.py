"""Bit allocation between layers and rows (channels, components): relative quantiser steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from kvrag.errors import ParameterError

MAX_LEVELS = 16


class Allocation(Protocol):
    """Steps for rows, in one or more levels, ordered from fine to coarse or the reverse."""

    name: ClassVar[str]

    def level_names(self) -> tuple[str, ...]:
        """Return the levels' names on the command line, in the order of the profile."""
        ...

    def target_bits(self, level: int) -> float | None:
        """Return the bits per element that a level must have; None if its steps are fixed."""
        ...

    def relative_steps(self, level: int, layers: torch.Tensor, num_layers: int) -> torch.Tensor:
        """Return float32 ``[R]``: the factor for each row's unit.

        Parameters
        ----------
        layers
            int64 ``[R]``: the layer of each row, or -1.
        """
        ...


@dataclass(frozen=True)
class LayerGroups:
    """CacheGen's allocation: steps grow from the first third of the layers to the last.

    Source: CacheGen (SIGCOMM 2024, section 5.2): errors in early layers hurt more, so their bins
    are finer: 0.5, 1 and 1.5 at the default level, here in units of the quantiser's scale.

    Attributes
    ----------
    bins
        The step of each third.
    factors
        The bins' factor at each level, finest first.
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
    """Reverse water-filling: one step for all rows, chosen so that a level has the requested bits.

    If errors in all rows count alike, distortion at a given rate is least when every coded row has
    equal distortion and rows that vary less get no bits (Cover and Thomas, 10.3.3). The record
    omits rows whose numbers all round to 0.

    Attributes
    ----------
    bits
        The target of each level, in bits per element of KV, without tables and headers.
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
            raise ParameterError(f"rate_distortion: a target appears twice in {self.bits}")

    def level_names(self) -> tuple[str, ...]:
        """Return the targets as they are typed: "4", "2", "0.5"."""
        return tuple(f"{value:g}" for value in self.bits)

    def target_bits(self, level: int) -> float:
        """Return the target."""
        return self.bits[level]

    def relative_steps(self, level: int, layers: torch.Tensor, num_layers: int) -> torch.Tensor:
        """Return ones."""
        return torch.ones(len(layers))
