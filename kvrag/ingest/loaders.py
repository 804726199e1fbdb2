"""Files and framework objects to documents.

A text file must state its encoding: by being valid UTF-8, by a byte order mark, or (HTML) by its
own declaration. Any other file is refused, since a wrong guess would index garbage.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvrag.chunk import Document, Mark, content_hash, normalise_text
from kvrag.errors import DocumentError, ParameterError
from kvrag.ingest.code import CODE_SUFFIXES, is_installed, outline
from kvrag.ingest.converted import CONVERTED_SUFFIXES, converted_to_text
from kvrag.ingest.files import printable
from kvrag.ingest.headings import checked_outline
from kvrag.ingest.html import html_to_text
from kvrag.ingest.limits import MAX_TITLE_CHARACTERS
from kvrag.ingest.metadata import plain_metadata
from kvrag.ingest.office import PAGE_BREAK, docx_to_text, pdf_to_text

# The largest value of a C long on every system; the content of files is limited as a whole.
_MAX_FIELD_CHARACTERS = (1 << 31) - 1

_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark is the beginning of this one
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class NoTextError(DocumentError):
    """The whole file or document was read and holds no text."""


TEXT_FIELDS = ("text", "page_content", "content", "body", "passage")
# Encodings that pages declare, by their Python name, and the encoding to read them as, both
# from https://encoding.spec.whatwg.org. Python has more codecs, some of which do not even
# produce text.
_WEB_ENCODINGS = {
    **{name: name for name in ("utf-8", "cp866", "koi8-r", "koi8-u", "mac-roman", "mac-cyrillic")},
    **{f"iso8859-{part}": f"iso8859-{part}" for part in (2, 3, 4, 5, 6, 7, 8, 10, 13, 14, 15, 16)},
    **{f"cp{page}": f"cp{page}" for page in (874, 932, 949, *range(1250, 1259))},
    **{name: name for name in ("gbk", "gb18030", "euc_jp", "iso2022_jp")},
    **dict.fromkeys(("ascii", "iso8859-1"), "cp1252"),
    **dict.fromkeys(("iso8859-11", "tis-620"), "cp874"),
    "iso8859-9": "cp1254",
    "gb2312": "gbk",
    **dict.fromkeys(("big5", "big5hkscs"), "big5hkscs"),
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    # Markup whose declaration could be read as ASCII is in none of these.
    **dict.fromkeys(("utf-16", "utf-16-le", "utf-16-be"), "utf-8"),
}
_DECLARED = re.compile(rb"<meta[^>]+charset=[\"']?([\w.:-]+)", re.IGNORECASE)


def read_text(path: str, content: bytes, declared: str | None = None) -> str:
    """Decode a text file.

    Raises
    ------
    DocumentError
        When it is neither UTF-8 nor marked otherwise, or is not text at all.
    """
    encoding = declared or "utf-8"
    for mark, name in _BYTE_ORDER_MARKS:
        if content.startswith(mark):
            encoding = name
            break
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{path}: not valid {encoding} at byte {error.start} "
            f"(0x{content[error.start]:02x}); convert it, for example with "
            f"'iconv -f latin1 -t utf-8'"
        ) from error
    if "\0" in text:
        raise DocumentError(
            f"{path}: holds NUL characters, so it is binary or UTF-16 without a byte order "
            "mark; expected text"
        )
    return text


def _load_plain(path: str, content: bytes) -> Iterator[Document]:
    yield Document(path, read_text(path, content))


def _load_code(path: str, content: bytes) -> Iterator[Document]:
    text = normalise_text(read_text(path, content).replace(PAGE_BREAK, "\n"))
    yield Document(path, text, outline=outline(text, Path(path).suffix.lower()))


def _load_html(path: str, content: bytes) -> Iterator[Document]:
    declared = None
    if match := _DECLARED.search(content[:4096]):
        try:
            declared = _WEB_ENCODINGS[codecs.lookup(match[1].decode("ascii")).name]
        except LookupError as error:
            raise DocumentError(
                f"{path}: declares {match[1].decode('ascii')!r}, an unknown encoding for pages; "
                "declare the right one, or convert it to UTF-8"
            ) from error
    title, text = html_to_text(path, read_text(path, content, declared))
    yield Document(path, text, _titled(title))


def _load_pdf(path: str, content: bytes) -> Iterator[Document]:
    title, text = pdf_to_text(path, content)
    yield Document(path, text, _titled(title))


def _load_docx(path: str, content: bytes) -> Iterator[Document]:
    title, text = docx_to_text(path, content)
    yield Document(path, text, _titled(title))


def _load_converted(path: str, content: bytes) -> Iterator[Document]:
    title, text = converted_to_text(path, Path(path).suffix.lower(), content)
    yield Document(path, text, _titled(title))


def _titled(title: str) -> dict[str, Any]:
    return plain_metadata({"title": title[:MAX_TITLE_CHARACTERS]}) if title else {}


def _load_jsonl(path: str, content: bytes) -> Iterator[Document]:
    # Not splitlines(), which also splits at characters that JSON strings may hold.
    for number, line in enumerate(read_text(path, content).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DocumentError(f"{path}, line {number}: not JSON ({error})") from error
        document = row_to_document(row, f"{path}#{number}", f"{path}, line {number}")
        if document.text.strip():
            yield document


def row_to_document(row: Any, source: str, place: str) -> Document:
    """Return the document of a row: its text, and everything else as metadata.

    Raises
    ------
    DocumentError
        When it holds no text, or no plain metadata; the message begins with `place`.
    """
    if isinstance(row, str):
        row = {"text": row}
    name = next((name for name in TEXT_FIELDS if _is_text(row, name)), None)
    if name is None:
        raise DocumentError(
            f"{place}: expected an object with its text under one of {', '.join(TEXT_FIELDS)}"
        )
    others = {key: value for key, value in row.items() if key not in (name, "metadata")}
    metadata = row.get("metadata")
    extra = metadata if isinstance(metadata, Mapping) else {}
    if not row[name].strip():
        return Document(source, row[name])
    try:
        plain = plain_metadata({**others, **extra})
    except DocumentError as error:
        raise DocumentError(f"{place}: {error}") from error
    return Document(source, row[name], plain)


def _is_text(row: Any, name: str) -> bool:
    return isinstance(row, dict) and isinstance(row.get(name), str)


def _load_csv(path: str, content: bytes) -> Iterator[Document]:
    text = read_text(path, content)
    header = text.split("\n", 1)[0]
    delimiter = max(",;\t|", key=header.count)  # a comma, unless another one is more frequent
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        columns = [name.strip() for name in next(reader, [])]
        for number, row in enumerate(reader, 1):
            beyond = (f"column {place + 1}" for place in range(len(columns), len(row)))
            cells = zip(itertools.chain(columns, beyond), row, strict=False)
            lines = [f"{name}: {cell.strip()}" for name, cell in cells if cell.strip()]
            if lines:
                yield Document(f"{path}#{number}", "\n".join(lines), {"row": number})
    except csv.Error as error:
        raise DocumentError(f"{path}, line {reader.line_num}: {error}") from error


Loader = Callable[[str, bytes], Iterable[Document]]
"""Yields the documents in a file's bytes; their source is its path, with ``#...`` for parts."""

