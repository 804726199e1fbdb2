"""HTML to text with its structure: headings, paragraphs, list items, table rows.

libxml2 parses and calls back for each element, so that no tree is built. In a comparison with
lexbor, `'<div>' * 200_000` took libxml2 0.2 s and lexbor over a minute.
"""

from __future__ import annotations

import re

from kvrag.errors import DocumentError

_SKIPPED = frozenset({"script", "style", "template", "noscript", "svg", "head", "iframe", "title"})
_BLOCKS = frozenset(
    {
        "address",
        "article",
        "aside",
        "blockquote",
        "dd",
        "details",
        "dialog",
        "div",
        "dl",
        "dt",
        "fieldset",
        "figcaption",
        "figure",
        "footer",
        "form",
        "header",
        "hr",
        "main",
        "nav",
        "ol",
        "p",
        "pre",
        "section",
        "summary",
        "table",
        "ul",
        "body",
    }
)
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_SPACE = re.compile(r"[ \t\r\n\f\v]+")
# For each end tag that matches nothing, libxml2 looks at all open elements.
_MAX_DEPTH = 5_000
_PIECE_BYTES = 1 << 14


def html_to_text(path: str, markup: str) -> tuple[str, str]:
    """Return the title and the visible text of a page.

    Headings become lines that begin with ``#``, so that the chunker sees them. Preformatted text
    keeps its line ends.

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
    return "".join(target.title).strip(), "\n\n".join(target.blocks)


class _Target:
    """Receives the parser's calls; starts and ends are paired, whatever the markup says."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.title: list[str] = []
        self.blocks: list[str] = []
        self._line: list[str] = []
        self._row_has_text = False
        self._depth = 0
        self._num_skipped = 0
        self._num_pre = 0
        self._title_state = ""

    def start(self, tag: str, attributes: object) -> None:
        del attributes
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise DocumentError(
                f"{self._path}: elements are nested more than {_MAX_DEPTH:,} deep; close them"
            )
        if tag == "title" and not self._title_state:
            self._title_state = "open"
        if self._num_skipped or tag in _SKIPPED:
            self._num_skipped += 1
        elif tag in _HEADINGS:
            self._end_block()
            self._add("#" * _HEADINGS[tag] + " ")
        elif tag == "br":
            self._add("\n")
        elif tag == "li":
            self._end_line()
            self._add("- ")
        elif tag in ("td", "th"):
            if self._row_has_text:
                self._strip_end()
                self._add(" | ")
        elif tag == "tr":
            self._end_line()
        elif tag in _BLOCKS:
            self._end_block()
            self._num_pre += tag == "pre"

    def end(self, tag: str) -> None:
        self._depth -= 1
        if tag == "title" and self._title_state == "open":
            self._title_state = "closed"
        if self._num_skipped:
            self._num_skipped -= 1
        elif tag in _HEADINGS or tag in _BLOCKS:
            self._end_block()
            self._num_pre -= tag == "pre"

    def data(self, data: str) -> None:
        if self._title_state == "open":
            self.title.append(data)
        elif not self._num_skipped:
            if not self._num_pre:
                data = _SPACE.sub(" ", data)
                if not self._line or self._line[-1][-1] in " \n":
                    data = data.lstrip(" ")
            self._add(data)

    def comment(self, text: str) -> None:
        """Ignore comments."""

    def close(self) -> None:
        self._end_block()

    def _add(self, text: str) -> None:
        if not text:
            return
        self._line.append(text)
        _, line_end, last = text.rpartition("\n")
        self._row_has_text = bool(last.strip()) or (self._row_has_text and not line_end)

    def _strip_end(self) -> None:
        while self._line:
            self._line[-1] = self._line[-1].rstrip()
            if self._line[-1]:
                return
            self._line.pop()

    def _end_line(self) -> None:
        self._strip_end()
        if self._line:
            self._add("\n")

    def _end_block(self) -> None:
        block = "".join(self._line)
        block = block.strip("\n") if self._num_pre else block.strip()
        if block.strip().strip("#-").strip():
            self.blocks.append(block)
        self._line.clear()
        self._row_has_text = False
