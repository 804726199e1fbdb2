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
from kvrag.fusion.policies.seam import SeamPolicy
from kvrag.fusion.policies.two_stage import TwoStagePolicy

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

    Parameters
    ----------
    spec
        A name of `POLICIES`, and behind colons values of its parameters.
    ratio, boundary_tokens
        The parameters `ratio` and `tokens`; None leaves them at what `spec` or the policy says.

    Raises
    ------
    ParameterError
        For an unknown name, a value out of range, or a parameter the policy does not have.
    """
    name, *settings = spec.split(":")
    if name not in _CLASSES:
        raise ParameterError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    given: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ParameterError(f"policy {spec!r}: expected PARAMETER=VALUE, found {setting!r}")
        given[key] = _value(text)
    for key, value in (("ratio", ratio), ("tokens", boundary_tokens)):
        if value is not None:
            given[key] = value
    accepted = parameters_of(name)
    for key, value in given.items():
        if key not in accepted:
            known = ", ".join(sorted(accepted)) or "no parameters"
            raise ParameterError(
                f"policy {name!r} takes no {_SHOWN.get(key, key)}; it takes {known}"
            )
        if isinstance(value, str) != isinstance(_default(name, key), str):
            raise ParameterError(f"policy {name!r}: {key}={value!r} is not what it takes")
    return _CLASSES[name](**given)


def parameters_of(spec: str) -> frozenset[str]:
    """Return the names of the parameters of a policy that `make_policy` makes of `spec`."""
    policy: Any = _CLASSES[spec.partition(":")[0]]
    return frozenset(field.name for field in fields(policy)) - frozenset(_NOT_TEXT)


def _default(name: str, parameter: str) -> object:
    policy: Any = _CLASSES[name]
    return next(field.default for field in fields(policy) if field.name == parameter)


def _value(text: str) -> int | float | str:
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return text
