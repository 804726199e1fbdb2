"""Parses XML into elements with their places: strict, bounded, without entities.

expat parses it, through defusedxml. A document type, and so any custom entity, is refused before
it is processed.
"""

from __future__ import annotations

import codecs
import io
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax import SAXParseException
from xml.sax.handler import ContentHandler
from xml.sax.xmlreader import InputSource, Locator

from defusedxml.common import DefusedXmlException
from defusedxml.expatreader import DefusedExpatParser

from kvrag.arguments import shown
from kvrag.chunk import normalise
from kvrag.errors import ParameterError
from kvrag.pml.schema import Location
from kvrag.regularfile import open_regular

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


def read_elements(source: str | Path) -> Element:
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
    if isinstance(source, Path):
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


def read_bytes(path: Path, location: Location) -> bytes:
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
