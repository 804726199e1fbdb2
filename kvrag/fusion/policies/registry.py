"""Policies by name, for callers that hold strings: command line, adapters, configuration."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvrag.errors import ParameterError
from kvrag.fusion.policies.auto import AutoPolicy
from kvrag.fusion.policies.base import RecomputePolicy
from kvrag.fusion.policies.boundary import BoundaryPolicy
from kvrag.fusion.policies.deviation import DeviationPolicy
from kvrag.fusion.policies.gradual import GradualPolicy
from kvrag.fusion.policies.none import NonePolicy
from kvrag.fusion.policies.query import QueryPolicy
from kvrag.fusion.policies.random import RandomPolicy
from kvrag.fusion.policies.scaled import MODIFIERS, ScaledPolicy
from kvrag.fusion.policies.seam import SeamPolicy
from kvrag.fusion.policies.two_stage import TwoStagePolicy
from kvrag.parameters import parse_spec

_CLASSES: dict[str, type[RecomputePolicy]] = {
    policy.name: policy
    for policy in (
        NonePolicy,
        BoundaryPolicy,
        SeamPolicy,
        DeviationPolicy,
        GradualPolicy,
        QueryPolicy,
        TwoStagePolicy,
        RandomPolicy,
        AutoPolicy,
    )
}
# What parameters are called where policies are called by strings.
_SHOWN = {"tokens": "boundary_tokens"}
_NOT_TEXT = ("calibration",)

POLICIES: tuple[str, ...] = tuple(_CLASSES)


def make_policy(
    spec: str,
    *,
    ratio: float | None = None,
    boundary_tokens: int | None = None,
) -> RecomputePolicy:
    """Return the policy that `spec` names, as ``"query"`` or ``"gradual:spread=0.8:on=k"``.

    Every policy also takes ``temperature`` and ``scale`` (`ScaledPolicy`).

    Parameters
    ----------
    spec
        A name of `POLICIES`, and behind colons values of its parameters.
    ratio, boundary_tokens
        The parameters `ratio` and `tokens`; None leaves them at what `spec` or the policy says.

    Raises
    ------
    ParameterError
        For an unknown name, a value out of range, a parameter the policy does not have, or one
        that `spec` has given already.
    """
    name, given = parse_spec(spec, POLICIES, "policy")
    for key, value in (("ratio", ratio), ("tokens", boundary_tokens)):
        if value is None:
            continue
        if key in given:
            raise ParameterError(
                f"policy {spec!r} and {_SHOWN.get(key, key)} {value}: both say the {key}; leave "
                "one out"
            )
        given[key] = value
    accepted = _parameters(name)
    modifiers = {key: given.pop(key) for key in MODIFIERS if key in given}
    for key in given:
        if key not in accepted:
            known = ", ".join((*sorted(accepted), *MODIFIERS))
            raise ParameterError(
                f"policy {name!r} takes no {_SHOWN.get(key, key)}; it takes {known}"
            )
    policy = _CLASSES[name](**given)
    return ScaledPolicy(policy, **modifiers) if modifiers else policy


def takes_ratio(spec: str) -> bool:
    """Return whether `make_policy` takes a ratio with `spec`.

    Not where the policy has none (``"none"``), nor where `spec` says itself what is to be spent
    (``"query:ratio=0.5"``, ``"boundary:tokens=4"``). Raises ParameterError as `make_policy` does.
    """
    name, given = parse_spec(spec, POLICIES, "policy")
    return "ratio" in _parameters(name) and not given.keys() & {"ratio", "tokens"}


def _parameters(name: str) -> frozenset[str]:
    policy: Any = _CLASSES[name]
    return frozenset(field.name for field in fields(policy)) - frozenset(_NOT_TEXT)
