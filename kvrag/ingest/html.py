"""HTML and e-books to text with its structure: headings, paragraphs, list items, table rows.

libxml2 parses and calls back for each element, so that no tree is built. In a comparison with
lexbor, `'<div>' * 200_000` took libxml2 0.2 s and lexbor over a minute.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from kvrag.errors import DocumentError
from kvrag.ingest.archives import Archive, reading
from kvrag.ingest.files import read_page
from kvrag.ingest.layout import Layout, numeral

_SKIPPED = frozenset(
    {
        *("script", "style", "template", "noscript", "svg", "head", "iframe", "title"),
        *("audio", "canvas", "datalist", "rp", "video"),
    }
)
_BLOCKS = frozenset(
    {
        *("address", "article", "aside", "blockquote", "body", "caption", "dd", "details"),
        *("dialog", "div", "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form"),
        *("header", "hr", "legend", "main", "nav", "optgroup", "option", "p", "section", "summary"),
    }
)
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_LISTS = frozenset({"ol", "ul", "menu", "dir"})
_GROUPS = frozenset({"thead", "tbody", "tfoot"})
_HIDDEN = re.compile(
    r"(?<![\w-])(?:display\s*:\s*none|visibility\s*:\s*(?:hidden|collapse))\b", re.I
)
_NUMBER = re.compile(r"\s*([+-]?\d{1,9})")
# For each end tag that matches nothing, libxml2 looks at all open elements.
_MAX_DEPTH = 5_000
_PIECE_BYTES = 1 << 14
_BOOK = "e-book"


def html_to_text(path: str, markup: str) -> tuple[str, str]:
    """Return the title and the visible text of a page.

    `Layout` says what the text looks like. Preformatted text keeps its line ends. What the markup
    hides (``hidden``, ``display: none`` in an element's own style) is left out, and a phonetic
    guide follows its word in brackets.

    Raises
    ------
    DocumentError
        When elements are nested more than 5,000 deep. (Browsers accept 512.)
    """
    from lxml import etree

    target = _Target(path)
    # Bytes with an explicit encoding: no declaration in the markup can change it again.
    parser = etree.HTMLParser(target=target, encoding="utf-8", huge_tree=True)
    content = markup.encode("utf-8", "replace")
    # In pieces: an error that the target raises surfaces between two of them.
    for start in range(0, len(content), _PIECE_BYTES):
        parser.feed(content[start : start + _PIECE_BYTES])
    parser.close()
    return "".join(target.title).strip(), target.layout.finish()


class _Target:
    """Receives the parser's calls; starts and ends are paired, whatever the markup says."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.title: list[str] = []
        self.layout = Layout()
        self._depth = 0
        self._num_skipped = 0
        self._num_pre = 0
        self._title_state = ""
        # How the numbers of each open list look ("" for none), and the next one.
        self._lists: list[tuple[str, int]] = []
        self._guide: list[str] = []
        self._guides: list[str] = []
        self._in_guide = False
        layout, tables = self.layout, self.layout.tables
        self._starts = {
            "br": layout.line_break,
            "tr": tables.begin_row,
            "table": tables.begin_table,
            **dict.fromkeys(_GROUPS, tables.end_group),
            **dict.fromkeys(_BLOCKS, layout.end_block),
        }
        self._ends = {
            "li": layout.end_line,
            "tr": tables.end_row,
            "table": tables.end_table,
            **dict.fromkeys(("td", "th"), tables.end_cell),
            **dict.fromkeys(_GROUPS, tables.end_group),
            **dict.fromkeys(_HEADINGS, layout.end_heading),
        }

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise DocumentError(
                f"{self._path}: elements are nested more than {_MAX_DEPTH:,} deep; close them"
            )
        if tag == "title" and not self._title_state:
            self._title_state = "open"
        layout = self.layout
        if self._num_skipped or tag in _SKIPPED or _is_hidden(tag, attributes):
            self._num_skipped += 1
        elif tag in _HEADINGS:
            layout.heading(_HEADINGS[tag])
        elif tag in self._starts:
            self._starts[tag]()
        elif tag in _LISTS:
            kind = (attributes.get("type") or "1") if tag == "ol" else ""
            if "reversed" in attributes and "start" not in attributes:
                kind = ""  # its numbers depend on what follows
            self._lists.append((kind, _number(attributes, "start", 1)))
            layout.begin_list(layout.list_depth + 1)
        elif tag == "li":
            self._begin_item(attributes)
        elif tag in ("td", "th"):
            rows, columns = _number(attributes, "rowspan", 1), _number(attributes, "colspan", 1)
            layout.tables.begin_cell(columns, rows)
        elif tag in ("rt", "rb"):
            self._in_guide = tag == "rt"
        elif tag == "pre":
            layout.end_block()
            self._num_pre += 1

    def end(self, tag: str) -> None:
        self._depth -= 1
        if tag == "title" and self._title_state == "open":
            self._title_state = "closed"
        layout = self.layout
        if self._num_skipped:
            self._num_skipped -= 1
        elif tag in self._ends:
            self._ends[tag]()
        elif tag in _LISTS:
            self._lists.pop()
            layout.begin_list(max(0, layout.list_depth - 1))
        elif tag == "rt":
            self._in_guide = False
            self._guides.append(" ".join("".join(self._guide).split()))
            self._guide.clear()
        elif tag == "ruby":
            if guide := "".join(self._guides):
                layout.text(f"({guide})")
            self._guides.clear()
        elif tag == "pre":
            layout.preformatted()
            self._num_pre -= 1
        elif tag in _BLOCKS:
            layout.end_block(is_raw=bool(self._num_pre))

    def data(self, data: str) -> None:
        if self._title_state == "open":
            self.title.append(data)
        elif self._num_skipped:
            return
        elif self._in_guide:
            self._guide.append(data)
        else:
            self.layout.text(data, is_raw=bool(self._num_pre))

    def comment(self, text: str) -> None:
        """Ignore comments."""

    def close(self) -> None:
        """Return nothing."""

    def _begin_item(self, attributes: Mapping[str, str]) -> None:
        kind, number = self._lists.pop() if self._lists else ("", 1)
        number = _number(attributes, "value", number)
        if self.layout.list_depth:
            self._lists.append((kind, number + 1))
        self.layout.item(f"{numeral(number, kind)}." if kind else "-")


def _is_hidden(tag: str, attributes: Mapping[str, str]) -> bool:
    if not attributes:
        return tag == "dialog"
    if tag in ("html", "body"):  # a page that its script will show
        return False
    return (
        ("hidden" in attributes and attributes["hidden"].lower() != "until-found")
        or (tag == "dialog" and "open" not in attributes)
        or _HIDDEN.search(attributes.get("style", "")) is not None
    )


def _number(attributes: Mapping[str, str], name: str, default: int) -> int:
    match = _NUMBER.match(attributes.get(name, ""))
    return int(match[1]) if match else default


def epub_to_text(path: str, content: bytes) -> tuple[str, str]:
    """Return the title and the text of an e-book.

    Raises
    ------
    DocumentError
        When it is damaged, or unpacks to more than 256 MiB.
    """
    with reading(path, _BOOK):
        archive = Archive(path, _BOOK, content)
        archive.check_size()
        (package, *_) = archive.tree("META-INF/container.xml").iter("{*}rootfile")
        place = package.get("full-path")
        book = archive.tree(place)
        pages = {one.get("id"): one for one in book.iter("{*}item")}
        # Readers pass over what is named and missing, and books whose pages are pictures have no
        # text to lose.
        found = [pages.get(one.get("idref")) for one in book.iter("{*}itemref")]
        texts = [_page(path, archive, place, one) for one in found if one is not None]
        title = next(("".join(one.itertext()) for one in book.iter("{*}title")), "")
    return " ".join(title.split()), "\n\n".join(filter(None, texts))


def _page(path: str, archive: Archive, package: str, item: Any) -> str:
    name = posixpath.join(posixpath.dirname(package), unquote(item.get("href")))
    name = posixpath.normpath(name)
    if name not in archive or item.get("media-type", "").startswith("image/"):
        return ""
    return html_to_text(f"{path}: {name}", read_page(f"{path}: {name}", archive.read(name)))[1]
