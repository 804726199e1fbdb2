"""Repairing a prompt's reused tokens: a recompute policy, and the attention to the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvrag.arguments import cut, shown
from kvrag.errors import ParameterError
from kvrag.fusion.policies.base import RecomputePolicy
from kvrag.fusion.policies.registry import POLICIES, make_policy, parameters_of
from kvrag.models.scaling import KeyScaling
from kvrag.parameters import check_fields, parse_spec

MODIFIERS = ("temperature", "scale", "shift")
"""Parameters that every policy takes."""

# Beyond these limits the scores overflow float32, and all logits become NaN.
_COLDEST, _HOTTEST, _LARGEST_SCALE = 1e-4, 1e4, 1e4
# Names of parameters in messages, as callers of string policies know them.
_SHOWN = {"tokens": "boundary_tokens"}


@dataclass(frozen=True)
class Repair:
    """A recompute policy, and APE's scaled attention to the tokens that stay reused.

    Source of the attention: APE (arXiv 2502.05431) §4; deviations: see `kvrag.models.scaling`.
    It needs no further computation, and generation uses it too.

    Parameters
    ----------
    policy
        Chooses the tokens to recompute.
    temperature
        Divides the scores of reused keys, 0.0001 to 10,000.
    scale
        Multiplies the log-sum-exp of reused keys, 0 to 10,000.
    shift
        How far a chunk's other rows move when its recomputed rows do, 0 to 1: 1 is their mean
        change (`kvrag.fusion.shift`).

    Raises
    ------
    ParameterError
        If a value has the wrong type or is out of range.
    """

    policy: RecomputePolicy
    temperature: float = 1.0
    scale: float = 1.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "policy")
        if not _COLDEST <= self.temperature <= _HOTTEST:
            raise ParameterError(
                f"temperature {self.temperature}: expected {_COLDEST} to {_HOTTEST:,.0f}"
            )
        if not 0.0 <= self.scale <= _LARGEST_SCALE:
            raise ParameterError(f"scale {self.scale}: expected 0 to {_LARGEST_SCALE:,.0f}")
        if not 0.0 <= self.shift <= 1.0:
            raise ParameterError(f"shift {self.shift}: expected 0 to 1")

    @property
    def name(self) -> str:
        """The policy's name."""
        return self.policy.name

    @property
    def scaling(self) -> KeyScaling | None:
        """The attention to tokens that stay reused; None if it is not scaled."""
        if self.temperature == self.scale == 1.0:
            return None
        return KeyScaling(self.temperature, self.scale)

    def __str__(self) -> str:
        parts = []
        if self.scaling is not None:
            parts += [f"temperature={self.temperature}", f"scale={self.scale}"]
        if self.shift:
            parts.append(f"shift={self.shift}")
        if not parts:
            return str(self.policy)
        name, _, parameters = str(self.policy).partition("(")
        own = ", ".join(parts)
        return f"{name}({parameters[:-1]}, {own})" if parameters else f"{name}({own})"


def make_repair(
    spec: str, *, ratio: float | None = None, boundary_tokens: int | None = None
) -> Repair:
    """Return the policy that `spec` names, such as ``"query"`` or ``"gradual:spread=0.8:on=k"``.

    Every policy also takes ``temperature`` and ``scale`` (`Repair`).

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
        if key not in accepted and key not in MODIFIERS:
            known = ", ".join((*sorted(accepted), *MODIFIERS))
            raise ParameterError(
                f"policy {name!r} takes no {cut(_SHOWN.get(key, key))}; it takes {known}"
            )
