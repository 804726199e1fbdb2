"""Word files to text with its structure, as a reader of the last version sees it.

Libraries that convert Word files were tried (mammoth, docx2python, undoc). Each loses some of:
numbers of lists, phonetic guides, equations, headers, moved and hidden text. And mammoth takes 15 s
for 50,000 short paragraphs, which are one second here.
"""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvrag.errors import DocumentError
from kvrag.ingest.archives import Archive, damaged
from kvrag.ingest.layout import Layout, numeral

_KIND = "Word file"
_MAX_DEPTH = 8
# Word's own limits are lower. Without any, a small file costs without end.
_MAX_BASES = 32
_MAX_MARKER_CHARACTERS = 64
_WORD = frozenset(
    {
        "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}",
        "{http://purl.oclc.org/ooxml/wordprocessingml/main}",
    }
)
_MATH = frozenset(
    {
        "{http://schemas.openxmlformats.org/officeDocument/2006/math}",
        "{http://purl.oclc.org/ooxml/officeDocument/math}",
    }
)
# A second copy of the same text, for readers that do not know the first form.
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
# What the last version does not have: deleted, or moved to elsewhere, or how it once looked.
_GONE = frozenset(
    {
        *("del", "moveFrom", "rPrChange", "pPrChange", "tblPrChange", "trPrChange", "tcPrChange"),
        *("sectPrChange", "numberingChange", "tblGridChange"),
    }
)
_MARKS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-", "ptab": "\t"}
_NUMERALS = {"lowerLetter": "a", "upperLetter": "A", "lowerRoman": "i", "upperRoman": "I"}
# Texts around the parts of an equation, with brackets that a single word does not need.
_OPEN, _CLOSE = "\ue000", "\ue001"
_EQUATION = {
    "sup": (f"^{_OPEN}", _CLOSE),
    "sub": (f"_{_OPEN}", _CLOSE),
    "num": (_OPEN, f"{_CLOSE}/"),
    "den": (_OPEN, _CLOSE),
    "rad": ("√", ""),
    "deg": ("[", "]"),
    "fName": ("", " "),
    "mr": ("", "; "),
    "rad/e": (_OPEN, _CLOSE),
    "nary/e": (" ", ""),
    "mr/e": ("", " "),
    "eqArr/e": ("", "; "),
}
_NEITHER = ("", "")
_EMPTY = re.compile(rf"[\^_]{_OPEN}\s*{_CLOSE}|\[\]")
_SINGLE = re.compile(rf"{_OPEN}(\w*){_CLOSE}")


def docx_to_text(path: str, content: bytes) -> tuple[str, str]:
    """Return the title and the text of a Word file.

    `Layout` says what the text looks like. Headers come first and footers last, each once. A note
    follows the paragraph that refers to it. Lists and headings have the numbers that Word shows.

    The XML is read as a stream: a document of a million paragraphs, or a cell that spans a
    million columns, costs no more than its text.

    Raises
    ------
    DocumentError
        When it is damaged, is an old ``.doc``, or has a part that unpacks to more than 256 MiB.
    """
    try:
        archive = Archive(path, _KIND, content)
        relations = dict(archive.relations(""))
        main = relations.get("officeDocument", "word/document.xml")
        core = relations.get("core-properties", "docProps/core.xml")
        titles = archive.tree(core).iter("{*}title") if core in archive else ()
        title = next(("".join(one.itertext()) for one in titles), "")
        return title.strip(), _text(archive, main)
    except DocumentError:
        raise
    except Exception as error:  # any error of a parser means that the file is bad
        raise damaged(path, _KIND, error) from error


