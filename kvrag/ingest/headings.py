"""The headings of a text, and the path of headings that leads to each of its places.

Loaders turn the headings of other formats into Markdown's, so these are the headings of all texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from kvrag.chunk import PAGE_BREAK, Mark, normalise_text
from kvrag.errors import DocumentError
from kvrag.ingest.limits import MAX_LEVEL, MAX_MARKS, MAX_MARKS_CHARACTERS, MAX_TITLE_CHARACTERS

# Finds headings, and the fences and markup inside which there are none. A full parser of Markdown
# (markdown-it-py) takes 2.5 s and 250,000 objects for 0.2 MB of "- a" lines. The
# time of each pattern grows at most linearly with the text, whatever the text is.
_MARK = re.compile(
    r"^ {0,3}(?:(#{1,6})(?=[ \t])|(`{3,}|~{3,})|(=++|-{2,}+)[ \t]*+$"
    r"|<(?:(!--)|(?:pre|script|style|textarea)(?=[\s>])))",
    re.MULTILINE | re.IGNORECASE,
)
_MARKUP_ENDS = (re.compile("-->"), re.compile(r"</(?:pre|script|style|textarea)>", re.IGNORECASE))
_FRONT_MATTER = re.compile(
    r"---\n(?:#.*\n)*[\w-]+[ \t]*:(?:.*\n)*?(?:---|\.\.\.)[ \t]*$", re.MULTILINE
)
# Lines that are no title, even when a line of dashes follows.
_NO_TITLE = re.compile(r"\s|[-*+>|#=`~]|\d+[.)]")


def find_headings(text: str) -> list[Mark]:
    """Return the headings outside code fences, comments, other markup and front matter.

    A title follows hashes, or is a line between an empty line and a line of dashes or equals
    signs.
    """
    found: list[Mark] = []
    fence = ""
    front = _FRONT_MATTER.match(text)
    markup_end = front.end() if front else 0
    closed_until = [len(text)] * len(_MARKUP_ENDS)
    for mark in _MARK.finditer(text):
        if mark.start() < markup_end:
            continue
        hashes, ticks, underline, comment = mark.groups()
        if not (hashes or ticks or underline):
            if not fence and mark.start() < closed_until[not comment]:
                # Unless it is never closed.
                closing = _MARKUP_ENDS[not comment].search(text, mark.end())
                if closing:
                    markup_end = closing.end()
                else:
                    closed_until[not comment] = 0
            continue
        end = text.find("\n", mark.end())
        rest = text[mark.end() : end if end >= 0 else len(text)]
        start, level, title = mark.start(), 0, ""
        if ticks:
            if not fence:
                # A line that closes them again is code in a line.
                fence = "" if ticks[0] == "`" in rest else ticks
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
            found.append(Mark(start, level, title[:MAX_TITLE_CHARACTERS]))
    return found


def paths_of(marks: Iterable[Mark]) -> Iterator[tuple[str, ...]]:
    """Yield for each mark the titles of those that it stands under, and its own if it has one."""
    open_ones: list[tuple[int, tuple[str, ...]]] = []
    for _, level, title in marks:
        while open_ones and open_ones[-1][0] >= level:
            open_ones.pop()
        above = open_ones[-1][1] if open_ones else ()
        path = (*above, title) if title else above
        open_ones.append((level, path))
        yield path


def checked_outline(given: Any, text: str) -> tuple[Mark, ...]:
    """Return a document's outline, which may come from anybody's loader.

    Raises
    ------
    DocumentError
        When it is no list of marks in ascending order, exceeds a limit, or the text is not
        normalised, so that the marks would be beside their places.
    """
    if not given:
        return ()
    if not isinstance(given, list | tuple) or len(given) > MAX_MARKS:
        raise DocumentError(f"its outline is no list of at most {MAX_MARKS:,} marks")
    before, room = 0, MAX_MARKS_CHARACTERS
    for number, mark in enumerate(given):
        if not _is_mark(mark) or not before <= mark[0] <= len(text):
            raise DocumentError(
                f"mark {number} of its outline is not one: expected an offset that ascends, a "
                f"level from 0 to {MAX_LEVEL} and a title of at most {MAX_TITLE_CHARACTERS} "
                "characters"
            )
        before, room = mark[0], room - len(mark[2])
    if room < 0:
        raise DocumentError(
            f"the titles of its outline have more than {MAX_MARKS_CHARACTERS:,} characters"
        )
    if PAGE_BREAK in text or normalise_text(text) != text:
        raise DocumentError(
            "it has an outline and a text that is not normalised; apply kvrag.chunk.normalise_text"
        )
    return tuple(Mark(*mark) for mark in given)


def _is_mark(given: Any) -> bool:
    if not isinstance(given, list | tuple) or [type(one) for one in given] != [int, int, str]:
        return False
    return 0 <= given[1] <= MAX_LEVEL and len(given[2]) <= MAX_TITLE_CHARACTERS
