"""Files and framework objects to documents."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvrag.chunk import PAGE_BREAK, Document, Mark, content_hash, normalise_text
from kvrag.errors import DocumentError, ParameterError
from kvrag.ingest.code import CODE_SUFFIXES, is_installed, outline
from kvrag.ingest.converted import CONVERTED_SUFFIXES, converted_to_text, pdf_to_text
from kvrag.ingest.files import check_source, printable, read_page, read_text
from kvrag.ingest.filters import plain_metadata
from kvrag.ingest.headings import checked_outline
from kvrag.ingest.html import epub_to_text, html_to_text
from kvrag.ingest.limits import MAX_TITLE_CHARACTERS
from kvrag.ingest.word import docx_to_text

# The largest value of a C long on every system; the content of files is limited as a whole.
_MAX_FIELD_CHARACTERS = (1 << 31) - 1
_SEPARATORS = ",;\t|"
_NO_SEPARATOR = "\0"  # which no text has
# In place of the share of rows of one length.
_ONE_COLUMN, _BROKEN, _DOUBTFUL = -3.0, -2.0, -1.0
_SNIFFED_CHARACTERS = 1 << 16
# Excel's own first line, which names the separator.
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?[ \t]*(?:\r\n|\r|\n|$)', re.IGNORECASE)

TEXT_FIELDS = ("text", "page_content", "content", "body", "passage")


class NoTextError(DocumentError):
    """The whole file or document was read and holds no text."""


def _load_plain(path: str, content: bytes) -> Iterator[Document]:
    yield Document(path, read_text(path, content))


def _load_code(path: str, content: bytes) -> Iterator[Document]:
    text = normalise_text(read_text(path, content).replace(PAGE_BREAK, "\n"))
    yield Document(path, text, outline=outline(text, Path(path).suffix.lower()))


def _html_to_text(path: str, content: bytes) -> tuple[str, str]:
    return html_to_text(path, read_page(path, content))


def _whole(read: Callable[[str, bytes], tuple[str, str]]) -> Loader:
    """Return the loader of files that become one document, given what reads title and text."""

    def load(path: str, content: bytes) -> Iterator[Document]:
        title, text = read(path, content)
        metadata = {"title": title[:MAX_TITLE_CHARACTERS]} if title else {}
        yield Document(path, text, plain_metadata(metadata))

    return load


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
    given = row if isinstance(row, dict) else {}
    name = next((name for name in TEXT_FIELDS if isinstance(given.get(name), str)), None)
    if name is None:
        raise DocumentError(
            f"{place}: expected an object with its text under one of {', '.join(TEXT_FIELDS)}"
        )
    if not row[name].strip():
        return Document(source, row[name])
    others = {key: value for key, value in row.items() if key not in (name, "metadata")}
    metadata = row.get("metadata")
    try:
        extra = metadata if isinstance(metadata, Mapping) else {}
        return Document(source, row[name], plain_metadata({**others, **extra}))
    except DocumentError as error:
        raise DocumentError(f"{place}: {error}") from error


def _load_csv(path: str, content: bytes) -> Iterator[Document]:
    text = read_text(path, content)
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    named = _SEPARATOR_LINE.match(text)
    if named is not None:
        separator, text = named[1], text[named.end() :]
    else:
        separator = _separator_of(text, Path(path).suffix.lower())
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        names = [name.strip() for name in next(reader, [])]
        columns = [name or f"column {place}" for place, name in enumerate(names, 1)]
        for number, row in enumerate(reader, 1):
            beyond = (f"column {place + 1}" for place in range(len(columns), len(row)))
            cells = zip(itertools.chain(columns, beyond), row, strict=False)
            lines = [f"{name}: {cell.strip()}" for name, cell in cells if cell.strip()]
            if lines:
                yield Document(f"{path}#{number}", "\n".join(lines), {"row": number})
    except csv.Error as error:
        line = reader.line_num + (named is not None)
        raise DocumentError(f"{path}, line {line}: {error}") from error


def _separator_of(text: str, suffix: str) -> str:
    """Return the separator that cuts the first rows into equally many cells.

    If there are several, it is one that no spaces follow, as they do in sentences, and the one
    with the most cells. A first line without it names a single column, whose cells may be
    sentences or decimals, unless three cells or more follow in a line: then it is above the table.
    """
    sample = text[:_SNIFFED_CHARACTERS]
    if suffix == ".tsv" and "\t" in sample.split("\n", 1)[0]:
        return "\t"
    found = {one: _agreement(sample, one, sample != text) for one in _SEPARATORS}
    best = max(found, key=found.__getitem__)
    is_one_column = found[best][0] < 0 and all(share != _BROKEN for share, _, _ in found.values())
    return _NO_SEPARATOR if is_one_column else best


def _agreement(sample: str, separator: str, is_cut: bool) -> tuple[float, float, int]:
    rows: list[list[str]] = []
    lines = io.StringIO(sample, newline="")
    try:
        rows.extend(row for row in csv.reader(lines, delimiter=separator, strict=True) if row)
    except csv.Error:
        # A quoted cell that goes on after the sample is no error.
        if not is_cut or lines.tell() < len(sample):
            return _BROKEN, 0.0, 0
    if is_cut and len(rows) > 1:
        rows.pop()
    ((length, count),) = Counter(map(len, rows)).most_common(1) or ((0, 0),)
    if length < 2:
        return _ONE_COLUMN, 0.0, 0
    cells = [cell for row in rows for cell in row[1:]]
    spaced = sum(cell.startswith(" ") for cell in cells) / len(cells)
    is_doubtful = len(rows[0]) == 1 and (length == 2 or spaced > 0.5)
    return _DOUBTFUL if is_doubtful else count / len(rows), -spaced, length


Loader = Callable[[str, bytes], Iterable[Document]]
"""Yields the documents in a file's bytes; their source is its path, with ``#...`` for parts."""