def _text(archive: Archive, main: str) -> str:
    parts: dict[str, list[str]] = {}
    for kind, name in archive.relations(main):
        parts.setdefault(kind, []).append(name)

    def find(kind: str) -> list[str]:
        usual = posixpath.join(posixpath.dirname(main), f"{kind}.xml")
        return [name for name in parts.get(kind, [usual]) if name in archive]

    sheet = _Sheet()
    for kind, read in (("styles", sheet.read_styles), ("numbering", sheet.read_numbering)):
        for name in find(kind):
            read(archive.tree(name))
    notes: dict[str, str] = {}
    for kind in ("footnotes", "endnotes"):
        for name in find(kind):
            _parse(archive, name, _Notes(sheet, notes))
    edges: dict[str, list[str]] = {}
    for kind in ("header", "footer"):
        texts = []
        for name in sorted(set(find(kind))):
            edge = _Body(sheet, {})
            _parse(archive, name, edge)
            texts.append(edge.layout.finish())
        # Not one that holds a page's number alone.
        edges[kind] = [one for one in dict.fromkeys(texts) if re.search(r"[^\W\d_]{2}", one)]
    body = _Body(sheet, notes)
    _parse(archive, main, body)
    return "\n\n".join(filter(None, [*edges["header"], body.layout.finish(), *edges["footer"]]))


def _parse(archive: Archive, name: str, target: _Target) -> None:
    """Feed one part of an archive to `target`."""
    from lxml import etree

    parser = etree.XMLParser(
        target=target, huge_tree=True, resolve_entities=False, no_network=True, load_dtd=False
    )
    archive.feed(name, parser)
    parser.close()


@dataclass
class _Style:
    """What a style says; None where the one that it is based on says it."""

    base: str = ""
    level: int | None = None
    number: str | None = None
    depth: int | None = None
    is_hidden: bool | None = None


@dataclass
class _Level:
    """A level of a list: its first number, how that looks, and the text around it."""

    start: int = 1
    form: str = "decimal"
    text: str = ""
    style: str = ""
    is_legal: bool = False  # the numbers of the levels above are in digits


@dataclass
class _List:
    """The counter that a list shares with others, its levels, and where it starts again."""

    counter: str
    levels: dict[int, _Level]
    starts: dict[int, int] = field(default_factory=dict)


class _Sheet:
    """The styles and lists of a document; counts the lists' items."""

    def __init__(self) -> None:
        self._styles: dict[str, _Style] = {}
        self._lists: dict[str, _List] = {}
        self.begin_part()

    def begin_part(self) -> None:
        """Count from the beginning: a header's or note's items are not those of the text."""
        self._counts: dict[str, dict[int, int]] = {}
        self._started: set[tuple[str, int]] = set()

    def read_styles(self, root: Any) -> None:
        """Take styles from the root element of their part."""
        for one in root.iter("{*}style"):
            name = _get(one, "name").lower()
            level = name.removeprefix("heading ")  # up to 9; Markdown has 6
            hidden, outline = one.find("{*}rPr/{*}vanish"), _get(one, "pPr/outlineLvl")
            style = _Style(
                base=_get(one, "basedOn"),
                number=_get(one, "pPr/numPr/numId") or None,
                depth=_integer(_get(one, "pPr/numPr/ilvl"), None),
                is_hidden=None if hidden is None else _is_on(_value(hidden.attrib, "val")),
            )
            if name == "title":
                style.level = 1
            elif level != name:
                style.level = min(_integer(level, 6) or 6, 6)
            elif outline in list("012345"):
                style.level = int(outline) + 1
            self._styles[_value(one.attrib, "styleId")] = style
            if _is_on(_value(one.attrib, "default") or "0") and "paragraph" in one.attrib.values():
                self._styles[""] = style

    def read_numbering(self, root: Any) -> None:
        """Take lists from the root element of their part."""
        shared = {
            _value(one.attrib, "abstractNumId"): _levels(one) for one in root.iter("{*}abstractNum")
        }
        for one in root.iter("{*}num"):
            counter = _get(one, "abstractNumId")
            found = _List(counter, {**shared.get(counter, {}), **_levels(one)})
            for other in one.iter("{*}lvlOverride"):
                start = _integer(_get(other, "startOverride"), None)
                if start is not None:
                    found.starts[_integer(_value(other.attrib, "ilvl"), 0) or 0] = start
            self._lists[_value(one.attrib, "numId")] = found

    def style(self, name: str) -> _Style:
        """Return a style with what it takes from those that it is based on."""
        found = _Style()
        for _ in range(_MAX_BASES):
            style = self._styles.get(name)
            if style is None:
                break
            for key in ("level", "number", "depth", "is_hidden"):
                if getattr(found, key) is None:
                    setattr(found, key, getattr(style, key))
            if not style.base:
                break
            name = style.base
        return found

    def count(self, number: str, depth: int | None, style: str) -> tuple[str, int] | None:
        """Return the marker of the next item of a list ("-" for a bullet), and its depth."""
        one = self._lists.get(number)
        if one is None:
            return None
        if depth is None:
            depth = next((at for at, level in one.levels.items() if level.style == style), 0)
        depth = max(0, min(depth, _MAX_DEPTH))
        level = one.levels.get(depth) or _Level(text=f"%{depth + 1}.")
        counts = self._counts.setdefault(one.counter, {})
        if depth in one.starts and (number, depth) not in self._started:
            self._started.add((number, depth))
            counts[depth] = one.starts[depth] - 1
        counts[depth] = counts.get(depth, level.start - 1) + 1
        for deeper in [other for other in counts if other > depth]:
            del counts[deeper]

        def shown(found: re.Match[str]) -> str:
            its = one.levels.get(int(found[1]) - 1) or _Level()
            count = counts.setdefault(int(found[1]) - 1, its.start)
            if its.form == "decimalZero":
                return f"{count:02}"
            return numeral(count, "1" if level.is_legal else _NUMERALS.get(its.form, "1"))

        text = "-" if level.form == "bullet" else re.sub(r"%([1-9])", shown, level.text).strip()
        return text, depth


