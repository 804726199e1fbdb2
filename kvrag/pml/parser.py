"""Markup to a checked `Schema`.

Deviations from the public reference implementation, which recovers from malformed XML, ignores
what it does not know and cuts what is too long: here all of that is an error with its location.

White space: around the contents of an element it is formatting and goes; between an element and
text, or between two elements, it is kept as one line feed, or as one space where it has none;
between turns it goes. A text's common indentation goes as well. Inside texts nothing else changes.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path as FilePath

from kvrag.chunk import normalise_text
from kvrag.pml.elements import Element, Run, normalise, read_bytes, read_elements
from kvrag.pml.locations import Location
from kvrag.pml.schema import (
    Module,
    Node,
    Parameter,
    Path,
    Scaffold,
    Schema,
    Text,
    Turn,
    Union,
    flat,
    turns,
)

ROLES = ("system", "user", "assistant")
MAX_LENGTH = 65_536
"""Tokens of a parameter."""

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.-]*")
RESERVED = {"schema", "prompt", "module", "union", "param", "parameter", "scaffold", *ROLES}
"""Names that no module or parameter may have: they mean something of their own."""


def parse_schema(source: str | FilePath) -> Schema:
    """Read a schema.

    Parameters
    ----------
    source
        A path, or the markup itself as a string; ``src`` of modules needs a path.

    Raises
    ------
    PMLError
        Naming file, line, column and remedy.
    """
    root = read_elements(source)
    folder = source.parent if isinstance(source, FilePath) else None
    return _SchemaParser(folder).schema(root)


class _SchemaParser:
    def __init__(self, folder: FilePath | None) -> None:
        self._folder = folder
        # The one that is being read.
        self._turn: Element | None = None

    def schema(self, root: Element) -> Schema:
        if root.tag != "schema":
            raise root.location.error(f"<{root.tag}> is no schema", "expected <schema name=...>")
        name = checked_name(root)
        check_attributes(root, {"name"})
        scaffolds = [one for one in root.elements if one.tag == "scaffold"]
        body = Element(root.tag, root.attributes, root.location)
        for part in root.content:
            before = body.content[-1] if body.content else None
            if isinstance(part, Run) and isinstance(before, Run):
                # Between them stood a scaffold, which is nothing in the text.
                body.content[-1] = Run(before.text + part.text, before.location)
            elif isinstance(part, Run) or part.tag != "scaffold":
                body.content.append(part)
        children = self._children(body)
        schema = Schema(name, children, (), root.location)
        listed = [_scaffold(one, schema) for one in scaffolds]
        named = tuple(_named_members(children, ()))
        if len(named) > 1:
            listed.append(Scaffold(named, root.location))
        return Schema(name, children, tuple(listed), root.location)

    def _children(self, element: Element, *, is_cached: bool = True) -> tuple[Node, ...]:
        nodes: list[Node] = []
        for part in settled(element.content):
            nodes.append(part if isinstance(part, Text) else self._node(part, is_cached))
        if any(turns(tuple(nodes))):
            # What stands between turns is the chat template's business.
            nodes = [one for one in nodes if not (isinstance(one, Text) and one.text.isspace())]
        _check_unique(flat(tuple(nodes)))
        return tuple(nodes)

    def _node(self, element: Element, is_cached: bool) -> Node:
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
            return Turn(element.tag, children, element.location)
        remedies = {
            "schema": "a file holds one schema: give the other a file of its own",
            "prompt": "a prompt is a file of its own, or a string of its own",
            "scaffold": "it stands directly in <schema>, and names modules by their paths",
        }
        raise element.location.error(
            f"<{element.tag}> is not known here",
            remedies.get(
                element.tag,
                "expected module, union, parameter, system, user or assistant; text or code with "
                "'<' belongs in <![CDATA[ ... ]]>",
            ),
        )

    def _module(self, element: Element, is_cached: bool) -> Module:
        # Without a name it is always there (§3.2.1).
        name = checked_name(element) if "name" in element.attributes else ""
        check_attributes(element, {"name", "src", "cache"})
        cache = element.attributes.get("cache")
        if cache not in (None, "true", "false"):
            raise element.location.error(
                f"cache={cache!r} of a module",
                "expected 'false', for what every prompt computes, or 'true'",
            )
        is_cached = is_cached if cache is None else cache == "true"
        if "src" not in element.attributes:
            children = self._children(element, is_cached=is_cached)
            return Module(name, children, element.location, is_cached)
        if settled(element.content):
            raise element.location.error(
                f"{_called(name)} has src and contents", "give the one or the other"
            )
        text = self._source_text(element.attributes["src"], element.location)
        children = (Text(text, element.location, is_document=True),) if text else ()
        return Module(name, children, element.location, is_cached)

    def _source_text(self, src: str, location: Location) -> str:
        remedy = "src names a text file beside the schema or in a folder below it"
        if self._folder is None:
            raise location.error("src in a schema that is no file", "write the text out")
        if not src or "\0" in src or "\\" in src or FilePath(src).is_absolute():
            raise location.error(f"src={src!r} is no relative path", remedy)
        try:
            folder = self._folder.resolve()
            path = (folder / src).resolve()
            is_file = path.is_file()
        except (OSError, RuntimeError) as error:
            # A name that is too long, links in a circle.
            reason = getattr(error, "strerror", None) or error
            raise location.error(f"src={src!r} cannot be found ({reason})", remedy) from error
        # After resolving: neither '..' nor a link leads out.
        if not path.is_relative_to(folder):
            raise location.error(f"src={src!r} leads out of the schema's folder", remedy)
        if not is_file:
            raise location.error(f"src={src!r} is no file", remedy)
        try:
            return normalise_text(read_bytes(path, location).decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise location.error(
                f"src={src!r} is no UTF-8 text (byte {error.start})", "save it as UTF-8"
            ) from error

    def _union(self, element: Element, is_cached: bool) -> Union:
        check_attributes(element, {"scaffold"})
        members: list[Module] = []
        for part in element.content:
            if isinstance(part, Run):
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
                f"scaffold={scaffold!r} is no member of this union",
                f"expected one of {listing(member.name for member in members)}",
            )
        if not all(member.is_cached for member in members if member.name == scaffold):
            raise element.location.error(
                f"scaffold={scaffold!r} is a module with cache='false'",
                "a scaffold is stored: name another member, or let that one be cached",
            )
        _check_unique(members)
        return Union(tuple(members), scaffold, element.location)


def checked_name(element: Element) -> str:
    """Return the name an element has. Raises PMLError when it has none or none that may be."""
    name = element.attributes.get("name")
    if name is None:
        raise element.location.error(f"<{element.tag}> has no name", "give it name=...")
    check_name(name, element.location)
    return name


def check_name(name: str, location: Location) -> None:
    """Raise PMLError when no schema, module or parameter may have that name."""
    if not _NAME.fullmatch(name) or name in RESERVED:
        raise location.error(
            f"name={name!r} is no name",
            "expected a letter or underscore, then letters, digits, '_', '.' and '-', and none of "
            f"{', '.join(sorted(RESERVED))}",
        )


def check_attributes(element: Element, known: set[str]) -> None:
    """Raise PMLError when an element has an attribute that is not among `known`."""
    for name in element.attributes:
        if name not in known:
            expected = f"expected {listing(sorted(known))}" if known else "it takes none"
            raise element.location.error(f"<{element.tag}> has the attribute {name!r}", expected)


def listing(names: Iterable[str], most: int = 8) -> str:
    """Return some names for a message, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more


