"""How the reused tokens of a prompt are repaired: a policy, and how attention treats the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvrag.errors import ParameterError
from kvrag.fusion.policies.base import RecomputePolicy
from kvrag.fusion.policies.registry import POLICIES, make_policy, parameters_of
from kvrag.models.scaling import KeyScaling
from kvrag.parameters import check_fields, parse_spec

MODIFIERS = ("temperature", "scale")
"""Parameters that every policy may be given."""

# Beyond these limits the scores leave float32, and every answer is made of not-a-number.
_COLDEST, _HOTTEST, _LARGEST_SCALE = 1e-4, 1e4, 1e4
# What a parameter is called where policies are named by strings.
_SHOWN = {"tokens": "boundary_tokens"}


@dataclass(frozen=True)
class Repair:
    """A recompute policy, and the attention of APE to the tokens that it leaves reused.

    Source of the attention: APE (arXiv 2502.05431) §4; deviations: see `kvrag.models.scaling`.
    It costs no further computation, and generation goes on with it.

    Parameters
    ----------
    policy
        Which tokens are recomputed.
    temperature
        The scores of reused keys are divided by it, 0.0001 to 10,000.
    scale
        The log-sum-exp of reused keys is multiplied by it, 0 to 10,000.

    Raises
    ------
    ParameterError
        For a value of another type or out of range.
    """

    policy: RecomputePolicy
    temperature: float = 1.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "policy")
        if not _COLDEST <= self.temperature <= _HOTTEST:
            raise ParameterError(
                f"temperature {self.temperature}: expected {_COLDEST} to {_HOTTEST:,.0f}"
            )
        if not 0.0 <= self.scale <= _LARGEST_SCALE:
            raise ParameterError(f"scale {self.scale}: expected 0 to {_LARGEST_SCALE:,.0f}")

    @property
    def name(self) -> str:
        """The policy's name."""
        return self.policy.name

    @property
    def scaling(self) -> KeyScaling | None:
        """How tokens that stay reused are attended to; None: as all others are."""
        if self.temperature == self.scale == 1.0:
            return None
        return KeyScaling(self.temperature, self.scale)

    def __str__(self) -> str:
        if self.scaling is None:
            return str(self.policy)
        name, _, parameters = str(self.policy).partition("(")
        own = f"temperature={self.temperature}, scale={self.scale}"
        return f"{name}({parameters[:-1]}, {own})" if parameters else f"{name}({own})"


def make_repair(
    spec: str, *, ratio: float | None = None, boundary_tokens: int | None = None
) -> Repair:
    """Return the policy that `spec` names, as ``"query"`` or ``"gradual:spread=0.8:on=k"``.

    Every policy also takes ``temperature`` and ``scale`` (`Repair`).

    Parameters
    ----------
    spec
        A name of `POLICIES`, followed by values of its parameters, each after a colon.
    ratio, boundary_tokens
        The parameters `ratio` and `tokens`; None leaves them at what `spec` or the policy says.

    Raises
    ------
    ParameterError
        For an unknown name, a value out of range, a parameter the policy does not have, or one
        that `spec` has given already.
    """
    name, given = parse_spec(spec, "policy", POLICIES)
    add_given(given, spec, ratio=ratio, tokens=boundary_tokens)
    check_given(name, given, parameters_of(name))
    modifiers = {key: given.pop(key) for key in MODIFIERS if key in given}
    return Repair(make_policy(name, given), **modifiers)


def add_given(given: dict[str, Any], spec: str, **more: float | None) -> None:
    """Add parameters that stand beside a spec. Raises ParameterError where both say one."""
    for key, value in more.items():
        if value is None:
            continue
        if key in given:
            raise ParameterError(
                f"policy {spec!r} and {_SHOWN.get(key, key)} {value}: both say the {key}; leave "
                "one out"
            )
        given[key] = value


def check_given(name: str, given: dict[str, Any], accepted: frozenset[str]) -> None:
    """Raise ParameterError for a parameter that a policy of this name does not take."""
    for key in given:
        if key not in accepted and key not in MODIFIERS:
            known = ", ".join((*sorted(accepted), *MODIFIERS))
            raise ParameterError(
                f"policy {name!r} takes no {_SHOWN.get(key, key)}; it takes {known}"
            )