_LOADERS: dict[str, Loader] = {
    **dict.fromkeys((".txt", ".text", ".md", ".markdown", ".rst", ".log"), _load_plain),
    **dict.fromkeys((".html", ".htm", ".xhtml"), _load_html),
    **dict.fromkeys((".jsonl", ".ndjson"), _load_jsonl),
    **dict.fromkeys((".csv", ".tsv"), _load_csv),
    ".pdf": _load_pdf,
    ".docx": _load_docx,
    **dict.fromkeys(CONVERTED_SUFFIXES, _load_converted),
}
SUFFIXES = frozenset(_LOADERS)
"""The suffixes of files that the built-in loaders read, without those of source code."""
_LOADERS.update(dict.fromkeys(CODE_SUFFIXES, _load_code))


def sought_suffixes() -> frozenset[str]:
    """Return the suffixes of the files that folders are searched for.

    Source code is among them if its grammar is installed. Otherwise it is read if it is named.
    """
    return SUFFIXES | set(filter(is_installed, CODE_SUFFIXES))


def find_loader(path: str, others: Mapping[str, Loader]) -> Loader:
    """Return the loader of a file; `others` take precedence over the built-in ones.

    Raises
    ------
    DocumentError
        When the file has an unknown suffix.
    """
    suffix = Path(path).suffix.lower()
    loader = others.get(suffix) or _LOADERS.get(suffix)
    if loader is None:
        known = " ".join(sorted({*_LOADERS, *others}))
        raise DocumentError(
            f"{path}: files of kind {suffix or 'no suffix'!r} are not read; expected one of {known}"
        )
    return loader


