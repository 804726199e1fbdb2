"""Repairing a prompt's reused tokens: a recompute policy, and what happens to the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvrag.arguments import cut, shown
from kvrag.errors import ParameterError
from kvrag.fusion.policies.base import RecomputePolicy
from kvrag.fusion.policies.registry import POLICIES, make_policy, parameters_of
from kvrag.parameters import check_fields, parse_spec

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
        change (`kvrag.fusion.shift`).

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
    return any(part.partition("=")[0] in _GONE for part in spec.split(":")[1:])


def add_given(given: dict[str, Any], spec: str, **more: float | None) -> None:
    """Add parameters given besides a spec. Raise ParameterError if the spec sets them too."""
    for key, value in more.items():
        if value is None:
            continue
        if key in given:
            raise ParameterError(
                f"policy {shown(spec)} and {_SHOWN.get(key, key)} {value}: both set the {key}; "
                "leave "
                "one out"
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
