"""Word files to text with its structure, as a reader of the last version sees it.

Libraries that convert Word files were tried (mammoth, docx2python, undoc). Each loses some of:
numbers of lists, phonetic guides, equations, headers, moved and hidden text. And mammoth takes 15 s
for 50,000 short paragraphs, which are one second here.
"""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

from kvrag.ingest.archives import Archive, reading
from kvrag.ingest.layout import Layout, numeral

_KIND = "Word file"
_MAX_DEPTH = 8
# Word's own limits are lower. Without any, a small file costs without end.
_MAX_BASES = 32
_MAX_MARKER_CHARACTERS = 64
# Texts and equations, each in the usual form and in the strict one.
_SPACES = {
    "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}": "w",
    "{http://purl.oclc.org/ooxml/wordprocessingml/main}": "w",
    "{http://schemas.openxmlformats.org/officeDocument/2006/math}": "m",
    "{http://purl.oclc.org/ooxml/officeDocument/math}": "m",
}
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
_BRACKETS = str.maketrans({_OPEN: "(", _CLOSE: ")"})
_EMPTY = re.compile(rf"[\^_]{_OPEN}\s*{_CLOSE}|\[\]")
_SINGLE = re.compile(rf"{_OPEN}(\w*){_CLOSE}")


def docx_to_text(path: str, content: bytes) -> tuple[str, str]:
    """Return the title and the text of a Word file.

    `Layout` says what the text looks like. Headers come first and footers last, each once. A note
    follows the paragraph that refers to it. Lists and headings have the numbers that Word shows.

    Paragraphs and tables are read one by one: a document of a million paragraphs, or a cell that
    spans a million columns, costs no more than its text.

    Raises
    ------
    DocumentError
        When it is damaged, is an old ``.doc``, or has a part that unpacks to more than 256 MiB.
    """
    with reading(path, _KIND):
        archive = Archive(path, _KIND, content)
        relations = dict(archive.relations(""))
        main = relations.get("officeDocument", "word/document.xml")
        core = relations.get("core-properties", "docProps/core.xml")
        titles = archive.tree(core).iter("{*}title") if core in archive else ()
        title = next(("".join(one.itertext()) for one in titles), "")
        return title.strip(), _text(archive, main)


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
    for kind in ("footnote", "endnote"):
        for name in find(f"{kind}s"):
            body = _Body(sheet, {})
            for one in _elements(archive, name, kind):
                body.layout = Layout()
                body.read(one)
                notes[kind + _value(one.attrib, "id")] = body.end().replace("\n\n", "\n")

    def edges(kind: str) -> list[str]:
        texts = [_blocks(archive, name, sheet, {}) for name in sorted(set(find(kind)))]
        # Not one that holds a page's number alone.
        return [one for one in dict.fromkeys(texts) if re.search(r"[^\W\d_]{2}", one)]

    texts = [*edges("header"), _blocks(archive, main, sheet, notes), *edges("footer")]
    return "\n\n".join(filter(None, texts))


def _blocks(archive: Archive, part: str, sheet: _Sheet, notes: dict[str, str]) -> str:
    """Return the text of a part's paragraphs and tables."""
    body = _Body(sheet, notes)
    for element in _elements(archive, part, "p", "tbl", "oMath"):
        body.read(element)
    return body.end()


def _elements(archive: Archive, part: str, *names: str) -> Iterator[Any]:
    """Yield the elements of a part with given names that are in no other of these, one by one.

    Raises
    ------
    ValueError
        When it declares its type: entities of such a declaration can expand without end.
    """
    from lxml import etree

    tags = [space + name for space in _SPACES for name in names]
    parser = etree.XMLPullParser(
        ("start", "end"),
        tag=tags,
        resolve_entities=False,
        no_network=True,
        load_dtd=False,
        remove_comments=True,  # or an element's text ends where one begins
        remove_pis=True,
    )
    depth = 0
    for piece in archive.pieces(part):
        parser.feed(piece)
        for event, element in parser.read_events():
            depth += 1 if event == "start" else -1
            around = element.iterancestors() if depth == 0 else ()
            if depth == 0 and not any(_split(one.tag)[0] == "gone" for one in around):
                _check_type(element)
                yield element
            if depth == 0:  # it has been read, as all before it
                element.clear()
                while element.getprevious() is not None:
                    del element.getparent()[0]
    _check_type(parser.close())


