"""Methods that users name by strings, ``name:key=value:key=value``, and checks of their fields.

A method is a frozen dataclass of its parameters, with a class attribute ``name``.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Collection, Iterable
from dataclasses import fields
from itertools import chain
from types import NoneType
from typing import Any

from kvrag.arguments import cut, shown
from kvrag.errors import ParameterError

# The types that a parameter accepts, for each word in its field's annotation.
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (numbers.Integral,),
    "float": (numbers.Real,),
    "str": (str,),
    "None": (NoneType,),
}
_DESCRIBED = re.compile(r"(\w+)\((.*=.*)\)")
_EXPECTED = {"int": "a whole number", "float": "a number", "str": "a word"}


def parse_spec(spec: str, kind: str, *known: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Return the name and the parameters in a spec.

    Parameters
    ----------
    spec
        Such as ``"gradual:spread=0.8:on=k"``, or the output of `describe`.
    kind
        The word for such a method in messages, such as ``"policy"``.
    known
        The names that exist.

    Raises
    ------
    ParameterError
        For an unknown name, a setting without a value, or one that is given twice.
    """
    if not isinstance(spec, str):
        raise ParameterError(f"{kind} {shown(spec)}: expected a name; known: {_names(known)}")
    described = _DESCRIBED.fullmatch(spec)
    name, *settings = [described[1], *described[2].split(", ")] if described else spec.split(":")
    if not any(name in some for some in known):
        raise ParameterError(f"unknown {kind} {shown(name)}; known: {_names(known)}")
    given: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ParameterError(
                f"{kind} {shown(spec)}: expected PARAMETER=VALUE, found {shown(setting)}"
            )
        if key in given:
            raise ParameterError(f"{kind} {shown(spec)} gives {cut(key)} twice; remove one")
        given[key] = _value(text)
    return name, given


def check_fields(method: Any, kind: str) -> None:
    """Raise ParameterError if a plain field of a method does not hold its annotated type."""
    for field in fields(method):
        # A string where its module postpones annotations.
        kind_of = field.type.__name__ if isinstance(field.type, type) else str(field.type)
        kinds = kind_of.split(" | ")
        value = getattr(method, field.name)
        # Methods check fields of other types themselves.
        if not _TYPES.keys() >= set(kinds):
            continue
        accepted = tuple(one for kind in kinds for one in _TYPES[kind])
        if isinstance(value, bool) or not isinstance(value, accepted):
            raise ParameterError(
                f"{kind} {method.name!r}: {field.name}={shown(value)} has the wrong type: expected "
                f"{_EXPECTED[kinds[0]]}"
            )


def describe(method: Any) -> str:
    """Return a method's name with its parameters, as in ``deviation(ratio=0.15, on=v)``."""
    parameters = ", ".join(
        f"{field.name}={getattr(method, field.name)}"
        for field in fields(method)
        if field.repr and getattr(method, field.name) is not None
    )
    return f"{method.name}({parameters})" if parameters else str(method.name)


def _names(known: Iterable[Collection[str]]) -> str:
    return ", ".join(chain.from_iterable(known))


def _value(text: str) -> int | float | str:
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return text
