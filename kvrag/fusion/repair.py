"""Repairing a prompt's reused tokens: a recompute policy, and a shift of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvrag.arguments import cut, shown
from kvrag.errors import ParameterError
from kvrag.fusion.layout import ReusedSpan
from kvrag.fusion.policies.base import RecomputePolicy
from kvrag.fusion.policies.registry import POLICIES, make_policy, parameters_of
from kvrag.kvcache import FusedKV
from kvrag.optiontable import check_fields, parse_spec
from kvrag.positions.rotary import RotaryTable

MODIFIERS = ("shift",)
"""Parameters that every policy takes."""

_GONE = ("temperature", "scale")
# Names of parameters in messages, as callers of string policies know them.
_SHOWN = {"tokens": "boundary_tokens"}


@dataclass(frozen=True)
class Repair:
    """A recompute policy, and how far the tokens that stay reused follow the recomputed ones.

    Parameters
    ----------
    policy
        Chooses the tokens to recompute.
    shift
        How far a chunk's other rows move when its recomputed rows do, 0 to 1: 1 is their mean
        change (`kvrag.fusion.repair`).

    Raises
    ------
    ParameterError
        If a value has the wrong type or is out of range.
    """

    policy: RecomputePolicy
    shift: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "policy")
        if not 0.0 <= self.shift <= 1.0:
            raise ParameterError(f"shift {self.shift}: expected 0 to 1")

    @property
    def name(self) -> str:
        """The policy's name."""
        return self.policy.name

    def __str__(self) -> str:
        if not self.shift:
            return str(self.policy)
        name, _, parameters = str(self.policy).partition("(")
        own = f"shift={self.shift}"
        return f"{name}({parameters[:-1]}, {own})" if parameters else f"{name}({own})"


def make_repair(
    spec: str, *, ratio: float | None = None, boundary_tokens: int | None = None
) -> Repair:
    """Return the policy that `spec` names, such as ``"query"`` or ``"gradual:spread=0.8:on=k"``.

    Every policy also takes ``shift`` (`Repair`).

    Parameters
    ----------
    spec
        A name of `POLICIES`, followed by values of its parameters, each after a colon.
    ratio, boundary_tokens
        The parameters `ratio` and `tokens`; None uses the values of `spec` or the policy.

    Raises
    ------
    ParameterError
        If the name is unknown, a value is out of range, the policy does not have a parameter, or
        `spec` already sets it.
    """
    name, given = parse_spec(spec, "policy", POLICIES)
    add_given(given, spec, ratio=ratio, tokens=boundary_tokens)
    check_given(name, given, parameters_of(name))
    modifiers = {key: given.pop(key) for key in MODIFIERS if key in given}
    return Repair(make_policy(name, given), **modifiers)


def names_gone(spec: str) -> bool:
    """Return whether a spec sets a parameter that has left, as a calibration of 0.2 may."""
    given = spec.split(":")[1:]
    return "on=attention" in given or any(part.partition("=")[0] in _GONE for part in given)


def add_given(given: dict[str, Any], spec: str, **more: float | None) -> None:
    """Add parameters given besides a spec. Raise ParameterError if the spec sets them too."""
    for key, value in more.items():
        if value is None:
            continue
        if key in given:
            raise ParameterError(
                f"policy {shown(spec)} and {_SHOWN.get(key, key)} {value}: both set the {key}; "
                "leave one out"
            )
        given[key] = value


def check_given(name: str, given: dict[str, Any], accepted: frozenset[str]) -> None:
    """Raise ParameterError for a parameter that a policy of this name does not take."""
    for key in given:
        if key in _GONE and key not in accepted:
            raise ParameterError(
                f"policy {name!r}: {key} of reused keys left kvrag with 0.3, because answers of "
                "both models measured became worse by it; leave it out, or try shift=1"
            )
        if key not in accepted and key not in MODIFIERS:
            known = ", ".join((*sorted(accepted), *MODIFIERS))
            raise ParameterError(
                f"policy {name!r} takes no {cut(_SHOWN.get(key, key))}; it takes {known}"
            )


# This many recomputed rows weigh as much as the assumption that nothing has changed.
_PRIOR_ROWS = 3.0