def _check_type(element: Any) -> None:
    declared = element.getroottree().docinfo.internalDTD
    if declared is not None:
        name = declared.name
        raise ValueError(f"a document type declaration of {name!r}, which no Word file has")


@dataclass(frozen=True)
class _Style:
    """What a style or a paragraph says; None where the style that it is based on says it."""

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
            heading = name.removeprefix("heading ")  # up to 9; Markdown has 6
            outline = _integer(_get(one, "pPr/outlineLvl"), -1)
            level = outline + 1 if 0 <= outline < 6 else None
            if name == "title":
                level = 1
            elif heading != name:
                level = min(_integer(heading, 6) or 6, 6)
            style = _Style(
                _get(one, "basedOn"),
                level,
                _get(one, "pPr/numPr/numId", None),
                _integer(_get(one, "pPr/numPr/ilvl")),
                _is_hidden(_find(one, "rPr")),
            )
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
                start = _integer(_get(other, "startOverride"))
                if start is not None:
                    found.starts[_integer(_value(other.attrib, "ilvl"), 0)] = start
            self._lists[_value(one.attrib, "numId")] = found

    def whole(self, style: _Style) -> _Style:
        """Return a style with what it takes from those that it is based on."""
        for _ in range(_MAX_BASES):
            base = self._styles.get(style.base)
            if base is None:
                break
            said = zip(astuple(style)[1:], astuple(base)[1:], strict=True)
            style = _Style(base.base, *(its if own is None else own for own, its in said))
            if not style.base:
                break
        return style

    def count(self, number: str, depth: int | None, style: str) -> tuple[str, int] | None:
        """Return the marker of the next item of a list ("-" for a bullet), and its depth."""
        if (one := self._lists.get(number)) is None:
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
            _integer(_get(one, "start"), 1),
            _get(one, "numFmt"),
            _get(one, "lvlText")[:_MAX_MARKER_CHARACTERS],
            _get(one, "pStyle"),
            _find(one, "isLgl") is not None,
        )
        for one in parent.iter("{*}lvl")
        if 0 <= (at := _integer(_value(one.attrib, "ilvl"), 0)) <= _MAX_DEPTH
    }


class _Body:
    """Gives paragraphs and tables to a layout."""

    def __init__(self, sheet: _Sheet, notes: dict[str, str]) -> None:
        self.layout = Layout()
        self._sheet = sheet
        sheet.begin_part()
        self._whole = functools.lru_cache(maxsize=256)(sheet.whole)
        self._notes = notes
        self._num_notes = {"footnote": 0, "endnote": 0}
        self._waiting: list[str] = []
        self._paragraph = _Style()
        # Whether the mark between the paragraph and the next one is gone.
        self._is_joined = False
        self._text: list[str] = []

    def read(self, element: Any, is_hidden: bool = False) -> None:
        """Take the text of an element."""
        space, name = _split(element.tag)
        if space == "gone" or name.endswith("Pr"):
            return
        if space == "m" and name == "oMath":
            if not is_hidden:
                self._text.append(_equation(element))
            return
        match name if space == "w" else "":
            case "t" if not is_hidden:
                self._text.append(element.text or "")
            case "r":
                if (properties := _find(element, "rPr")) is not None:
                    style = self._whole(_Style(_get(properties, "rStyle"))).is_hidden
                    own = _is_hidden(properties)
                    is_hidden = is_hidden or bool(style) if own is None else own
            case "p":
                self._read_paragraph(element, is_hidden)
                return
            case "tbl":
                self._end_paragraph()
                self.layout.tables.begin_table()
            case "tr":
                self.layout.tables.begin_row()
                self.layout.tables.skip_columns(_integer(_get(element, "trPr/gridBefore"), 0))
            case "tc":
                columns = _integer(_get(element, "tcPr/gridSpan"), 1)
                merged = _find(element, "tcPr/vMerge")
                is_below = merged is not None and _value(merged.attrib, "val") != "restart"
                self.layout.tables.begin_cell(columns, is_below=is_below)
            case "ruby":
                self._read_ruby(element, is_hidden)
                return
            case _ if name in _MARKS and not is_hidden:
                self._text.append(_MARKS[name])
            case "footnoteReference" | "endnoteReference" if not is_hidden:
                self._refer(name.removesuffix("Reference"), _value(element.attrib, "id"))
        for child in element.iterchildren("*"):
            self.read(child, is_hidden)
        match name if space == "w" else "":
            case "tc":
                self._end_paragraph()
                self.layout.tables.end_cell()
            case "tr":
                self.layout.tables.end_row()
            case "tbl":
                self.layout.tables.end_table()

    def end(self) -> str:
        """Return the text that was read."""
        self._end_paragraph()
        return self.layout.finish()

    def _read_paragraph(self, element: Any, is_hidden: bool) -> None:
        # In another one, in a text box: the outer one's text so far is first.
        if not self._is_joined:
            self._end_paragraph()
        self._is_joined = is_joined = False
        properties = _find(element, "pPr")
        if properties is not None:
            number, depth = _get(properties, "numPr/numId", None), _get(properties, "numPr/ilvl")
            self._paragraph = _Style(
                _get(properties, "pStyle"), number=number, depth=_integer(depth)
            )
            marks = _find(properties, "rPr")
            is_joined = marks is not None and any(_split(one.tag)[0] == "gone" for one in marks)
        for child in element.iterchildren("*"):
            self.read(child, is_hidden)
        self._is_joined = is_joined
        if not self._is_joined:
            self._end_paragraph()

    def _read_ruby(self, element: Any, is_hidden: bool) -> None:
        text = self._text
        parts = {}
        for name in ("rubyBase", "rt"):
            self._text = []
            for part in element.iterchildren(f"{{*}}{name}"):
                self.read(part, is_hidden)
            parts[name] = "".join(self._text)
        guide = parts["rt"].strip()
        self._text = [*text, parts["rubyBase"], f"({guide})" if guide else ""]

    def _refer(self, kind: str, number: str) -> None:
        if note := self._notes.pop(kind + number, ""):
            self._num_notes[kind] += 1
            sign = f"[{numeral(self._num_notes[kind], '1' if kind == 'footnote' else 'i')}]"
            self._text.append(sign)
            self._waiting.append(f"{sign} {note}")

    def _end_paragraph(self) -> None:
        text = "".join(self._text).strip()
        self._text.clear()
        name, style = self._paragraph.base, self._whole(self._paragraph)
        self._paragraph = _Style()
        found = self._sheet.count(style.number, style.depth, name) if style.number else None
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


