"""Policies by name, for callers that hold strings: command line, adapters, configuration."""

from __future__ import annotations

from kvrag.errors import ParameterError
from kvrag.fusion.policies.base import RecomputePolicy
from kvrag.fusion.policies.boundary import BoundaryPolicy
from kvrag.fusion.policies.deviation import DeviationPolicy
from kvrag.fusion.policies.none import NonePolicy

POLICIES: tuple[str, ...] = ("none", "boundary", "deviation")


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
    given = {
        key: value
        for key, value in (("ratio", ratio), ("tokens", boundary_tokens), ("on", on))
        if value is not None
    }
    classes: dict[str, tuple[type[RecomputePolicy], tuple[str, ...]]] = {
        "none": (NonePolicy, ()),
        "boundary": (BoundaryPolicy, ("tokens",)),
        "deviation": (DeviationPolicy, ("ratio", "on")),
    }
    if name not in classes:
        raise ParameterError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    policy, accepted = classes[name]
    for parameter in given:
        if parameter not in accepted:
            shown = "boundary_tokens" if parameter == "tokens" else parameter
            raise ParameterError(f"policy {name!r} takes no {shown}")
    return policy(**given)
