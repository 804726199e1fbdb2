"""Files and framework objects to documents.

Text must say what encoding it is in, by being valid UTF-8, by a byte order mark, or (HTML) by
its own declaration; anything else is refused, since a wrong guess would index garbage.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvrag.chunk import Document, content_hash
from kvrag.errors import DocumentError, ParameterError
from kvrag.ingest.html import html_to_text
from kvrag.ingest.office import docx_to_text, pdf_to_text

_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark is the beginning of this one
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class NoTextError(DocumentError):
    """A file or document was read whole, and there is no text in it."""


_TEXT_FIELDS = ("text", "page_content", "content", "body", "passage")
_DECLARED = re.compile(rb"<meta[^>]+charset=[\"']?([\w.:-]+)", re.IGNORECASE)


def read_text(path: str, content: bytes, declared: str | None = None) -> str:
    """Decode a text file.

    Raises
    ------
    DocumentError
        When it is neither UTF-8 nor marked otherwise, or is no text at all.
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


def _load_html(path: str, content: bytes) -> Iterator[Document]:
    declared = None
    if match := _DECLARED.search(content[:4096]):
        try:
            declared = codecs.lookup(match[1].decode("ascii")).name
        except LookupError as error:
            raise DocumentError(f"{path}: declares an unknown encoding {match[1]!r}") from error
    title, text = html_to_text(read_text(path, content, declared))
    yield Document(path, text, {"title": title} if title else {})


def _load_pdf(path: str, content: bytes) -> Iterator[Document]:
    title, text = pdf_to_text(path, content)
    yield Document(path, text, plain_metadata({"title": title}) if title else {})


def _load_docx(path: str, content: bytes) -> Iterator[Document]:
    title, text = docx_to_text(path, content)
    yield Document(path, text, {"title": title} if title else {})


