"""Eviction policies by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvrag.arguments import cut, shown
from kvrag.errors import ParameterError
from kvrag.eviction import NO_EVICTION
from kvrag.eviction.base import EvictionPolicy
from kvrag.eviction.corm import CormPolicy
from kvrag.eviction.h2o import H2OPolicy
from kvrag.eviction.snapkv import SnapKVPolicy
from kvrag.eviction.streaming import StreamingPolicy
from kvrag.parameters import parse_spec

_CLASSES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy for policy in (CormPolicy, StreamingPolicy, H2OPolicy, SnapKVPolicy)
}

EVICTIONS: tuple[str, ...] = (NO_EVICTION, *_CLASSES)


def make_eviction(spec: str | EvictionPolicy | None) -> EvictionPolicy | None:
    """Return the policy that `spec` names, such as ``"corm"`` or ``"corm:window=256:recent=256"``.

    Parameters
    ----------
    spec
        A name from `EVICTIONS`, followed by parameters, each after a colon. A policy is returned
        unchanged. ``"none"`` and None mean the full cache.

    Raises
    ------
    ParameterError
        For an unknown name, a value out of range, or a parameter that the policy does not have.
    """
    if spec is None or isinstance(spec, EvictionPolicy):
        return spec
    name, given = parse_spec(spec, "eviction", EVICTIONS)
    if name == NO_EVICTION:
        if given:
            raise ParameterError(f"eviction {shown(spec)}: {NO_EVICTION!r} takes no parameters")
        return None
    policy: Any = _CLASSES[name]
    accepted = [field.name for field in fields(policy)]
    for key in given:
        if key not in accepted:
            raise ParameterError(
                f"eviction {name!r} has no parameter {cut(key)}; it has "
                f"{', '.join(sorted(accepted))}"
            )
    made: EvictionPolicy = policy(**given)
    return made
