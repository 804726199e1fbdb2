"""Parses markup to a checked `Schema`.

Deviations: the public reference implementation recovers from malformed XML, ignores what it does
not know and cuts what is too long. Here all of these are errors that name their location.

White space around the contents of an element, and between turns, is formatting and is removed.
Between an element and text, or between two elements, it becomes one line feed, or one space if it
has no line feed. A text's common indentation is removed too. Otherwise texts stay unchanged.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from string import Formatter
from xml.sax.saxutils import escape

from kvrag.arguments import shown
from kvrag.chunk import normalise, normalise_text
from kvrag.errors import ParameterError
from kvrag.pml import schema as s
from kvrag.pml.schema import turns

ROLES = ("system", "user", "assistant")
MAX_LENGTH = 65_536
"""The most tokens of a parameter."""

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.-]*")
RESERVED = {"schema", "prompt", "module", "union", "param", "parameter", "scaffold", *ROLES}
"""Names that no module or parameter may have, since the markup uses them."""


def parse_schema(source: str | FilePath) -> s.Schema:
    """Read a schema.

    Parameters
    ----------
    source
        A path, or the markup as a string. Modules with ``src`` need a path.

    Raises
    ------
    PMLError
        If the schema is wrong. The message names file, line, column and remedy.
    """
    root = s.read_elements(source)
    folder = source.parent if isinstance(source, FilePath) else None
    return _SchemaParser(folder).schema(root)


class _SchemaParser:
    def __init__(self, folder: FilePath | None) -> None:
        self._folder = folder
        # The turn that is being parsed.
        self._turn: s.Element | None = None

    def schema(self, root: s.Element) -> s.Schema:
        if root.tag != "schema":
            raise root.location.error(f"<{root.tag}> is not a schema", "expected <schema name=...>")
        name = checked_name(root)
        check_attributes(root, {"name"})
        scaffolds = [one for one in root.elements if one.tag == "scaffold"]
        body = s.Element(root.tag, root.attributes, root.location)
        for part in root.content:
            before = body.content[-1] if body.content else None
            if isinstance(part, s.Run) and isinstance(before, s.Run):
                # A scaffold was between them, which adds no text.
                body.content[-1] = s.Run(before.text + part.text, before.location)
            elif isinstance(part, s.Run) or part.tag != "scaffold":
                body.content.append(part)
        children = self._children(body)
        schema = s.Schema(name, children, (), root.location)
        listed = [_scaffold(one, schema) for one in scaffolds]
        named = tuple(_named_members(children, ()))
        if len(named) > 1:
            listed.append(s.Scaffold(named, root.location))
        return s.Schema(name, children, tuple(listed), root.location)

    def _children(self, element: s.Element, *, is_cached: bool = True) -> tuple[s.Node, ...]:
        nodes: list[s.Node] = []
        for part in settled(element.content):
            nodes.append(part if isinstance(part, s.Text) else self._node(part, is_cached))
        if any(turns(tuple(nodes))):
            # The chat template decides what is between turns.
            nodes = [one for one in nodes if not (isinstance(one, s.Text) and one.text.isspace())]
        _check_unique(s.flat(tuple(nodes)))
        return tuple(nodes)

    def _node(self, element: s.Element, is_cached: bool) -> s.Node:
        if element.tag == "module":
            return self._module(element, is_cached)
        if element.tag == "union":
            return self._union(element, is_cached)
        if element.tag in ("param", "parameter"):
            return _parameter(element)
        if element.tag in ROLES:
            if self._turn is not None:
                raise element.location.error(
                    f"<{element.tag}> inside <{self._turn.tag}> (line {self._turn.location.line})",
                    f"one turn ends before the next begins: write </{self._turn.tag}> before it",
                )
            check_attributes(element, set())
            self._turn = element
            children = self._children(element, is_cached=is_cached)
            self._turn = None
            return s.Turn(element.tag, children, element.location)
        remedies = {
            "schema": "a file holds one schema: put the other into a separate file",
            "prompt": "put the prompt into a separate file or string",
            "scaffold": "write it directly in <schema>; it names modules by their paths",
        }
        raise element.location.error(
            f"<{element.tag}> is not known here",
            remedies.get(
                element.tag,
                "expected module, union, parameter, system, user or assistant; text or code with "
                "'<' belongs in <![CDATA[ ... ]]>",
            ),
        )

    def _module(self, element: s.Element, is_cached: bool) -> s.Module:
        # A module without a name is in every prompt (§3.2.1).
        name = checked_name(element) if "name" in element.attributes else ""
        check_attributes(element, {"name", "src", "cache"})
        cache = element.attributes.get("cache")
        if cache not in (None, "true", "false"):
            raise element.location.error(
                f"cache={shown(cache)} of a module",
                "expected 'false', for what every prompt computes, or 'true'",
            )
        is_cached = is_cached if cache is None else cache == "true"
        if "src" not in element.attributes:
            children = self._children(element, is_cached=is_cached)
            return s.Module(name, children, element.location, is_cached)
        if settled(element.content):
            raise element.location.error(
                f"{_called(name)} has src and contents", "give one of the two"
            )
        text = self._source_text(element.attributes["src"], element.location)
        children = (s.Text(text, element.location, is_document=True),) if text else ()
        return s.Module(name, children, element.location, is_cached)

    def _source_text(self, src: str, location: s.Location) -> str:
        remedy = "src names a text file beside the schema or in a folder below it"
        if self._folder is None:
            raise location.error("src in a schema that is not a file", "write the text out")
        if not src or "\0" in src or "\\" in src or FilePath(src).is_absolute():
            raise location.error(f"src={shown(src)} is not a relative path", remedy)
        try:
            folder = self._folder.resolve()
            path = (folder / src).resolve()
            is_file = path.is_file()
        except (OSError, RuntimeError) as error:
            # Such as a name that is too long, or links in a circle.
            reason = getattr(error, "strerror", None) or error
            raise location.error(f"src={shown(src)} cannot be found ({reason})", remedy) from error
        # The path is resolved, so neither '..' nor a link can lead out.
        if not path.is_relative_to(folder):
            raise location.error(f"src={shown(src)} leads out of the schema's folder", remedy)
        if not is_file:
            found = "a folder" if path.is_dir() else "no file"
            raise location.error(f"src={shown(src)}: expected a file, found {found}", remedy)
        try:
            return normalise_text(s.read_bytes(path, location).decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise location.error(
                f"src={shown(src)} is not UTF-8 text (byte {error.start})", "save it as UTF-8"
            ) from error

    def _union(self, element: s.Element, is_cached: bool) -> s.Union:
        check_attributes(element, {"scaffold"})
        members: list[s.Module] = []
        for part in element.content:
            if isinstance(part, s.Run):
                if part.text.strip():
                    raise part.location.error(
                        "text directly in <union>", "put it into one of its modules, or outside"
                    )
            elif part.tag != "module":
                raise part.location.error(
                    f"<{part.tag}> directly in <union>",
                    f"a union holds modules: put it into one, <module name=...><{part.tag} ...",
                )
            elif "name" not in part.attributes:
                raise part.location.error(
                    "a member of <union> has no name", "give it name=...: prompts choose by it"
                )
            else:
                members.append(self._module(part, is_cached))
        if not members:
            raise element.location.error("an empty <union>", "give it a module, or remove it")
        scaffold = element.attributes.get("scaffold", "")
        if scaffold and scaffold not in {member.name for member in members}:
            raise element.location.error(
                f"scaffold={shown(scaffold)} is not a member of this union",
                f"expected one of {listing(member.name for member in members)}",
            )
        if not all(member.is_cached for member in members if member.name == scaffold):
            raise element.location.error(
                f"scaffold={shown(scaffold)} is a module with cache='false'",
                "a scaffold is stored: name another member, or let that one be cached",
            )
        _check_unique(members)
        return s.Union(tuple(members), scaffold, element.location)


def checked_name(element: s.Element) -> str:
    """Return an element's name. Raises PMLError if it has none, or an invalid one."""
    name = element.attributes.get("name")
    if name is None:
        raise element.location.error(f"<{element.tag}> has no name", "give it name=...")
    check_name(name, element.location)
    return name


