"""Office files and e-books as archives of parts: names, sizes, and what is none."""

from __future__ import annotations

import io
import posixpath
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvrag.errors import DocumentError

_MAX_UNPACKED_BYTES = 256 << 20
_MAX_SMALL_BYTES = 16 << 20
_PIECE_BYTES = 1 << 16
_COMPOUND = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_ENCRYPTED = "EncryptedPackage".encode("utf-16-le")
# The old form of a file, by its new suffix: what its name should end in.
_OLD_SUFFIXES = {".docx": ".doc", ".xlsx": ".xls", ".pptx": ".ppt"}


class Archive:
    """The parts of an archive, by names in lower case with slashes.

    Some programs write backslashes, and names are equal whatever their case.

    Raises
    ------
    DocumentError
        When the file is no archive.
    """

    def __init__(self, path: str, kind: str, content: bytes) -> None:
        self.path = path
        check_kind(path, kind, content)
        with reading(path, kind):
            self._zip = zipfile.ZipFile(io.BytesIO(content))
        parts = self._zip.infolist()
        self._parts = {one.filename.replace("\\", "/").lstrip("/").lower(): one for one in parts}

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._parts

    def check_size(self) -> None:
        """Raise DocumentError if all of it unpacks to more than 256 MiB: a library knows no limits.

        Nothing is unpacked: `zipfile` reads no more of a part than the archive says it holds.
        """
        size = sum(part.file_size for part in self._zip.infolist())
        if size > _MAX_UNPACKED_BYTES:
            raise DocumentError(
                f"{self.path}: it unpacks to {size:,} bytes, and at most "
                f"{_MAX_UNPACKED_BYTES:,} are read; save the document in parts"
            )

    def pieces(self, name: str, limit: int = _MAX_UNPACKED_BYTES) -> Iterator[bytes]:
        """Yield a part's bytes.

        Raises
        ------
        DocumentError
            When it unpacks to more than `limit` bytes.
        KeyError
            When there is no such part.
        """
        part = self._parts.get(name.lower())
        if part is None:
            raise KeyError(f"There is no item named {name!r} in the archive")
        # Unpacks no more than this, even if the header understates the size.
        if part.file_size > limit:
            raise DocumentError(
                f"{self.path}: {name} in it unpacks to {part.file_size:,} bytes, and at most "
                f"{limit:,} are read; save the document in parts"
            )
        with self._zip.open(part) as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece

    def read(self, name: str, limit: int = _MAX_UNPACKED_BYTES) -> bytes:
        """Return a part's bytes; the errors are those of `pieces`."""
        return b"".join(self.pieces(name, limit))

    def tree(self, name: str) -> Any:
        """Return the root element of a small part of XML; no entity is expanded."""
        from lxml import etree

        parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False)
        return etree.fromstring(self.read(name, _MAX_SMALL_BYTES), parser)

    def relations(self, name: str) -> list[tuple[str, str]]:
        """Return the parts that a part, or the archive itself (""), names: kind and name of each.

        The kind is the last word of its type: "officeDocument", "footnotes".
        """
        folder, base = posixpath.split(name)
        at = posixpath.join(folder, "_rels", f"{base}.rels")
        if at not in self:
            return []
        return [
            (
                one.get("Type", "").rpartition("/")[2],
                posixpath.normpath(
                    posixpath.join("/", folder, one.get("Target", "").replace("\\", "/"))
                ).lstrip("/"),
            )
            for one in self.tree(at).iter("{*}Relationship")
            if one.get("TargetMode") != "External"
        ]


def check_kind(path: str, kind: str, content: bytes) -> None:
    """Raise DocumentError if an Office file is of an older kind than its name says, or locked."""
    suffix = next((one for one in _OLD_SUFFIXES if path.lower().endswith(one)), "")
    if suffix and content.startswith(_COMPOUND):
        if _ENCRYPTED in content:
            raise DocumentError(f"{path}: the {kind} is encrypted; remove its password first")
        old = _OLD_SUFFIXES[suffix]
        raise DocumentError(
            f"{path}: an old {kind} ({old}) under the name of a new one; open it and save it as "
            f"{suffix}" + (", or name it .xls" if old == ".xls" else "")
        )
    for beginning, name, remedy in (
        (b"{\\rtf", "RTF", f"open it and save it as {suffix or '.docx'}"),
        (b"<", "HTML or XML", "name it .html if it is a page"),
        (b"%PDF-", "PDF", "name it .pdf"),
    ):
        if content[:64].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(beginning):
            raise DocumentError(f"{path}: no {kind} but {name}; {remedy}")


@contextmanager
def reading(path: str, kind: str, extra: str = "docs") -> Iterator[None]:
    """Let any error of a parser in the block say that the file is damaged.

    A parser that is missing comes with ``kvrag[extra]``.
    """
    try:
        yield
    except (MemoryError, DocumentError):  # at the limit: the process says so
        raise
    except Exception as error:
        what = f"a damaged {kind} ({type(error).__name__}: {error})"
        if isinstance(error, ImportError) or "MissingDependency" in type(error).__name__:
            what = f"reading it needs more libraries: pip install 'kvrag[{extra}]'"
        raise DocumentError(f"{path}: {what}") from error
