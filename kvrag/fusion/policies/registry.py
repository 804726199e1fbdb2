"""Policies by name, for callers that hold strings: command line, adapters, configuration."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvrag.errors import ParameterError
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
    )
}

POLICIES: tuple[str, ...] = tuple(_CLASSES)


def make_policy(
    name: str,
    *,
    ratio: float | None = None,
    boundary_tokens: int | None = None,
    on: str | None = None,
) -> RecomputePolicy:
    """Return the policy called `name`; None leaves a parameter at the policy's default.

    Raises
    ------
    ParameterError
        For an unknown name, a value out of range, or a parameter the policy does not have.
    """
    given: dict[str, Any] = {
        key: value
        for key, value in (("ratio", ratio), ("tokens", boundary_tokens), ("on", on))
        if value is not None
    }
    if name not in _CLASSES:
        raise ParameterError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    policy = _CLASSES[name]
    for parameter in given:
        if parameter not in parameters_of(name):
            shown = "boundary_tokens" if parameter == "tokens" else parameter
            raise ParameterError(f"policy {name!r} takes no {shown}")
    return policy(**given)


def parameters_of(name: str) -> frozenset[str]:
    """Return the names of a known policy's parameters."""
    return frozenset(field.name for field in fields(_CLASSES[name]))  # type: ignore[arg-type]