def check_name(name: str, location: s.Location) -> None:
    """Raise PMLError if `name` is not a valid name for a schema, module or parameter."""
    if not _NAME.fullmatch(name) or name in RESERVED:
        raise location.error(
            f"name={shown(name)} is not a valid name",
            "expected a letter or underscore, then letters, digits, '_', '.' and '-', and none of "
            f"{', '.join(sorted(RESERVED))}",
        )


def check_attributes(element: s.Element, known: set[str]) -> None:
    """Raise PMLError if an element has an attribute that is not in `known`."""
    for name in element.attributes:
        if name not in known:
            expected = f"expected {listing(sorted(known))}" if known else "it takes none"
            raise element.location.error(
                f"<{element.tag}> has the attribute {shown(name)}", expected
            )


def listing(names: Iterable[str], most: int = 8) -> str:
    """Return the first names for a message, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more


def settled(content: list[s.Element | s.Run]) -> list[s.Element | s.Text]:
    """Return contents with white space treated as this module's docstring says."""
    parts: list[s.Element | s.Text] = []
    for number, part in enumerate(content):
        if isinstance(part, s.Element):
            parts.append(part)
            continue
        body = part.text.strip()
        before = part.text[: len(part.text) - len(part.text.lstrip())]
        after = part.text[len(part.text.rstrip()) :]
        opening = "" if number == 0 else _joint(before)
        ending = "" if number == len(content) - 1 else _joint(after)
        if body:
            parts.append(s.Text(normalise(opening + _dedented(part.text) + ending), part.location))
        elif opening and ending:
            parts.append(s.Text(opening, part.location))
    return parts