def _load_jsonl(path: str, content: bytes) -> Iterator[Document]:
    # Not splitlines(), which also breaks at characters that JSON strings may hold.
    for number, line in enumerate(read_text(path, content).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DocumentError(f"{path}, line {number}: not JSON ({error})") from error
        if isinstance(row, str):
            row = {"text": row}
        name = next((name for name in _TEXT_FIELDS if _is_text(row, name)), None)
        if name is None:
            raise DocumentError(
                f"{path}, line {number}: expected an object with its text under one of "
                f"{', '.join(_TEXT_FIELDS)}"
            )
        metadata = row.pop("metadata", None)
        text = row.pop(name)
        if not text.strip():
            continue
        extra = metadata if isinstance(metadata, Mapping) else {}
        yield Document(f"{path}#{number}", text, plain_metadata({**row, **extra}))


def _is_text(row: Any, name: str) -> bool:
    return isinstance(row, dict) and isinstance(row.get(name), str)


def _load_csv(path: str, content: bytes) -> Iterator[Document]:
    text = read_text(path, content)
    header = text.split("\n", 1)[0]
    delimiter = max(",;\t|", key=header.count)  # a comma where no other is more frequent
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        columns = next(reader, [])
        for number, row in enumerate(reader, 1):
            names = columns + [f"column {place + 1}" for place in range(len(columns), len(row))]
            cells = zip(names, row, strict=False)
            lines = [f"{name.strip()}: {cell.strip()}" for name, cell in cells if cell.strip()]
            if lines:
                yield Document(f"{path}#{number}", "\n".join(lines), {"row": number})
    except csv.Error as error:
        raise DocumentError(f"{path}, line {reader.line_num}: {error}") from error


_LOADERS: dict[str, Callable[[str, bytes], Iterator[Document]]] = {
    **dict.fromkeys((".txt", ".text", ".md", ".markdown", ".rst", ".log"), _load_plain),
    **dict.fromkeys((".html", ".htm", ".xhtml"), _load_html),
    **dict.fromkeys((".jsonl", ".ndjson"), _load_jsonl),
    **dict.fromkeys((".csv", ".tsv"), _load_csv),
    ".pdf": _load_pdf,
    ".docx": _load_docx,
}


def load_bytes(path: str, content: bytes) -> list[Document]:
    """Return the documents in a file's bytes.

    Parameters
    ----------
    path
        Its absolute path: the documents' source, with ``#row`` for rows of jsonl and csv.
    content
        All its bytes.

    Raises
    ------
    DocumentError
        When it is of no known kind, damaged, or not text; says which.
    NoTextError
        When it is empty, or all its text is whitespace.
    """
    suffix = Path(path).suffix.lower()
    loader = _LOADERS.get(suffix)
    if loader is None:
        raise DocumentError(
            f"{path}: files of kind {suffix or 'no suffix'!r} are not read; expected one of "
            f"{' '.join(sorted(_LOADERS))}"
        )
    if not content:
        raise NoTextError(f"{path}: the file is empty")
    documents = list(loader(path, content))
    if not any(document.text.strip() for document in documents):
        raise NoTextError(f"{path}: holds no text")
    return documents


def read_file(path: str) -> bytes:
    """Return a file's bytes. Raises DocumentError when it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DocumentError(f"{path}: cannot be read ({error.strerror or error})") from error


def find_files(folder: Path, exclude: Path) -> Iterator[str]:
    """Yield the readable kinds of files at any depth under `folder`, sorted, without hidden ones.

    Parameters
    ----------
    folder
        An absolute folder. Links to folders are not followed.
    exclude
        The index's own folder, which may lie inside.

    Raises
    ------
    DocumentError
        When a folder cannot be listed: its files would otherwise look deleted.
    """

    def refuse(error: OSError) -> None:
        raise DocumentError(
            f"{error.filename}: the folder cannot be listed ({error.strerror})"
        ) from error

    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and Path(root, name) != exclude
        )
        for name in sorted(names):
            path = Path(root, name)
            if not name.startswith(".") and path.suffix.lower() in _LOADERS and path.is_file():
                yield str(path)


def to_document(value: Any) -> Document:
    """Return a `Document`, a LangChain Document or a LlamaIndex node as a `Document`.

    Framework objects are known by shape. Where one has no id, its content is its identity, so
    that adding it again changes nothing.

    Raises
    ------
    ParameterError
        When `value` is nothing of the kind.
    DocumentError
        When it holds no text, or its id cannot be stored.
    """
    if isinstance(value, Document):
        document = Document(value.source, value.text, plain_metadata(value.metadata))
    elif isinstance(getattr(value, "page_content", None), str):
        metadata = plain_metadata(getattr(value, "metadata", None) or {})
        source = getattr(value, "id", None) or _content_id(value.page_content, metadata)
        document = Document(str(source), value.page_content, metadata)
    elif callable(getattr(value, "get_content", None)) and hasattr(value, "node_id"):
        # Without arguments: the node's own text, not the form with metadata in front of it.
        metadata = plain_metadata(getattr(value, "metadata", None) or {})
        document = Document(str(value.node_id), str(value.get_content()), metadata)
    else:
        raise ParameterError(
            f"cannot ingest a {type(value).__name__}: expected a path, a kvrag.Document, a "
            "LangChain Document or a LlamaIndex node"
        )
    check_source(document.source)
    if not document.text.strip():
        raise NoTextError(f"{document.source}: holds no text")
    return document


def is_storable(source: str) -> bool:
    """Whether the catalog can hold a source: SQLite's texts are UTF-8."""
    try:
        source.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(source: str) -> str:
    r"""Return a source as it can be shown: what is no valid Unicode in it as ``\udce9``."""
    return source.encode("utf-8", "backslashreplace").decode()


def check_source(source: str) -> None:
    """Raise DocumentError for a file's name or an id that is not valid Unicode."""
    if not is_storable(source):
        raise DocumentError(
            f"{printable(source)}: the name is not valid UTF-8; rename it, for example with "
            "'convmv -f latin1 -t utf8'"
        )


def _content_id(text: str, metadata: Mapping[str, Any]) -> str:
    place = str(metadata.get("source") or "text")
    return f"{place}#{content_hash(json.dumps([text, metadata], sort_keys=True))[:16]}"


def plain_metadata(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return metadata as JSON can hold it; what it cannot hold becomes text."""
    return {_plain(str(key)): _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, Mapping):
        return plain_metadata(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return _plain(value.item())  # a NumPy scalar
    return _plain(str(value))