_LOADERS: dict[str, Loader] = {
    **dict.fromkeys((".txt", ".text", ".md", ".markdown", ".rst", ".log"), _load_plain),
    **dict.fromkeys((".html", ".htm", ".xhtml"), _whole(_html_to_text)),
    **dict.fromkeys((".jsonl", ".ndjson"), _load_jsonl),
    **dict.fromkeys((".csv", ".tsv"), _load_csv),
    ".pdf": _whole(pdf_to_text),
    ".docx": _whole(docx_to_text),
    ".epub": _whole(epub_to_text),
    **dict.fromkeys(CONVERTED_SUFFIXES, _whole(converted_to_text)),
}
SUFFIXES = frozenset(_LOADERS)
"""The suffixes of files that the built-in loaders read, without those of source code."""
_LOADERS.update(dict.fromkeys(CODE_SUFFIXES, _load_code))


def sought_suffixes() -> frozenset[str]:
    """Return the suffixes of the files that folders are searched for.

    Source code is among them if its grammar is installed. Otherwise it is read if it is named.
    """
    return SUFFIXES | set(filter(is_installed, CODE_SUFFIXES))


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
    suffix = Path(path).suffix.lower()
    known = {**_LOADERS, **(others or {})}
    if suffix not in known:
        raise DocumentError(
            f"{path}: files of kind {suffix or 'no suffix'!r} are not read; expected one of "
            + " ".join(sorted(known))
        )
    if not content:
        raise NoTextError(f"{path}: the file is empty")
    has_text = False
    for document in known[suffix](path, content):
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
    is_whole, marks = False, tuple[Mark, ...]()
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


def _content_id(text: str, metadata: Mapping[str, Any]) -> str:
    place = str(metadata.get("source") or "text")
    return f"{place}#{content_hash(json.dumps([text, metadata], sort_keys=True))[:16]}"