def _joint(space: str) -> str:
    return "\n" if "\n" in space else space[:1] and " "


def _dedented(text: str) -> str:
    first, feed, rest = text.partition("\n")
    # Text that follows a start tag on the same line has no indentation.
    return (first + feed + textwrap.dedent(rest)).strip()


def _parameter(element: s.Element) -> s.Parameter:
    name = checked_name(element)
    check_attributes(element, {"name", "len", "length", "scaffold"})
    if element.elements or any(
        isinstance(part, s.Run) and part.text.strip() for part in element.content
    ):
        raise element.location.error(
            f"parameter {shown(name)} has contents",
            "it must be empty, <parameter .../>; give its default text as scaffold='...'",
        )
    given = [element.attributes[key] for key in ("len", "length") if key in element.attributes]
    if len(given) != 1:
        raise element.location.error(
            f"parameter {shown(name)} has {len(given)} lengths", "give it length=TOKENS"
        )
    number = given[0]
    # The number of digits is checked first, since Python refuses to parse very many.
    is_short = number.isascii() and number.isdigit() and len(number) <= len(str(MAX_LENGTH))
    if not (is_short and 1 <= int(number) <= MAX_LENGTH):
        raise element.location.error(
            f"length={shown(number)} of parameter {shown(name)}",
            f"expected a whole number of tokens, 1 to {MAX_LENGTH}",
        )
    scaffold = normalise(element.attributes.get("scaffold", ""))
    return s.Parameter(name, int(number), scaffold, element.location)


def _check_unique(nodes: Iterable[s.Node]) -> None:
    """Raise PMLError if two sibling modules, or two sibling parameters, share a name."""
    seen: dict[tuple[bool, str], s.Location] = {}
    for node in nodes:
        for named in node.members if isinstance(node, s.Union) else (node,):
            if not isinstance(named, s.Module | s.Parameter):
                continue
            key = (isinstance(named, s.Module), named.name)
            if key in seen:
                kind = "module" if key[0] else "parameter"
                first = seen[key]
                raise named.location.error(
                    f"a second {kind} {shown(named.name)} (the first is in line {first.line})",
                    "names must be unique among siblings: rename one",
                )
            seen[key] = named.location


def _named_members(children: tuple[s.Node, ...], path: s.Path) -> Iterable[s.Path]:
    for node in s.flat(children):
        if isinstance(node, s.Union) and node.scaffold:
            member = next(one for one in node.members if one.name == node.scaffold)
            yield (*path, member.name)
            yield from _named_members(member.children, (*path, member.name))
        elif isinstance(node, s.Module):
            yield from _named_members(node.children, (*path, node.name))


def _called(name: str) -> str:
    return f"module {shown(name)}" if name else "<module>"


def _scaffold(element: s.Element, schema: s.Schema) -> s.Scaffold:
    check_attributes(element, {"modules"})
    if settled(element.content):
        raise element.location.error(
            "<scaffold> has contents", 'expected <scaffold modules="a b/c"/>'
        )
    names = element.attributes.get("modules", "").split()
    paths = {tuple(name.split("/")) for name in names}
    for path in paths:
        check_module(schema, path, element.location)
    if len(paths) < 2:
        raise element.location.error(
            f"a scaffold of {len(paths)} modules", "give it two modules or more"
        )
    check_exclusive(schema, ((path, element.location) for path in paths))
    for path in paths:
        if not schema.modules[path].is_cached:
            raise element.location.error(
                f"a scaffold of {shown('/'.join(path))}, which has cache='false'",
                "a scaffold is stored: leave the module out, or let it be cached",
            )
    ordered = tuple(path for path in schema.modules if path in paths)
    return s.Scaffold(ordered, element.location)


