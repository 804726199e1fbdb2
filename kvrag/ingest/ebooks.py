"""E-books to text: the pages of an EPUB file in the order in which they are read."""

from __future__ import annotations

import posixpath
from typing import Any
from urllib.parse import unquote

from kvrag.errors import DocumentError
from kvrag.ingest.archives import Archive, check_archive, damaged
from kvrag.ingest.decoding import read_page
from kvrag.ingest.html import html_to_text

_KIND = "e-book"


def epub_to_text(path: str, content: bytes) -> tuple[str, str]:
    """Return the title and the text of an e-book.

    Raises
    ------
    DocumentError
        When it is damaged, or unpacks to more than 256 MiB.
    """
    check_archive(path, _KIND, content)
    try:
        archive = Archive(path, _KIND, content)
        (package, *_) = archive.tree("META-INF/container.xml").iter("{*}rootfile")
        place = package.get("full-path")
        book = archive.tree(place)
        pages = {one.get("id"): one for one in book.iter("{*}item")}
        # Readers pass over what is named and missing, and books whose pages are pictures have no
        # text to lose.
        found = [pages.get(one.get("idref")) for one in book.iter("{*}itemref")]
        texts = [_page(path, archive, place, one) for one in found if one is not None]
        title = next(("".join(one.itertext()) for one in book.iter("{*}title")), "")
    except (MemoryError, DocumentError):  # at the limit: the process says so
        raise
    except Exception as error:  # any error of a parser means that the file is bad
        raise damaged(path, _KIND, error) from error
    return " ".join(title.split()), "\n\n".join(filter(None, texts))


def _page(path: str, archive: Archive, package: str, item: Any) -> str:
    name = posixpath.join(posixpath.dirname(package), unquote(item.get("href")))
    name = posixpath.normpath(name)
    if name not in archive or item.get("media-type", "").startswith("image/"):
        return ""
    return html_to_text(f"{path}: {name}", read_page(f"{path}: {name}", archive.read(name)))[1]
