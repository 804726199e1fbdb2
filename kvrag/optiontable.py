"""Options that are written once: fields of a dataclass that say what they mean and their bounds.

Methods' parameters after colons (``corm:window=256``) are fields, too.

Docstrings, checks, and the help of commands take them from there.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Collection, Iterable
from dataclasses import Field, dataclass, field, fields
from functools import cache
from itertools import chain
from textwrap import fill
from types import NoneType
from typing import Any, TypeVar

from kvrag import arguments
from kvrag.arguments import cut, shown
from kvrag.errors import ParameterError

_OPTION = "option"
_WIDTH = 92

T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """What others have to know of an option beside its field's name, type and default.

    Attributes
    ----------
    text
        What it does, for help and reference.
    least, most, above
        Bounds; `above` is the exclusive one below.
    served_most
        The most that a client may ask of a server, if that is less than `most`.
    is_bytes
        Whether people write it as a size, such as ``4GB``.
    is_everywhere
        Whether commands and adapters take it; otherwise only Python, and doors that name it.
    """

    text: str
    least: float | None = None
    most: float | None = None
    above: float | None = None
    served_most: float | None = None
    is_bytes: bool = False
    is_everywhere: bool = True


def option(default: Any, text: str, **rule: Any) -> Any:
    """Return a field of a dataclass that is an option."""
    return field(default=default, metadata={_OPTION: Option(text, **rule)})


def options_of(cls: Any) -> list[tuple[Field[Any], Option]]:
    """Return the fields of a class that are options, each with its rule."""
    return _options_of(cls)


@cache
def _options_of(cls: Any) -> list[tuple[Field[Any], Option]]:
    """Look each class through once: every request asks."""
    return [(one, one.metadata[_OPTION]) for one in fields(cls) if _OPTION in one.metadata]


def text_of(cls: Any, name: str) -> str:
    """Return what an option of a class does, as help."""
    return next(rule.text for one, rule in options_of(cls) if one.name == name)


@cache
def kind_of(one: Field[Any]) -> type:
    """Return the type of an option's plain values: whole numbers, numbers, flags or texts."""
    words = str(one.type).split(" | ")
    plain: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
    return next((plain[word] for word in words if word in plain), object)


def checked(one: Field[Any], value: Any) -> Any:
    """Return an option's value, numbers as Python's own.

    Raises
    ------
    ParameterError
        If it has the wrong type or is out of range.
    """
    rule: Option = one.metadata[_OPTION]
    kind = kind_of(one)
    if value is None and "None" in str(one.type):
        return None
    if kind is bool:
        return arguments.flag(value, one.name)
    if kind is int:
        least, most = (None if bound is None else int(bound) for bound in (rule.least, rule.most))
        return arguments.whole(value, one.name, least, most)
    if kind is float:
        return arguments.number(value, one.name, rule.least, rule.most, above=rule.above)
    return value


def check_options(values: Any) -> None:
    """Check the numbers and flags of an options' object, and make them Python's own.

    Raises
    ------
    ParameterError
        If one has the wrong type or is out of range.
    """
    for one, _ in options_of(type(values)):
        object.__setattr__(values, one.name, checked(one, getattr(values, one.name)))


def attributes(*classes: Any) -> str:
    """Return lines for a docstring: what each option of classes is."""
    indent = " " * 8
    return "\n".join(
        f"    {one.name}\n"
        + fill(rule.text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
        for cls in classes
        for one, rule in options_of(cls)
    )


def with_options(cls: type, *lines: str) -> str:
    """Return a class's docstring with further parameters, before what it raises."""
    head, raises, rest = str(cls.__doc__).partition("\n\n    Raises")
    return "\n".join([head, *lines]) + raises + rest


def described(cls: type[T]) -> type[T]:
    """Write the options of a class below its docstring."""
    cls.__doc__ = f"{cls.__doc__}\n    Attributes\n    ----------\n{attributes(cls)}\n"
    return cls


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
    for one in fields(method):
        # A string where its module postpones annotations.
        kind_of = one.type.__name__ if isinstance(one.type, type) else str(one.type)
        kinds = kind_of.split(" | ")
        value = getattr(method, one.name)
        # Methods check fields of other types themselves.
        if not _TYPES.keys() >= set(kinds):
            continue
        accepted = tuple(chain.from_iterable(_TYPES[kind] for kind in kinds))
        if isinstance(value, bool) or not isinstance(value, accepted):
            raise ParameterError(
                f"{kind} {method.name!r}: {one.name}={shown(value)} has the wrong type: expected "
                f"{_EXPECTED[kinds[0]]}"
            )


def describe(method: Any) -> str:
    """Return a method's name with its parameters, as in ``deviation(ratio=0.15, on=v)``."""
    parameters = ", ".join(
        f"{one.name}={getattr(method, one.name)}"
        for one in fields(method)
        if one.repr and getattr(method, one.name) is not None
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