def settled(content: list[Element | Run]) -> list[Element | Text]:
    """Return contents with the white space around texts settled, as the module's head says."""
    parts: list[Element | Text] = []
    for number, part in enumerate(content):
        if isinstance(part, Element):
            parts.append(part)
            continue
        body = part.text.strip()
        before = part.text[: len(part.text) - len(part.text.lstrip())]
        after = part.text[len(part.text.rstrip()) :]
        opening = "" if number == 0 else _joint(before)
        ending = "" if number == len(content) - 1 else _joint(after)
        if body:
            parts.append(Text(normalise(opening + _dedented(part.text) + ending), part.location))
        elif opening and ending:
            parts.append(Text(opening, part.location))
    return parts


def _joint(space: str) -> str:
    return "\n" if "\n" in space else space[:1] and " "


def _dedented(text: str) -> str:
    first, feed, rest = text.partition("\n")
    # What follows a start tag on its line has no indentation of its own.
    return (first + feed + textwrap.dedent(rest)).strip()


def _parameter(element: Element) -> Parameter:
    name = checked_name(element)
    check_attributes(element, {"name", "len", "length", "scaffold"})
    if element.elements or any(
        isinstance(part, Run) and part.text.strip() for part in element.content
    ):
        raise element.location.error(
            f"parameter {name!r} has contents",
            "it is empty, <parameter .../>; what stands there by default is scaffold='...'",
        )
    given = [element.attributes[key] for key in ("len", "length") if key in element.attributes]
    if len(given) != 1:
        raise element.location.error(
            f"parameter {name!r} has {len(given)} lengths", "give it length=TOKENS"
        )
    number = given[0]
    # Few digits first: Python refuses to read very many.
    is_short = number.isascii() and number.isdigit() and len(number) <= len(str(MAX_LENGTH))
    if not (is_short and 1 <= int(number) <= MAX_LENGTH):
        raise element.location.error(
            f"length={number!r} of parameter {name!r}",
            f"expected a whole number of tokens, 1 to {MAX_LENGTH}",
        )
    scaffold = normalise(element.attributes.get("scaffold", ""))
    return Parameter(name, int(number), scaffold, element.location)