def load_bytes(
    path: str, content: bytes, others: Mapping[str, Loader] | None = None
) -> Iterator[Document]:
    """Yield the documents in a file's bytes.

    Parameters
    ----------
    path
        The file's absolute path: the documents' source, with ``#row`` for rows of jsonl and csv.
    content
        The file's whole content.
    others
        Additional loaders by suffix.

    Raises
    ------
    DocumentError
        When the file has an unknown suffix, is damaged, or is not text; the message says which.
    NoTextError
        When the file is empty, or holds only whitespace.
    """
    loader = find_loader(path, others or {})
    if not content:
        raise NoTextError(f"{path}: the file is empty")
    has_text = False
    for document in loader(path, content):
        has_text = has_text or bool(document.text.strip())
        yield document
    if not has_text:
        raise NoTextError(f"{path}: holds no text")


@dataclass(frozen=True)
class AsCut:
    """A document, of any kind that `to_document` takes, that becomes one chunk."""

    value: Any


def to_document(value: Any) -> Document:
    """Convert a `Document`, an `AsCut`, a LangChain Document or a LlamaIndex node to a `Document`.

    Framework objects are recognised by their attributes. If one has no id, its content
    identifies it, so that adding it again changes nothing.

    Raises
    ------
    ParameterError
        When `value` is of another type.
    DocumentError
        When it holds no text, its text has another type, or its id cannot be stored.
    """
    if isinstance(value, AsCut):
        return replace(to_document(value.value), is_whole=True)
    is_whole = False
    marks: tuple[Mark, ...] = ()
    if isinstance(value, Document):
        is_whole, marks = value.is_whole, value.outline
        source, text, metadata = value.source, value.text, value.metadata
    elif isinstance(getattr(value, "page_content", None), str):
        source, text = str(getattr(value, "id", None) or ""), value.page_content
        metadata = getattr(value, "metadata", None) or {}
    elif callable(getattr(value, "get_content", None)) and hasattr(value, "node_id"):
        # Without arguments: the node's own text, without the metadata in front of it.
        source, text = value.node_id, value.get_content()
        metadata = getattr(value, "metadata", None) or {}
    else:
        raise ParameterError(
            f"cannot ingest a value of type {type(value).__name__}: expected a path, a "
            "kvrag.Document, a LangChain Document or a LlamaIndex node"
        )
    if not isinstance(source, str | Path):
        raise DocumentError(
            f"the source of a document is a value of type {type(source).__name__}: expected a text"
        )
    source = str(source)
    shown = printable(source) or "a document without id"
    if not isinstance(text, str):
        raise DocumentError(
            f"{shown}: its text is a value of type {type(text).__name__}: expected a text"
        )
    try:
        metadata = plain_metadata(metadata)
        marks = checked_outline(marks, text)
    except DocumentError as error:
        raise DocumentError(f"{shown}: {error}") from error
    source = source or _content_id(text, metadata)
    check_source(source)
    if not text.strip():
        raise NoTextError(f"{source}: holds no text")
    return Document(source, text, metadata, is_whole, marks)


def is_storable(source: str) -> bool:
    """Return whether the catalog can hold a source: SQLite stores text as UTF-8."""
    try:
        source.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_source(source: str) -> None:
    """Raise DocumentError if a file's name or an id is not valid Unicode."""
    if not is_storable(source):
        raise DocumentError(
            f"{printable(source)}: the name is not valid UTF-8; rename it, for example with "
            "'convmv -f latin1 -t utf8'"
        )


def _content_id(text: str, metadata: Mapping[str, Any]) -> str:
    place = str(metadata.get("source") or "text")
    return f"{place}#{content_hash(json.dumps([text, metadata], sort_keys=True))[:16]}"