def _levels(parent: Any) -> dict[int, _Level]:
    return {
        at: _Level(
            _integer(_get(one, "start"), 1) or 0,
            _get(one, "numFmt"),
            _get(one, "lvlText")[:_MAX_MARKER_CHARACTERS],
            _get(one, "pStyle"),
            one.find("{*}isLgl") is not None,
        )
        for one in parent.iter("{*}lvl")
        if 0 <= (at := _integer(_value(one.attrib, "ilvl"), 0) or 0) <= _MAX_DEPTH
    }


class _Target:
    """Receives the XML parser's calls."""

    def start(self, tag: str, attributes: Mapping[str, str]) -> None: ...

    def end(self, tag: str) -> None: ...

    def data(self, data: str) -> None: ...

    def doctype(self, name: str, public_id: str, system_url: str) -> None:
        del public_id, system_url
        # Entity definitions in one can make a small file expand without end.
        raise ValueError(f"a document type declaration of {name!r}, which no Word file has")

    def close(self) -> None:
        """Return nothing."""


@dataclass
class _Paragraph:
    """What a paragraph's own properties say."""

    style: str = ""
    number: str | None = None
    depth: int | None = None


class _Body(_Target):
    """Gives paragraphs and tables to a layout."""

    def __init__(self, sheet: _Sheet, notes: dict[str, str]) -> None:
        self.layout = Layout()
        self._sheet = sheet
        sheet.begin_part()
        self._style = functools.lru_cache(maxsize=256)(sheet.style)
        self._notes = notes
        self._num_notes = {"footnote": 0, "endnote": 0}
        self._waiting: list[str] = []
        self._paragraph = _Paragraph()
        self._in_properties = False
        # Whether the mark between the paragraph and the next one is gone.
        self._is_joined = False
        self._text: list[str] = []
        self._in_text = False
        self._num_skipped = 0
        self._runs: list[bool] = []  # whether each open one is hidden
        self._cell: tuple[int, bool] | None = None
        self._guide = self._kept = self._text
        self._equation: list[str] = []
        self._places: list[int] = []  # of brackets and signs that a later property names
        self._ends: list[list[str]] = []  # of brackets, and what separates parts between them

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        space, name = _split(tag)
        if self._num_skipped or tag == _FALLBACK or (space == "w" and name in _GONE):
            self._num_skipped += 1
            self._is_joined |= self._in_properties and name in ("del", "moveFrom")
        elif space == "m":
            self._start_equation(name, attributes)
        elif space == "w":
            self._start(name, attributes)

    def data(self, data: str) -> None:
        is_hidden = bool(self._runs) and self._runs[-1]
        if self._in_text and not self._num_skipped and not is_hidden:
            self._text.append(data)

    def end(self, tag: str) -> None:
        if self._num_skipped:
            self._num_skipped -= 1
            return
        space, name = _split(tag)
        if space == "m":
            self._end_equation(name)
        elif space == "w":
            self._end(name)

    def _start(self, name: str, attributes: Mapping[str, str]) -> None:
        value = _value(attributes, "val")
        match name:
            case "t":
                self._in_text = True
            case "r":
                self._runs.append(bool(self._runs) and self._runs[-1])
            case "pPr":
                self._in_properties = True
            case "p":
                # In another one, in a text box: the outer one's text so far is first.
                if not self._is_joined:
                    self._end_paragraph()
                self._is_joined = False
                self._begin_cell()
            case "tbl":
                self._end_paragraph()
                self._begin_cell()
                self.layout.begin_table()
            case "tr":
                self.layout.begin_row()
            case "tc":
                self._cell = (1, False)
            case "gridBefore":
                self.layout.skip_columns(_integer(value, 0) or 0)
            case "gridSpan" if self._cell:
                self._cell = (_integer(value, 1) or 1, self._cell[1])
            case "vMerge" if self._cell:
                self._cell = (self._cell[0], value != "restart")
            case "pStyle":
                self._paragraph.style = value
            case "numId":
                self._paragraph.number = value
            case "ilvl":
                self._paragraph.depth = _integer(value, 0)
            case "rt":
                self._kept, self._text = self._text, []
            case _ if self._runs and not self._in_properties:
                self._start_in_run(name, value, attributes)

    def _start_in_run(self, name: str, value: str, attributes: Mapping[str, str]) -> None:
        if name == "vanish":
            self._runs[-1] = _is_on(value)
        elif name == "rStyle":
            self._runs[-1] |= bool(self._style(value).is_hidden)
        elif self._runs[-1]:
            return
        elif name in _MARKS:
            self._text.append(_MARKS[name])
        elif name in ("footnoteReference", "endnoteReference"):
            kind = name.removesuffix("Reference")
            if note := self._notes.pop(kind + _value(attributes, "id"), ""):
                self._num_notes[kind] += 1
                sign = f"[{numeral(self._num_notes[kind], '1' if kind == 'footnote' else 'i')}]"
                self._text.append(sign)
                self._waiting.append(f"{sign} {note}")

    def _end(self, name: str) -> None:
        match name:
            case "t":
                self._in_text = False
            case "r":
                self._runs.pop()
            case "pPr":
                self._in_properties = False
            case "p":
                if not self._is_joined:
                    self._end_paragraph()
            case "tc":
                self._end_paragraph()
                self._begin_cell()
                self.layout.end_cell()
            case "tr":
                self.layout.end_row()
            case "tbl":
                self.layout.end_table()
            case "rt":
                self._guide, self._text = self._text, self._kept
            case "ruby":
                if guide := "".join(self._guide).strip():
                    self._text.append(f"({guide})")
                self._guide = []

    def _begin_cell(self) -> None:
        """Begin the cell whose properties are now known, if there is one."""
        if self._cell is not None:
            columns, is_below = self._cell
            self._cell = None
            self.layout.begin_cell(columns, is_below=is_below)

    def _end_paragraph(self) -> None:
        text = "".join(self._text).strip()
        self._text.clear()
        paragraph, self._paragraph = self._paragraph, _Paragraph()
        style = self._style(paragraph.style)
        number = paragraph.number if paragraph.number is not None else style.number
        depth = paragraph.depth if paragraph.depth is not None else style.depth
        found = self._sheet.count(number, depth, paragraph.style) if number else None
        if not text or style.is_hidden:
            return
        layout = self.layout
        if style.level is not None:
            layout.begin_list(0)
            layout.heading(style.level)
            marker = f"{found[0]} " if found and found[0] not in ("", "-") else ""
            layout.text(" ".join(f"{marker}{text}".split()), is_raw=True)
            layout.end_heading()
        elif found and found[0]:
            layout.begin_list(found[1] + 1)
            layout.item(found[0])
            layout.text(text, is_raw=True)
            layout.end_line()
        else:
            if layout.list_depth:
                layout.begin_list(0)
            layout.text(text, is_raw=True)
            layout.end_block()
        for note in self._waiting:
            layout.text(note, is_raw=True)
            layout.end_block()
        self._waiting.clear()

    def _start_equation(self, name: str, attributes: Mapping[str, str]) -> None:
        above = self._equation[-1] if self._equation else ""
        self._equation.append(name)
        value = next(iter(attributes.values()), "")
        if name == "oMath":
            self._places.append(len(self._text))
        elif name == "t":
            self._in_text = True
        elif name in ("d", "nary"):
            self._places.append(len(self._text))
            self._text.append("(" if name == "d" else "∫")
            self._ends.append([")", "|"] if name == "d" else ["", ""])
        elif name in ("endChr", "sepChr") and self._ends:
            self._ends[-1][name == "sepChr"] = value
        elif (name == "begChr" or (above == "naryPr" and name == "chr")) and self._places:
            self._text[self._places[-1] : self._places[-1] + 1] = [value]
        self._text.append(_EQUATION.get(f"{above}/{name}", _EQUATION.get(name, _NEITHER))[0])

    def _end_equation(self, name: str) -> None:
        self._equation.pop()
        above = self._equation[-1] if self._equation else ""
        self._text.append(_EQUATION.get(f"{above}/{name}", _EQUATION.get(name, _NEITHER))[1])
        if name == "t":
            self._in_text = False
        elif name in ("d", "nary"):
            self._places.pop()
            end, separator = self._ends.pop()
            if separator and self._text[-2] == separator:  # after the last part
                self._text[-2] = ""
            self._text.append(end)
        elif name == "e" and above == "d":
            self._text.append(self._ends[-1][1])
        elif name == "oMath":
            place = self._places.pop()
            text = _SINGLE.sub(r"\1", _EMPTY.sub("", "".join(self._text[place:])))
            self._text[place:] = [text.replace(_OPEN, "(").replace(_CLOSE, ")")]


