"""HTML to text with its structure: headings, paragraphs, list items, table rows."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_SKIPPED = frozenset({"script", "style", "template", "noscript", "svg", "head", "iframe"})
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


def html_to_text(markup: str) -> tuple[str, str]:
    """Return the title and the visible text of a page.

    Headings become lines with ``#`` in front, so that the chunker sees them; preformatted text
    keeps its line ends.
    """
    parser = _Parser()
    parser.feed(markup)
    parser.close()
    return parser.title.strip(), parser.text()


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title = ""
        self._blocks: list[str] = []
        self._line = ""
        self._skipped: list[str] = []
        self._num_pre = 0
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        if tag == "body":
            self._skipped.clear()  # a head that was never closed
        if tag in _SKIPPED:
            self._skipped.append(tag)
        elif tag == "title":
            self._in_title = True
        elif tag in _HEADINGS:
            self._end_block()
            self._line = "#" * _HEADINGS[tag] + " "
        elif tag == "br":
            self._line += "\n"
        elif tag == "li":
            self._end_line()
            self._line += "- "
        elif tag in ("td", "th"):
            if self._line.rpartition("\n")[2].strip():
                self._line = self._line.rstrip() + " | "
        elif tag == "tr":
            self._end_line()
        elif tag in _BLOCKS:
            self._end_block()
            self._num_pre += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if self._skipped:
            if tag in self._skipped:
                del self._skipped[self._skipped.index(tag) :]
        elif tag in _HEADINGS or tag in _BLOCKS:
            self._end_block()
            self._num_pre -= tag == "pre" and self._num_pre > 0
        if tag == "title":
            self._in_title = False

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data
        elif not self._skipped:
            if not self._num_pre:
                data = _SPACE.sub(" ", data)
                if not self._line or self._line[-1] in " \n":
                    data = data.lstrip(" ")
            self._line += data

    def text(self) -> str:
        self._end_block()
        return "\n\n".join(self._blocks)

    def _end_line(self) -> None:
        if self._line.strip():
            self._line = self._line.rstrip() + "\n"

    def _end_block(self) -> None:
        block = self._line.strip("\n") if self._num_pre else self._line.strip()
        if block.strip().strip("#-").strip():
            self._blocks.append(block)
        self._line = ""
