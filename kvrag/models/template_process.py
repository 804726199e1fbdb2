"""The process that renders chat templates (`templates.py` asks it)."""

from __future__ import annotations

import functools
import json
from datetime import datetime
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from kvrag.process import serve

_MEMORY_BYTES = 512 << 20


class _Generation(Extension):
    """``{% generation %}``, which marks answers for training: its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  # as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


class _Namespace(Namespace):
    """Jinja's, without attributes that lead to the interpreter's own."""

    def __init__(*args: Any, **values: Any) -> None:
        for name in dict(*args[1:], **values):
            _check(name)
        Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check(name)
        super().__setitem__(name, value)


def _check(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


class _Dict:
    """Makes dictionaries, and has no other attribute of the type."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    given = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **given)


@functools.cache
def _environment() -> Environment:
    """Return what templates of Transformers expect to find."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _to_json
    made.globals.update(
        raise_exception=_refuse,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=_Dict(),
        namespace=_Namespace,
    )
    return made


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


def _answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        return {"text": _compiled(request["template"]).render(**request["variables"])}
    except Exception as error:  # Jinja's own and whatever a template raises
        return {"refused": str(error)[:1000] or type(error).__name__}


def main() -> None:
    """Answer the parent."""
    serve(_answer, _MEMORY_BYTES)
