"""The headings of a text, and the path of headings that leads to each of its places.

Loaders turn the headings of other formats into Markdown's, so these are the headings of all texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvrag.ingest.limits import MAX_TITLE_CHARACTERS

# Finds headings, and the fences inside which there are none. A full parser of Markdown
# (markdown-it-py) takes 2.5 s and 250,000 objects for 0.2 MB of "- a" lines. The
# time of each pattern grows at most linearly with the text, whatever the text is.
_MARK = re.compile(r"^ {0,3}(?:(#{1,6})(?=[ \t])|(`{3,}|~{3,})|(=++|-{2,}+)[ \t]*+$)", re.MULTILINE)
# Lines that are no title, even when a line of dashes follows.
_NO_TITLE = re.compile(r"\s|[-*+>|#=`~]|\d+[.)]")


class Heading(NamedTuple):
    """A heading, or anything else that a text's outline is made of.

    Attributes
    ----------
    start
        The offset of its first character.
    level
        Its depth: it ends what others of this level or of a higher number began.
    title
        At most 256 characters.
    """

    start: int
    level: int
    title: str


def find_headings(text: str) -> list[Heading]:
    """Return the headings outside code fences.

    A title follows hashes, or is a line between an empty line and a line of dashes or equals
    signs.
    """
    found: list[Heading] = []
    fence = ""
    for mark in _MARK.finditer(text):
        hashes, ticks, underline = mark.groups()
        end = text.find("\n", mark.end())
        rest = text[mark.end() : end if end >= 0 else len(text)]
        start, level, title = mark.start(), 0, ""
        if ticks:
            if not fence:
                fence = ticks
            elif ticks.startswith(fence) and not rest.strip():
                fence = ""
        elif fence:
            continue
        elif hashes:
            level, title = len(hashes), rest.strip(" \t")
            closed = title.rstrip("#")
            if not closed or closed[-1] in " \t":
                title = closed.rstrip(" \t")
        elif start:
            before = text.rfind("\n", 0, start - 1)
            title = text[before + 1 : start - 1].rstrip()
            above = text.rfind("\n", 0, max(0, before))
            if _NO_TITLE.match(title) or text[above + 1 : max(0, before)].strip():
                title = ""
            start, level = before + 1, 1 if underline[0] == "=" else 2
        if title:
            found.append(Heading(start, level, title[:MAX_TITLE_CHARACTERS]))
    return found


def paths_of(headings: Iterable[Heading]) -> Iterator[tuple[str, ...]]:
    """Yield for each heading the titles of those that it stands under, and its own."""
    open_ones: list[tuple[int, tuple[str, ...]]] = []
    for _, level, title in headings:
        while open_ones and open_ones[-1][0] >= level:
            open_ones.pop()
        path = (*(open_ones[-1][1] if open_ones else ()), title)
        open_ones.append((level, path))
        yield path
