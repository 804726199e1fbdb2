"""The parts of a schema, and where in a file they are.

Source: Gim et al., Prompt Cache (arXiv 2311.04934) §3.2: text and modules, unions of modules that
exclude each other, parameters of a reserved length, the roles of a conversation. §3.3: scaffolds.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path as FilePath
from xml.sax import SAXParseException
from xml.sax.handler import ContentHandler
from xml.sax.xmlreader import InputSource, Locator

from defusedxml.common import DefusedXmlException
from defusedxml.expatreader import DefusedExpatParser

from kvrag.arguments import shown
from kvrag.chunk import normalise
from kvrag.errors import ParameterError, PMLError
from kvrag.regularfile import open_regular

Path = tuple[str, ...]
"""The names of the modules around a module, then its own name; () is the schema itself."""


@dataclass(frozen=True)
class Location:
    """A location in a file of markup or a program.

    Attributes
    ----------
    file
        The file, as the caller named it.
    line, column
        Both counted from 1.
    """

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    def error(self, problem: str, remedy: str) -> PMLError:
        """Return an error about a problem at this place."""
        return PMLError(f"{self}: {problem}; {remedy}", self.file, self.line, self.column)


@dataclass(frozen=True)
class Text:
    """Text, with its outer white space settled. `is_document` marks text of a file (``src``)."""

    text: str
    location: Location
    is_document: bool = False


@dataclass(frozen=True)
class Parameter:
    """Room for text that a prompt gives.

    Attributes
    ----------
    name
        Unique in its module.
    length
        Tokens of the room.
    scaffold
        The text for prompts that give none; "" means placeholders.
    """

    name: str
    length: int
    scaffold: str
    location: Location


@dataclass(frozen=True)
class Module:
    """A part of a schema that a prompt may import by name.

    Attributes
    ----------
    name
        The name. An anonymous module, "", is included whenever the module around it is.
    is_cached
        Whether its text is encoded once and stored. Otherwise every prompt computes it.
    """

    name: str
    children: tuple[Node, ...]
    location: Location
    is_cached: bool = True


@dataclass(frozen=True)
class Union:
    """Modules that exclude each other: a prompt imports at most one.

    Attributes
    ----------
    members
        The modules, at least one.
    scaffold
        The member that represents the union in the schema's scaffold, or "".
    """

    members: tuple[Module, ...]
    scaffold: str
    location: Location


@dataclass(frozen=True)
class Turn:
    """One turn of the conversation. Turns are not nested.

    Attributes
    ----------
    role
        ``"system"``, ``"user"`` or ``"assistant"``.
    """

    role: str
    children: tuple[Node, ...]
    location: Location


Node = Text | Parameter | Module | Union | Turn


@dataclass(frozen=True)
class Scaffold:
    """Modules that are also encoded together, for prompts that import all of them.

    Attributes
    ----------
    paths
        The modules, two or more, in the schema's order.
    """

    paths: tuple[Path, ...]
    location: Location


@dataclass(frozen=True)
class Schema:
    """A parsed schema, fully checked."""

    name: str
    children: tuple[Node, ...]
    scaffolds: tuple[Scaffold, ...]
    location: Location

    @cached_property
    def modules(self) -> dict[Path, Module]:
        """All modules by path, in the order of the file."""
        return dict(_modules(self.children, ()))

    @cached_property
    def exclusions(self) -> dict[Path, int]:
        """The number of the union of each module that is a member of one."""
        numbers: dict[Path, int] = {}
        for number, (path, union) in enumerate(_unions(self.children, ())):
            for member in union.members:
                numbers[(*path, member.name)] = number
        return numbers

    @property
    def has_turns(self) -> bool:
        """Whether the schema is a conversation."""
        return any(True for _ in turns(self.children))

    def parameters(self, path: Path) -> dict[str, Parameter]:
        """Return the parameters of one module, without those of modules in it."""
        children = self.modules[path].children if path else self.children
        return {part.name: part for part in flat(children) if isinstance(part, Parameter)}


def flat(children: tuple[Node, ...]) -> Iterator[Node]:
    """Yield nodes in order, with turns and anonymous modules replaced by their contents."""
    for node in children:
        if isinstance(node, Turn) or (isinstance(node, Module) and not node.name):
            yield from flat(node.children)
        else:
            yield node


def turns(children: tuple[Node, ...], path: Path = ()) -> Iterator[tuple[Path, Turn]]:
    """Yield all turns in order, each with the path of its module."""
    for node in children:
        if isinstance(node, Turn):
            yield path, node
        elif isinstance(node, Module):
            yield from turns(node.children, (*path, node.name) if node.name else path)
        elif isinstance(node, Union):
            yield from turns(node.members, path)


def _modules(children: tuple[Node, ...], path: Path) -> Iterator[tuple[Path, Module]]:
    for node in flat(children):
        for module in node.members if isinstance(node, Union) else (node,):
            if isinstance(module, Module):
                inner = (*path, module.name)
                yield inner, module
                yield from _modules(module.children, inner)


def _unions(children: tuple[Node, ...], path: Path) -> Iterator[tuple[Path, Union]]:
    for node in flat(children):
        if isinstance(node, Union):
            yield path, node
        for module in node.members if isinstance(node, Union) else (node,):
            if isinstance(module, Module):
                yield from _unions(module.children, (*path, module.name))


# -- elements ------------------------------------------------------------------------------------
#
# expat parses it, through defusedxml. A document type, and so any custom entity, is refused before
# it is processed.

MAX_BYTES = 8 << 20
"""The most bytes of one file: schema, prompt or text."""

MAX_DEPTH = 64
"""The most elements inside each other."""

_REMEDIES = {
    "invalid token": "if this is text or code with '<' or '&', wrap it in <![CDATA[ ... ]]>",
    "mismatched tag": "close elements in the order they were opened; text or code with '<' "
    "belongs in <![CDATA[ ... ]]>",
    "undefined entity": "write the character itself, or a number such as &#160;",
    "unclosed CDATA section": "end it with ]]>",
    "duplicate attribute": "give each attribute once",
    "no element found": "a file of markup holds one <schema> or one <prompt>",
}


@dataclass(frozen=True)
class Run:
    """Text between two elements, as it was written."""

    text: str
    location: Location


@dataclass
class Element:
    """One element, with what it contains in order."""

    tag: str
    attributes: dict[str, str]
    location: Location
    content: list[Element | Run] = field(default_factory=list)

    @property
    def elements(self) -> list[Element]:
        """The direct child elements."""
        return [part for part in self.content if isinstance(part, Element)]


def read_elements(source: str | FilePath) -> Element:
    """Read a file of markup.

    Parameters
    ----------
    source
        A path, or the markup itself as a string.

    Raises
    ------
    PMLError
        If it is not well-formed XML, is too large or too deep, or declares a document type.
    ParameterError
        If it is neither a path nor a string.
    """
    if isinstance(source, FilePath):
        name = str(source)
        text = read_bytes(source, Location(name, 1, 1))
        encoding = None
    elif not isinstance(source, str):
        raise ParameterError(
            f"markup {shown(source)}: expected markup as a string, or a pathlib.Path of a file"
        )
    else:
        name, encoding = "<string>", "utf-8"
        try:
            text = source.encode()
        except UnicodeEncodeError as error:
            raise Location(name, 1, error.start + 1).error(
                "half of a surrogate pair is not a character", "decode the bytes as UTF-8"
            ) from error
        _check_size(len(text), Location(name, 1, 1))
    handler = _Handler(name)
    # In one piece: with several, expat scans a very long first token again for each.
    parser = DefusedExpatParser(bufsize=MAX_BYTES + 1, forbid_dtd=True)
    parser.setContentHandler(handler)
    given = InputSource(name)
    given.setByteStream(io.BytesIO(text))
    if encoding is not None:
        # A string's declared encoding does not matter any more.
        given.setEncoding(encoding)
    try:
        parser.parse(given)
    except SAXParseException as error:
        message = error.getMessage()
        remedy = next(
            (words for found, words in _REMEDIES.items() if found in message),
            "expected well-formed XML",
        )
        if isinstance(source, str) and source.strip() and "<" not in source:
            message = "no markup"
            remedy = "expected a string of markup; a file's path is given as a pathlib.Path"
        elif "invalid token" in message and not _is_text(text):
            message, remedy = "bytes that are not UTF-8 text", "save the file as UTF-8"
        elif handler.root is None and _begins_with_text(text):
            message = "no XML"
            remedy = "expected markup that begins with <schema name=...> or <prompt schema=...>"
        column = (error.getColumnNumber() or 0) + 1
        raise Location(name, error.getLineNumber() or 1, column).error(message, remedy) from error
    except DefusedXmlException as error:
        raise handler.location.error(
            "a document type or an entity is declared",
            "remove <!DOCTYPE ...>: text is written out, characters as numbers such as &#160;",
        ) from error
    except (LookupError, ValueError) as error:
        # Python does not know the encoding, or expat cannot use it.
        raise handler.location.error(
            f"the encoding that is declared cannot be read ({error})", "save it as UTF-8"
        ) from error
    assert handler.root is not None
    return handler.root


def _begins_with_text(markup: bytes) -> bool:
    start = markup.removeprefix(codecs.BOM_UTF8).lstrip()
    return bool(start) and _is_text(markup) and not start.startswith(b"<")


def read_bytes(path: FilePath, location: Location) -> bytes:
    """Return the contents of a file of limited size. Raises PMLError at `location` on failure."""
    try:
        with open_regular(path) as file:
            found = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # the latter for a name that the system cannot have
        reason = getattr(error, "strerror", None) or error
        raise location.error(f"{path} cannot be read ({reason})", "give a readable file") from error
    _check_size(len(found), location)
    return found


def _is_text(content: bytes) -> bool:
    """Return whether markup without a declared encoding can be decoded, and holds no NUL."""
    names_encoding = b"encoding" in content.partition(b"?>")[0][:200]
    if names_encoding or content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return True
    try:
        return "\0" not in content.decode()
    except UnicodeDecodeError:
        return False


def _check_size(num_bytes: int, location: Location) -> None:
    if num_bytes > MAX_BYTES:
        raise location.error(
            f"more than {MAX_BYTES >> 20} MiB",
            "expected a smaller file; put long texts into separate files with src=...",
        )


class _Handler(ContentHandler):
    """Builds the elements; expat reports their places."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.root: Element | None = None
        self._file = file
        self._open: list[Element] = []
        self._locator: Locator | None = None
        self._text: list[str] = []
        self._text_location = Location(file, 1, 1)

    @property
    def location(self) -> Location:
        """The parser's current location."""
        if self._locator is None:
            return Location(self._file, 1, 1)
        line, column = self._locator.getLineNumber(), self._locator.getColumnNumber()
        return Location(self._file, line or 1, (column or 0) + 1)

    def setDocumentLocator(self, locator: Locator) -> None:  # noqa: N802  # SAX's name
        self._locator = locator

    def startElement(self, name: str, attrs: object) -> None:  # noqa: N802
        self._end_text()
        element = Element(name, dict(attrs.items()), self.location)  # type: ignore[attr-defined]
        if len(self._open) == MAX_DEPTH:
            raise element.location.error(
                f"<{name}> is inside {MAX_DEPTH} elements", f"expected at most {MAX_DEPTH} levels"
            )
        if self._open:
            self._open[-1].content.append(element)
        else:
            self.root = element
        self._open.append(element)

    def endElement(self, name: str) -> None:  # noqa: N802, ARG002
        self._end_text()
        self._open.pop()

    def characters(self, content: str) -> None:
        if not self._text:
            self._text_location = self.location
        self._text.append(content)

    def processingInstruction(self, target: str, data: str) -> None:  # noqa: N802, ARG002
        raise self.location.error(f"<?{target} ...?> means nothing here", "remove it")

    def _end_text(self) -> None:
        if self._text and self._open:
            text = normalise("".join(self._text))
            self._open[-1].content.append(Run(text, self._text_location))
        self._text.clear()