class _Notes(_Body):
    """Keeps the text of each note, by its kind and number."""

    def __init__(self, sheet: _Sheet, found: dict[str, str]) -> None:
        super().__init__(sheet, {})
        self._found = found
        self._name = ""

    def _start(self, name: str, attributes: Mapping[str, str]) -> None:
        if name in ("footnote", "endnote"):
            self._name, self.layout = name + _value(attributes, "id"), Layout()
        super()._start(name, attributes)

    def _end(self, name: str) -> None:
        super()._end(name)
        if name in ("footnote", "endnote"):
            self._found[self._name] = self.layout.finish().replace("\n\n", "\n")


@functools.lru_cache(maxsize=1024)
def _split(tag: str) -> tuple[str, str]:
    """Return the namespace of an element, "w" (text), "m" (equations) or "", and its name."""
    namespace, brace, name = tag.rpartition("}")
    space = namespace + brace
    return "w" if space in _WORD else "m" if space in _MATH else "", name


def _value(attributes: Mapping[str, str], name: str) -> str:
    """Return an attribute in Word's namespace, "" if there is none."""
    return next((attributes[space + name] for space in _WORD if space + name in attributes), "")


def _get(element: Any, path: str) -> str:
    """Return the value of an element under another, "" if there is none."""
    found = element.find("/".join(f"{{*}}{name}" for name in path.split("/")))
    return "" if found is None else _value(found.attrib, "val")


def _integer(text: str, default: int | None) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else default


def _is_on(value: str) -> bool:
    return value not in ("0", "false", "off", "none")