def _equation(element: Any) -> str:
    """Return an equation in a line."""
    return _SINGLE.sub(r"\1", _EMPTY.sub("", _parts(element))).translate(_BRACKETS)


def _parts(element: Any) -> str:
    """Return the text of a part of an equation, with brackets around it."""
    _, above = _split(element.tag)
    if above == "t":
        return element.text or ""
    if above == "d":
        begin, between, end = (
            _get(element, f"dPr/{name}", default)
            for name, default in (("begChr", "("), ("sepChr", "|"), ("endChr", ")"))
        )
        parts = between.join(map(_parts, element.iterchildren("{*}e")))
        return f"{begin}{parts}{end}"
    text = _get(element, "naryPr/chr", "∫") if above == "nary" else ""
    for child in element.iterchildren("*"):
        space, name = _split(child.tag)
        if space != "gone":
            before, after = _EQUATION.get(f"{above}/{name}", _EQUATION.get(name, ("", "")))
            text += before + _parts(child) + after
    return text


@functools.lru_cache(maxsize=1024)
def _split(tag: str) -> tuple[str, str]:
    """Return an element's namespace ("w": text, "m": equations, "gone": not read) and its name."""
    namespace, brace, name = tag.rpartition("}")
    space = _SPACES.get(namespace + brace, "")
    return "gone" if tag == _FALLBACK or (space == "w" and name in _GONE) else space, name


def _value(attributes: Mapping[str, str], name: str) -> str:
    """Return an attribute in Word's namespaces, "" if there is none."""
    return next((attributes[space + name] for space in _SPACES if space + name in attributes), "")


def _find(element: Any, path: str) -> Any:
    """Return the first element under another at each step, None if there is none."""
    for name in path.split("/"):
        element = next(element.iterchildren(f"{{*}}{name}"), None)
        if element is None:
            return None
    return element


def _get(element: Any, path: str, default: Any = "") -> Any:
    """Return the value of an element under another."""
    found = _find(element, path)
    return default if found is None else _value(found.attrib, "val")


def _integer(text: str, default: Any = None) -> Any:
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else default


def _is_hidden(properties: Any) -> bool | None:
    """Return whether a text's properties hide it; None if they do not say."""
    vanish = None if properties is None else _find(properties, "vanish")
    return None if vanish is None else _is_on(_value(vanish.attrib, "val"))


def _is_on(value: str) -> bool:
    return value not in ("0", "false", "off", "none")
