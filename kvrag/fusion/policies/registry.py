"""Recompute policies by name. `kvrag.fusion.repair` adds the parameters that all policies take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from kvrag.plugins import Table, require_subclass

# Imported late, so that names can be checked without a tensor library.
if TYPE_CHECKING:
    from kvrag.fusion.policies.base import RecomputePolicy

POLICIES: Table[type[RecomputePolicy]] = Table(
    "kvrag.policies",
    {
        "none": "kvrag.fusion.policies.base:NonePolicy",
        "boundary": "kvrag.fusion.policies.boundary:BoundaryPolicy",
        "seam": "kvrag_testing.baselines:SeamPolicy",
        "deviation": "kvrag.fusion.policies.deviation:DeviationPolicy",
        "gradual": "kvrag.fusion.policies.deviation:GradualPolicy",
        "query": "kvrag.fusion.policies.query:QueryPolicy",
        "two_stage": "kvrag.fusion.policies.two_stage:TwoStagePolicy",
        "random": "kvrag_testing.baselines:RandomPolicy",
    },
)


def make_policy(name: str, given: Mapping[str, Any]) -> RecomputePolicy:
    """Return a policy by name, with these parameters.

    Raises
    ------
    ParameterError
        If the policy does not have a parameter, a value is out of range, or another
        distribution's policy cannot be used.
    """
    return _class_of(name)(**given)


def parameters_of(name: str) -> frozenset[str]:
    """Return the names of the parameters that a policy takes. Raises as `make_policy` does."""
    policy: Any = _class_of(name)
    return frozenset(field.name for field in fields(policy))


def _class_of(name: str) -> type[RecomputePolicy]:
    from kvrag.fusion.policies.base import RecomputePolicy

    found = POLICIES[name]
    require_subclass(POLICIES, name, found, RecomputePolicy)
    if not is_dataclass(found) or found.name != name:
        # Reports store a policy as its name and fields, and it is made from them again.
        POLICIES.refuse(name, f"a dataclass with the class attribute name = {name!r}", repr(found))
    return found
