"""Options that are written once: fields of a dataclass that say what they mean and their bounds.

Docstrings, checks, and the help of commands take them from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
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
    """

    text: str
    least: float | None = None
    most: float | None = None
    above: float | None = None


def option(default: Any, text: str, **bounds: Any) -> Any:
    """Return a field of a dataclass that is an option."""
    return field(default=default, metadata={_OPTION: Option(text, **bounds)})


def options_of(cls: Any) -> Iterator[tuple[Field[Any], Option]]:
    """Yield the fields of a class that are options, each with its rule."""
    for one in fields(cls):
        if _OPTION in one.metadata:
            yield one, one.metadata[_OPTION]


def text_of(cls: Any, name: str) -> str:
    """Return what an option of a class does, as help."""
    return next(rule.text for one, rule in options_of(cls) if one.name == name)


def check_options(values: Any) -> None:
    """Check the numbers of an options' object, and make them Python's own.

    Raises
    ------
    ParameterError
        If one has the wrong type or is out of range.
    """
    for one, rule in options_of(values):
        words, value = str(one.type).split(" | "), getattr(values, one.name)
        if value is None and "None" in words:
            continue
        if "int" in words:
            least, most = (None if at is None else int(at) for at in (rule.least, rule.most))
            value = arguments.whole(value, one.name, least, most)
        elif "float" in words:
            value = arguments.number(value, one.name, rule.least, rule.most, above=rule.above)
        object.__setattr__(values, one.name, value)


def described(cls: type[T]) -> type[T]:
    """Write the options of a class below its docstring."""
    lines = []
    for one, rule in options_of(cls):
        text = fill(rule.text, _WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)
        lines.append(f"    {one.name}\n{text}")
    cls.__doc__ = f"{cls.__doc__}\n    Attributes\n    ----------\n" + "\n".join(lines) + "\n"
    return cls
