"""Parses a prompt of a schema: its imports, arguments and own text; fills a template's names.

Source: Prompt Cache §3.2.2. Text may appear anywhere between imports; `kvrag.pml.engine` decides
where it goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from string import Formatter
from xml.sax.saxutils import escape

from kvrag.arguments import shown
from kvrag.chunk import normalise
from kvrag.errors import ParameterError
from kvrag.pml.elements import Element, read_elements
from kvrag.pml.parser import (
    ROLES,
    check_attributes,
    check_exclusive,
    check_module,
    listing,
    settled,
)
from kvrag.pml.schema import Location, Path, Schema, Text


@dataclass(frozen=True)
class Import:
    """A module that a prompt imports.

    Attributes
    ----------
    path
        The module's path in the schema; () for the prompt itself.
    arguments
        The text of each parameter.
    parts
        Imports inside it, and text between them.
    """

    path: Path
    arguments: Mapping[str, str]
    parts: tuple[Import | Text, ...]
    location: Location

    def all(self) -> Iterator[Import]:
        """Yield this import and all imports inside it."""
        yield self
        for part in self.parts:
            if isinstance(part, Import):
                yield from part.all()


@dataclass(frozen=True)
class Prompt:
    """A prompt, checked against its schema.

    Attributes
    ----------
    body
        The imports, and the text before the final text.
    turns
        Role and content of the prompt's own turns, at its end.
    ending
        The text at its end, for a schema without turns.
    """

    schema: Schema
    body: Import
    turns: tuple[tuple[str, str], ...]
    ending: str
    location: Location


def schema_name(source: str | FilePath) -> str:
    """Return the name of a prompt's schema. Raises PMLError."""
    return _root(source).attributes["schema"]


def parse_prompt(source: str | FilePath, schema: Schema) -> Prompt:
    """Read a prompt and check it against its schema.

    Parameters
    ----------
    source
        A path, or the markup as a string.

    Raises
    ------
    PMLError
        For an undeclared or repeated module, two members of one union, an unknown argument, and
        invalid markup. An argument that is too long is noticed only when it is tokenised.
    """
    root = _root(source)
    name = root.attributes["schema"]
    if name != schema.name:
        raise root.location.error(
            f"a prompt of schema {shown(name)}", f"expected one of schema {shown(schema.name)}"
        )
    has_turns = any(part.tag in ROLES for part in root.elements)
    turns = _turns(root) if has_turns else ()
    parts = [
        part for part in settled(root.content) if isinstance(part, Text) or part.tag not in ROLES
    ]
    text = ""
    if parts and isinstance(parts[-1], Text):
        text = parts[-1].text
        parts.pop()
    if schema.has_turns:
        if text.strip():
            # Bare text continues the conversation as the user's next turn.
            turns = (("user", text.strip()), *turns)
        text = ""
    elif turns:
        raise root.location.error(
            "turns in a prompt of a schema without any",
            "put the schema's own text into <system> or <user> as well",
        )
    arguments = {key: value for key, value in root.attributes.items() if key != "schema"}
    body = Import((), *_checked(schema, (), arguments, parts, root.location), root.location)
    check_exclusive(schema, ((one.path, one.location) for one in body.all()))
    return Prompt(schema, body, turns, text, root.location)


def _root(source: str | FilePath) -> Element:
    root = read_elements(source)
    if root.tag != "prompt":
        raise root.location.error(f"<{root.tag}> is not a prompt", "expected <prompt schema=...>")
    if "schema" not in root.attributes:
        raise root.location.error("<prompt> names no schema", "give it schema=...")
    return root


def _turns(root: Element) -> tuple[tuple[str, str], ...]:
    turns: list[tuple[str, str]] = []
    for part in root.content:
        if isinstance(part, Element) and part.tag in ROLES:
            check_attributes(part, set())
            if part.elements:
                raise part.elements[0].location.error(
                    f"<{part.elements[0].tag}> in <{part.tag}> of a prompt",
                    "import modules directly in <prompt>; they appear where the schema has them",
                )
            text = "".join(one.text for one in settled(part.content) if isinstance(one, Text))
            turns.append((part.tag, text))
        elif turns and (isinstance(part, Element) or part.text.strip()):
            raise part.location.error(
                "something after a turn of the prompt", "put turns at the prompt's end"
            )
    return tuple(turns)


def _import(schema: Schema, around: Path, element: Element) -> Import:
    path = (*around, element.tag)
    check_module(schema, path, element.location)
    parts = settled(element.content)
    return Import(
        path, *_checked(schema, path, element.attributes, parts, element.location), element.location
    )


def _checked(
    schema: Schema,
    path: Path,
    attributes: Mapping[str, str],
    contents: list[Element | Text],
    location: Location,
) -> tuple[Mapping[str, str], tuple[Import | Text, ...]]:
    known = schema.parameters(path)
    for name in attributes:
        if name not in known:
            owner = f"module {shown('/'.join(path))}" if path else f"schema {shown(schema.name)}"
            raise location.error(
                f"{owner} has no parameter {shown(name)}", f"expected one of {listing(known)}"
            )
    parts: list[Import | Text] = []
    seen: dict[Path, Location] = {}
    for part in contents:
        if isinstance(part, Text):
            # A line feed between imports is formatting: the schema decides what separates modules.
            if part.text.strip():
                parts.append(part)
            continue
        one = _import(schema, path, part)
        if one.path in seen:
            raise one.location.error(
                f"{shown('/'.join(one.path))} is imported again (first in line "
                f"{seen[one.path].line})",
                "import it once",
            )
        seen[one.path] = one.location
        parts.append(one)
    arguments = {name: normalise(value) for name, value in attributes.items()}
    return arguments, tuple(parts)


_QUOTES = {'"': "&quot;", "'": "&apos;", "\n": "&#10;", "\r": "&#13;", "\t": "&#9;"}


def variables(markup: str) -> list[str]:
    """Return the names in braces, in order, each once.

    Raises
    ------
    ParameterError
        If braces are unbalanced or hold more than a name. ``{{`` and ``}}`` mean single braces.
    """
    try:
        parts = list(Formatter().parse(markup))
    except ValueError as error:
        raise ParameterError(f"prompt template: {error}; write {{{{ and }}}} for braces") from error
    names = []
    for _, name, format_spec, conversion in parts:
        if name is None:
            continue
        if not name.isidentifier() or format_spec or conversion:
            raise ParameterError(
                f"prompt template: {{{name}}} is not a variable; write {{{{ and }}}} for braces"
            )
        names.append(name)
    return list(dict.fromkeys(names))


def fill(markup: str, values: Mapping[str, object]) -> str:
    """Return the markup with the variables' values, as text.

    Raises
    ------
    ParameterError
        If a value is missing, or holds a character that XML does not allow.
    """
    texts = {}
    for name in variables(markup):
        if name not in values:
            raise ParameterError(f"prompt template: no value for {shown(name)}")
        text = str(values[name])
        lost = next((c for c in text if c < " " and c not in "\n\r\t"), None)
        if lost is not None:
            raise ParameterError(
                f"prompt template: {shown(name)} holds the control character {lost!r}; remove it"
            )
        texts[name] = escape(text, _QUOTES)
    return Formatter().vformat(markup, (), texts)
