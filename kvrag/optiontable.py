"""Options that are written once: fields of a dataclass that say what they mean and their bounds.

Docstrings, checks, and the help of commands take them from there.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from functools import cache
from textwrap import fill
from typing import Any, TypeVar

from kvrag import arguments

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