def _check_unique(nodes: Iterable[Node]) -> None:
    """Raise PMLError when two modules, or two parameters, side by side share a name."""
    seen: dict[tuple[bool, str], Location] = {}
    for node in nodes:
        for named in node.members if isinstance(node, Union) else (node,):
            if not isinstance(named, Module | Parameter):
                continue
            key = (isinstance(named, Module), named.name)
            if key in seen:
                kind = "module" if key[0] else "parameter"
                first = seen[key]
                raise named.location.error(
                    f"a second {kind} {named.name!r} (the first is in line {first.line})",
                    "names are unique among those side by side: rename one",
                )
            seen[key] = named.location


def _named_members(children: tuple[Node, ...], path: Path) -> Iterable[Path]:
    for node in flat(children):
        if isinstance(node, Union) and node.scaffold:
            member = next(one for one in node.members if one.name == node.scaffold)
            yield (*path, member.name)
            yield from _named_members(member.children, (*path, member.name))
        elif isinstance(node, Module):
            yield from _named_members(node.children, (*path, node.name))


def _called(name: str) -> str:
    return f"module {name!r}" if name else "<module>"


def _scaffold(element: Element, schema: Schema) -> Scaffold:
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
            f"a scaffold of {len(paths)} modules", "it holds two modules or more"
        )
    check_exclusive(schema, ((path, element.location) for path in paths))
    for path in paths:
        if not schema.modules[path].is_cached:
            raise element.location.error(
                f"a scaffold of {'/'.join(path)!r}, which has cache='false'",
                "a scaffold is stored: leave the module out, or let it be cached",
            )
    ordered = tuple(path for path in schema.modules if path in paths)
    return Scaffold(ordered, element.location)


def check_module(schema: Schema, path: Path, location: Location) -> None:
    """Raise PMLError when a schema has no module of that path."""
    if path in schema.modules:
        return
    beside = [known[-1] for known in schema.modules if known[:-1] == path[:-1]]
    inside = f"module {'/'.join(path[:-1])!r}" if path[:-1] else f"schema {schema.name!r}"
    raise location.error(
        f"{inside} has no module {path[-1]!r}", f"expected one of {listing(beside)}"
    )


def check_exclusive(schema: Schema, named: Iterable[tuple[Path, Location]]) -> None:
    """Raise PMLError, where the second is named, when two modules or those around them exclude
    each other.
    """
    chosen: dict[int, Path] = {}
    for path, location in named:
        for depth in range(1, len(path) + 1):
            number = schema.exclusions.get(path[:depth])
            if number is None:
                continue
            other = chosen.setdefault(number, path[:depth])
            if other != path[:depth]:
                raise location.error(
                    f"{'/'.join(other)!r} and {'/'.join(path[:depth])!r} are members of one union",
                    "choose one of them",
                )