def check_module(schema: s.Schema, path: s.Path, location: s.Location) -> None:
    """Raise PMLError if a schema has no module of that path."""
    if path in schema.modules:
        return
    beside = [known[-1] for known in schema.modules if known[:-1] == path[:-1]]
    inside = f"module {shown('/'.join(path[:-1]))}" if path[:-1] else f"schema {shown(schema.name)}"
    raise location.error(
        f"{inside} has no module {shown(path[-1])}", f"expected one of {listing(beside)}"
    )


def check_exclusive(schema: s.Schema, named: Iterable[tuple[s.Path, s.Location]]) -> None:
    """Raise PMLError if two modules, or those around them, exclude each other.

    The error names the location of the second one.
    """
    chosen: dict[int, s.Path] = {}
    for path, location in named:
        for depth in range(1, len(path) + 1):
            number = schema.exclusions.get(path[:depth])
            if number is None:
                continue
            other = chosen.setdefault(number, path[:depth])
            if other != path[:depth]:
                raise location.error(
                    f"{shown('/'.join(other))} and {shown('/'.join(path[:depth]))} are members of "
                    "one union",
                    "choose one of them",
                )


# -- prompts -------------------------------------------------------------------------------------
#
# Source: Prompt Cache §3.2.2. Text may appear anywhere between imports; `kvrag.pml.engine` decides
# where it goes.


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

    path: s.Path
    arguments: Mapping[str, str]
    parts: tuple[Import | s.Text, ...]
    location: s.Location

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

    schema: s.Schema
    body: Import
    turns: tuple[tuple[str, str], ...]
    ending: str
    location: s.Location


def schema_name(source: str | FilePath) -> str:
    """Return the name of a prompt's schema. Raises PMLError."""
    return _root(source).attributes["schema"]


def parse_prompt(source: str | FilePath, schema: s.Schema) -> Prompt:
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
        part for part in settled(root.content) if isinstance(part, s.Text) or part.tag not in ROLES
    ]
    text = ""
    if parts and isinstance(parts[-1], s.Text):
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
    body = _import(schema, (), arguments, parts, root.location)
    check_exclusive(schema, ((one.path, one.location) for one in body.all()))
    return Prompt(schema, body, turns, text, root.location)


def _root(source: str | FilePath) -> s.Element:
    root = s.read_elements(source)
    if root.tag != "prompt":
        raise root.location.error(f"<{root.tag}> is not a prompt", "expected <prompt schema=...>")
    if "schema" not in root.attributes:
        raise root.location.error("<prompt> names no schema", "give it schema=...")
    return root


def _turns(root: s.Element) -> tuple[tuple[str, str], ...]:
    turns: list[tuple[str, str]] = []
    for part in root.content:
        if isinstance(part, s.Element) and part.tag in ROLES:
            check_attributes(part, set())
            if part.elements:
                raise part.elements[0].location.error(
                    f"<{part.elements[0].tag}> in <{part.tag}> of a prompt",
                    "import modules directly in <prompt>; they appear where the schema has them",
                )
            text = "".join(one.text for one in settled(part.content) if isinstance(one, s.Text))
            turns.append((part.tag, text))
        elif turns and (isinstance(part, s.Element) or part.text.strip()):
            raise part.location.error(
                "something after a turn of the prompt", "put turns at the prompt's end"
            )
    return tuple(turns)


def _import(
    schema: s.Schema,
    path: s.Path,
    attributes: Mapping[str, str],
    contents: list[s.Element | s.Text],
    location: s.Location,
) -> Import:
    known = schema.parameters(path)
    for name in attributes:
        if name not in known:
            owner = f"module {shown('/'.join(path))}" if path else f"schema {shown(schema.name)}"
            raise location.error(
                f"{owner} has no parameter {shown(name)}", f"expected one of {listing(known)}"
            )
    parts: list[Import | s.Text] = []
    seen: dict[str, s.Location] = {}
    for part in contents:
        if isinstance(part, s.Text):
            # A line feed between imports is formatting: the schema decides what separates modules.
            if part.text.strip():
                parts.append(part)
            continue
        inner = (*path, part.tag)
        check_module(schema, inner, part.location)
        first = seen.setdefault(part.tag, part.location)
        if first is not part.location:
            raise part.location.error(
                f"{shown('/'.join(inner))} is imported again (first in line {first.line})",
                "import it once",
            )
        parts.append(_import(schema, inner, part.attributes, settled(part.content), part.location))
    arguments = {name: normalise(value) for name, value in attributes.items()}
    return Import(path, arguments, tuple(parts), location)


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
