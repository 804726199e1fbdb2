"""Recompute policies by name. `kvrag.fusion.repair` adds what a prompt may be given beside one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

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


def make_policy(name: str, given: Mapping[str, Any]) -> RecomputePolicy:
    """Return a policy by name, with these parameters.

    Raises
    ------
    ParameterError
        For a parameter that the policy does not have, or a value out of range.
    """
    return _CLASSES[name](**given)


def parameters_of(name: str) -> frozenset[str]:
    """Return the names of the parameters that a policy takes."""
    policy: Any = _CLASSES[name]
    return frozenset(field.name for field in fields(policy))