class ChunkShift:
    """Moves the rows of a chunk that stay stored by the mean change of those computed again.

    The tokens of a chunk change alike when other text precedes it: part of each key's and value's
    change is common to the chunk. The recomputed rows show that part, so their mean change, of
    position-free keys and of values, is added to the chunk's other rows before anything attends to
    them. The mean of m rows counts ``m / (m + 3)``. This is kvrag's own; no source has it.

    Parameters
    ----------
    spans
        The spans of reused tokens that are not exact.
    num_tokens
        Number of rows in the prompt.
    device
        The buffer's device.
    strength
        Share of the mean change, 0..1.
    """

    def __init__(
        self, spans: Sequence[ReusedSpan], num_tokens: int, device: torch.device, strength: float
    ) -> None:
        self._strength = strength
        # The number of each row's chunk; 0 for none.
        self._chunk_of = torch.zeros(num_tokens, dtype=torch.long, device=device)
        for number, span in enumerate(spans, 1):
            self._chunk_of[span.prompt_start : span.prompt_end] = number

    def of_layer(
        self, fused: FusedKV, layer_index: int, table: RotaryTable, picks: torch.Tensor
    ) -> LayerShift:
        """Return what moves the rows of one layer.

        Parameters
        ----------
        fused
            The buffer, which holds the layer's stored KV.
        layer_index
            The layer.
        table
            The layer's rotary table.
        picks
            Ascending positions of the reused tokens that the layer computes.
        """
        keys, values = fused.keys[layer_index][0], fused.values[layer_index][0]
        return LayerShift(keys, values, table, self._chunk_of, picks, self._strength)


class LayerShift:
    """Moves the rows of one layer, each time that rows have been written.

    Parameters
    ----------
    keys, values
        ``[H, C, D]``: the layer's part of the buffer.
    table
        The layer's rotary table.
    chunk_of
        ``[N]``: the number of each row's chunk from 1 on, 0 for none.
    picks
        Ascending positions of the reused tokens that are computed.
    strength
        See `ChunkShift`.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: RotaryTable,
        chunk_of: torch.Tensor,
        picks: torch.Tensor,
        strength: float,
    ) -> None:
        self._keys, self._values, self._table = keys, values, table
        self._chunk_of, self._strength = chunk_of, strength
        # The rows that stay stored: neither fresh nor computed.
        self._rest_of = chunk_of.index_fill(0, picks, 0)
        num_chunks = int(chunk_of.max())
        shape = (2, num_chunks + 1, keys.shape[0], keys.shape[2])
        self._sums = torch.zeros(shape, device=keys.device)
        self._moved = torch.zeros(shape, device=keys.device)
        self._counts = torch.zeros(num_chunks + 1, device=keys.device)

    def __call__(
        self, positions: torch.Tensor, key_change: torch.Tensor, value_change: torch.Tensor
    ) -> None:
        """Take in the change of rows just written, and move their chunks' other rows.

        Parameters
        ----------
        positions
            ``[n]``: positions of the rows.
        key_change, value_change
            ``[H, n, D]``: their K/V less those they replace; keys are placed.
        """
        chunks = self._chunk_of[positions]
        touched = torch.unique(chunks[chunks > 0])
        if not len(touched):
            return
        free = torch.empty(key_change.shape, device=key_change.device)
        self._table.strip(key_change.float(), positions, free)
        for total, change in zip(self._sums, (free, value_change.float()), strict=True):
            total.index_add_(0, chunks, change.transpose(0, 1))
        self._counts.index_add_(0, chunks, torch.ones(len(chunks), device=chunks.device))
        wanted = self._strength * self._sums / (self._counts + _PRIOR_ROWS)[:, None, None]
        step = wanted - self._moved
        self._moved = wanted
        rows = torch.isin(self._rest_of, touched).nonzero()[:, 0]
        key_step, value_step = step[:, self._rest_of[rows]].transpose(1, 2)
        placed = torch.empty_like(key_step)
        self._table.place(key_step, rows, placed)
        self._keys[:, rows] += placed.to(self._keys.dtype)
        self._values[:, rows] += value_step.to(self._values.dtype)
