"""PDF files to text; slides, notebooks and spreadsheets to Markdown.

markitdown converts slides and notebooks. Each goes straight to the converter of its kind: its front
door would also guess what a file is with a neural network, and load plugins.

A spreadsheet's sheets are tables under their names, with each cell as it is shown. Hidden sheets,
rows and columns are left out. A merged cell's value is in its first column, in each of its rows.
markitdown would read spreadsheets with pandas, which turns 3 into 3.0 beside an empty cell, drops a
cell that says NA, and knows no formats.
"""

from __future__ import annotations

import datetime
import functools
import io
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Context, Decimal
from pathlib import Path
from typing import Any

from kvrag.chunk import PAGE_BREAK
from kvrag.errors import DocumentError
from kvrag.ingest.archives import Archive, check_kind, reading

# Cells of spreadsheets as their number formats show them: "00042", "12.5%", "30:15", "2 Jan 2026".
#
# Libraries that do it were tried: xlsx2html gets 21 of 46 values wrong (units in quotes, rounding)
# and brings 36 MB of locales; ssf has not changed since 2020.
#
# Names of days and months are English. Fractions, and what no format can show, are as without one.


# Formats that look different in each country: as ISO 8601.
_LOCAL = {"mm-dd-yy": "yyyy-mm-dd", "m/d/yy h:mm": "yyyy-mm-dd hh:mm"}
_TOKEN = re.compile(
    r"""(?:"(?P<quoted>[^"]*)"|\\(?P<escaped>.)|(?P<blank>_.)|\*.)|\[\$(?P<sign>[^\]-]*)[^\]]*\]
    |\[(?P<total>h+|m+|s+)\]|\[(?P<test>[<>=]+)(?P<than>-?\d+(?:\.\d+)?)\]|\[[^\]]*\]
    |(?P<general>general)|(?P<half>am/pm|a/p)|(?P<exponent>e[+-]0+)
    |(?P<date>y+|m+|d+|h+|s+(?:\.0+)?)|(?P<year>g*e+)|(?P<digit>[0\#?])|(?P<text>@)|(?P<end>;)
    |(?P<other>.)""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
_LITERAL = frozenset({"quoted", "escaped", "sign", "other", "digit"})  # also kept in their case
_EPOCH = datetime.datetime(1899, 12, 30)
_DAYS_TO_1904 = 1462
_LAST_DAY = 2_958_466
_MOST_CHARACTERS = 255
_MOST_DIGITS = 30
# Room for every float.
_EXACT = Context(prec=400, rounding=ROUND_HALF_UP)
_TESTS = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "=": lambda a, b: a == b,
    "<>": lambda a, b: a != b,
}


@dataclass
class _Section:
    """One of the up to four parts of a format."""

    tokens: list[tuple[str, str]] = field(default_factory=list)
    test: tuple[str, float] | None = None

    def has(self, *kinds: str) -> bool:
        return any(kind in kinds for kind, _ in self.tokens)


def shown(value: Any, form: str, is_1904: bool = False) -> str:
    """Return a cell's value as its format shows it.

    Parameters
    ----------
    value
        A number (dates too: days since the book's epoch), a boolean, a text or None.
    form
        The number format, such as ``"#,##0.00"``.
    is_1904
        Whether days count from 1904.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).upper()
    form = _LOCAL.get(form, form) or "General"
    sections = _sections(form) if len(form) <= _MOST_CHARACTERS else []
    if not isinstance(value, int | float):
        text = str(value)
        if len(sections) == 4 or (len(sections) == 1 and sections[0].has("text")):
            return _with(sections[-1], text)
        return text
    section, number = _chosen(sections, value)
    try:
        if section is None:
            return _general(number)
        if section.has("general", "text"):
            return _with(section, _general(number))
        if section.has("date", "total"):
            return _date(section, number, is_1904)
        if not section.has("digit"):
            return "".join(token for _, token in section.tokens)
        return _number(section, number)
    except (ArithmeticError, ValueError):
        return _general(value)


def builtin(number: int) -> str:
    """Return a format of East Asia that no file spells out: each country has its own under it."""
    if number in (32, 33):
        return "h:mm:ss"
    if number in (34, 35, 55, 56):  # a time in China, a date in Japan
        return "yyyy-mm-dd h:mm"
    return "yyyy-mm-dd" if 27 <= number <= 36 or 50 <= number <= 58 else "General"


def _general(number: float) -> str:
    if isinstance(number, float) and number.is_integer():
        return str(int(number))
    return format(number, ".15g") if isinstance(number, float) else str(number)


def _with(section: _Section, text: str) -> str:
    return "".join(text if kind in ("general", "text") else token for kind, token in section.tokens)


@functools.lru_cache(maxsize=1024)
def _sections(form: str) -> list[_Section]:
    found = [_Section()]
    for match in _TOKEN.finditer(form):
        kind = match.lastgroup
        if kind == "end":
            found.append(_Section())
        elif kind == "than":
            if match["test"] in _TESTS:
                found[-1].test = match["test"], float(match["than"])
        elif kind == "blank":
            found[-1].tokens.append(("literal", " "))
        elif kind is not None:  # not a colour, nor what fills the cell's width
            text = match[kind]
            found[-1].tokens.append((kind, text if kind in _LITERAL else text.lower()))
    return found[:4]


def _chosen(sections: list[_Section], value: float) -> tuple[_Section | None, float]:
    """Return the section for a number, and the number that it shows."""
    if not sections:
        return None, value
    if any(one.test for one in sections):
        for one in sections[:3]:
            if one.test is None or _TESTS[one.test[0]](value, one.test[1]):
                return one, value
        return None, value
    if value < 0 and len(sections) > 1:
        return sections[1], -value
    if value == 0 and len(sections) > 2:
        return sections[2], value
    return sections[0], value


def _number(section: _Section, value: float) -> str:
    """Return a number in the places that a section has for its digits."""
    tokens = section.tokens
    places = [at for at, (kind, _) in enumerate(tokens) if kind == "digit"]
    if len(places) > 2 * _MOST_DIGITS or any(token == "/" for _, token in tokens[places[0] :]):
        raise ValueError
    point = next((at for at, token in enumerate(tokens) if token == ("other", ".")), len(tokens))
    whole = [at for at in places if at < point]
    decimals = [tokens[at][1] for at in places if at > point]
    number = _EXACT.create_decimal(repr(value))
    number = number.scaleb(2 * sum(token == ("other", "%") for token in tokens), _EXACT)
    power = 0
    if section.has("exponent"):
        power = number.adjusted() - max(0, len(whole) - 1) if number else 0
        number = number.scaleb(-power, _EXACT)
    # Commas after the last digit, before the point too, divide by a thousand; others group.
    last = whole[-1] if whole else -1
    commas = {at for at, token in enumerate(tokens) if token == ("other", ",")}
    num_thousands = sum(last < at < point or at > places[-1] for at in commas)
    is_grouped = any(whole[0] < at < last for at in commas) if whole else False
    number = number.scaleb(-3 * num_thousands, _EXACT)
    number = number.quantize(Decimal(1).scaleb(-len(decimals)), context=_EXACT)
    digits, _, fraction = format(abs(number), "f").partition(".")
    while fraction and decimals[len(fraction) - 1] != "0" and fraction[-1] == "0":
        fraction = fraction[:-1]
    digits = digits.lstrip("0")
    parts: list[str] = []  # backwards
    num_digits = 0
    for at in range(point - 1, -1, -1):
        kind, token = tokens[at]
        if kind == "digit":
            taken = digits if at == whole[0] else digits[-1:]
            digits = digits[: len(digits) - len(taken)]
            for digit in reversed(taken or ("0" if token == "0" else "")):
                if is_grouped and num_digits and num_digits % 3 == 0:
                    parts.append(",")
                parts.append(digit)
                num_digits += 1
        elif at not in commas:
            parts.append(token)
    parts = [*reversed(parts), "" if whole else digits]
    digits_left = iter(fraction)
    for at, (kind, token) in enumerate(tokens[point:], point):
        if kind == "digit":
            parts.append(next(digits_left, ""))
        elif kind == "exponent":
            sign = "-" if power < 0 else "+" if token[1] == "+" else ""
            parts.append(f"E{sign}{abs(power):0{len(token) - 2}}")
        elif at not in commas and (at != point or fraction):
            parts.append(token)
    sign = "-" if number < 0 else ""
    return " ".join(f"{sign}{''.join(parts)}".split())


def _date(section: _Section, value: float, is_1904: bool) -> str:
    tokens = section.tokens
    last = next((token for kind, token in reversed(tokens) if kind == "date" and "s" in token), "")
    num_decimals = len(last.partition(".")[2])
    is_total = section.has("total")
    # Rounded to what is shown, so that 59.9996 s are the next minute.
    exact = _EXACT.multiply(Decimal(repr(value)), 86400 * 10**num_decimals)
    ticks = int(exact.to_integral_value(ROUND_HALF_UP))
    seconds, parts_of_second = divmod(abs(ticks) if is_total else ticks, 10**num_decimals)
    days, second = divmod(seconds, 86400)
    if not is_total and not 0 <= days < _LAST_DAY:
        raise ValueError  # Excel shows a row of hashes
    days += _DAYS_TO_1904 if is_1904 else int(days < 60)  # Excel has a 29 February 1900
    when = _EPOCH + datetime.timedelta(days % _LAST_DAY, second)
    hour = (when.hour % 12 or 12) if section.has("half") else when.hour
    totals = {"h": seconds // 3600, "m": seconds // 60, "s": seconds}
    numbers = {"d": when.day, "h": hour, "m": when.month, "s": when.second}
    month, day = f"{when:%B}", f"{when:%A}"
    names = {"ddd": day[:3], "mmm": month[:3], "mmmmm": month[0]}
    parts = ["-"] if is_total and ticks < 0 else []
    units = [token[0] if kind in ("date", "total") else "" for kind, token in tokens]
    for at, (kind, token) in enumerate(tokens):
        unit, (whole, _, fraction) = units[at], token.partition(".")
        if kind == "total":
            parts.append(f"{totals[unit]:0{len(token)}}")
        elif kind == "half":
            half = "AM" if when.hour < 12 else "PM"
            parts.append(half if "m" in token else half[0])
        elif kind == "year":  # of an era, whose beginning kvrag does not know
            parts.append(f"{when.year}")
        elif kind != "date":
            parts.append(token)
        elif unit == "y":
            parts.append(f"{when.year:04}" if len(token) > 2 else f"{when.year % 100:02}")
        elif unit in "dm" and len(token) > 2:
            parts.append(names.get(token, day if unit == "d" else month))
        else:
            before, after = "".join(units[:at])[-1:], "".join(units[at + 1 :])[:1]
            is_minute = unit == "m" and (before == "h" or after == "s")
            number = when.minute if is_minute else numbers[unit]
            parts.append(f"{number:0{min(2, len(whole))}}")
            if fraction and num_decimals:
                parts.append(f".{parts_of_second:0{num_decimals}}")
    return "".join(parts).strip()


_KINDS = {
    ".pptx": "PowerPoint file",
    ".xlsx": "Excel file",
    ".xls": "Excel file",
    ".ipynb": "notebook",
}
_CONVERTERS = {".pptx": "PptxConverter", ".ipynb": "IpynbConverter"}
CONVERTED_SUFFIXES = frozenset(_KINDS)
"""The suffixes of the files that `converted_to_text` reads."""

_ARCHIVES = frozenset({".pptx", ".xlsx"})
# Merged cells' values that are repeated in one file, so that it costs no more than its size.
_MAX_REPEATED = 200_000
_SLIDE = re.compile(r"^<!-- Slide number: \d+ -->$", re.MULTILINE)


def converted_to_text(path: str, content: bytes) -> tuple[str, str]:
    """Return the title and the text of a file as Markdown.

    Slides are separated by form feeds, as pages are. A spreadsheet becomes a table under the
    name of each sheet.

    Parameters
    ----------
    path, content
        The file's path, which ends in one of `CONVERTED_SUFFIXES`, and its bytes.

    Raises
    ------
    DocumentError
        When it is damaged or unpacks to more than 256 MiB, or markitdown is not installed.
    """
    suffix = Path(path).suffix.lower()
    kind = _KINDS[suffix]
    if suffix in _ARCHIVES:
        Archive(path, kind, content).check_size()
    elif suffix == ".xls":
        check_kind(path, kind, content)
    with reading(path, kind):
        if suffix in _SHEETS:
            return "", _sheets_to_text(_SHEETS[suffix](content))
        from markitdown import StreamInfo, converters

        converter = getattr(converters, _CONVERTERS[suffix])()
        result = converter.convert(io.BytesIO(content), StreamInfo())
    text = result.markdown.replace(PAGE_BREAK, "\n")
    if suffix == ".pptx":
        text = PAGE_BREAK.join(_SLIDE.split(text)[1:])
    return str(result.title or "").strip(), text


@dataclass
class _Sheet:
    """A visible sheet: the texts of its cells by row and column, and how they are arranged.

    Attributes
    ----------
    merged
        First row and column, and last row, of merged cells.
    """

    name: str
    rows: dict[int, dict[int, str]] = field(default_factory=dict)
    merged: list[tuple[int, int, int]] = field(default_factory=list)
    hidden_rows: set[int] = field(default_factory=set)
    # First and last of each stretch.
    hidden_columns: list[tuple[int, int]] = field(default_factory=list)

    def put(self, row: int, column: int, text: str) -> None:
        # A cell is one line, and a bar would end it.
        if text := " ".join(text.split()).replace("|", "\\|"):
            self.rows.setdefault(row, {})[column] = text


def _sheets_to_text(sheets: Iterable[_Sheet]) -> str:
    """Return sheets as Markdown tables, without rows and columns that are empty."""
    parts = []
    room = _MAX_REPEATED
    for sheet in sheets:
        places = sorted(sheet.rows)
        for first, column, last in sheet.merged:
            text = sheet.rows.get(first, {}).get(column)
            below = places[bisect_right(places, first) : bisect_right(places, last)]
            room -= len(below)
            if text and room > 0:
                for row in below:
                    sheet.rows[row].setdefault(column, text)
        used = {column for row in sheet.rows.values() for column in row}
        for first, last in sheet.hidden_columns:
            used -= {column for column in used if first <= column <= last}
        rows = [
            {column: text for column, text in sheet.rows[at].items() if column in used}
            for at in places
            if at not in sheet.hidden_rows
        ]
        if rows := [row for row in rows if row]:
            parts.append(f"## {sheet.name}\n" + "\n".join(_table(rows)))
    return "\n\n".join(parts)


def _xlsx_sheets(content: bytes) -> Iterator[_Sheet]:
    """Yield the sheets of an Excel file; formulas have the values that Excel last stored."""
    import openpyxl
    from openpyxl.utils.datetime import CALENDAR_MAC_1904
    from openpyxl.worksheet._reader import WorkSheetParser

    book = openpyxl.load_workbook(io.BytesIO(content), read_only=True, data_only=True)
    formats = [_format_of(book, style.numFmtId) for style in book._cell_styles]
    is_1904 = book.epoch == CALENDAR_MAC_1904
    for sheet in book.worksheets:
        if sheet.sheet_state != "visible":
            continue
        found = _Sheet(sheet.title)
        # What iterates over the rows of `sheet`, which keeps its merged and hidden cells to itself.
        with sheet._get_source() as source:
            parser = WorkSheetParser(source, sheet._shared_strings, data_only=True)
            for number, cells in parser.parse():
                for cell in cells:
                    style = cell["style_id"]
                    form = formats[style] if 0 <= style < len(formats) else "General"
                    found.put(number, cell["column"], shown(cell["value"], form, is_1904))
        ranges = parser.merged_cells.mergeCell if parser.merged_cells else ()
        found.merged = [(one.min_row, one.min_col, one.max_row) for one in ranges]
        rows, columns = parser.row_dimensions, parser.column_dimensions.values()
        found.hidden_rows = {int(at) for at, about in rows.items() if _is_hidden(about)}
        found.hidden_columns = [
            (int(about["min"]), int(about["max"])) for about in columns if _is_hidden(about)
        ]
        yield found


def _is_hidden(about: Mapping[str, str]) -> bool:
    return about.get("hidden") in ("1", "true")


def _xls_sheets(content: bytes) -> Iterator[_Sheet]:
    """Yield the sheets of an Excel file from before 2007."""
    import xlrd

    # xlrd's complaints about a file would go to stdout.
    with xlrd.open_workbook(
        file_contents=content, logfile=io.StringIO(), formatting_info=True
    ) as book:
        for sheet in book.sheets():
            if sheet.visibility:
                continue
            found = _Sheet(sheet.name)
            for number in range(sheet.nrows):
                for column, cell in enumerate(sheet.row(number)):
                    value, form = cell.value, "General"
                    if cell.ctype == xlrd.XL_CELL_BOOLEAN:
                        value = bool(value)
                    elif cell.ctype == xlrd.XL_CELL_ERROR:
                        value = xlrd.error_text_from_code.get(value, "")
                    if cell.xf_index is not None:
                        key = book.xf_list[cell.xf_index].format_key
                        form = book.format_map[key].format_str or builtin(key)
                    found.put(number, column, shown(value, form, bool(book.datemode)))
            found.merged = [(first, left, last - 1) for first, last, left, _ in sheet.merged_cells]
            found.hidden_rows = {at for at, row in sheet.rowinfo_map.items() if row.hidden}
            found.hidden_columns = [(at, at) for at, it in sheet.colinfo_map.items() if it.hidden]
            yield found


_SHEETS = {".xlsx": _xlsx_sheets, ".xls": _xls_sheets}


def _format_of(book: Any, number: int) -> str:
    from openpyxl.styles.numbers import BUILTIN_FORMATS, BUILTIN_FORMATS_MAX_SIZE

    if number < BUILTIN_FORMATS_MAX_SIZE:
        return str(BUILTIN_FORMATS.get(number) or builtin(number))
    own = book._number_formats
    place = number - BUILTIN_FORMATS_MAX_SIZE
    return str(own[place]) if place < len(own) else "General"


def _table(rows: Sequence[Mapping[int, str]]) -> Iterator[str]:
    columns = sorted({column for row in rows for column in row})
    for number, row in enumerate(rows):
        yield "| " + " | ".join(row.get(column, "") for column in columns) + " |"
        if number == 0:
            yield "|" + " --- |" * len(columns)


# -- PDF -----------------------------------------------------------------------------------------

# Between the two halves of a word: PDFium's characters for a hyphen that ends a line, where it
# joins the lines, or a hyphen before a line's end, which it leaves after a digit.
_CUT = re.compile("(?<!\\w)(\\w++)(?:[\ufffe\x02]|[-\u2010]\n)(?=(\\w++)(-?))")
_WORD = re.compile(r"\w+(?:-\w+)*")
# "Haupt- und Nebeneingang": the hyphen stands for the rest of a word, which follows.
_CONJUNCTIONS = frozenset({"and", "or", "und", "oder", "bzw", "och", "og", "eller"})
_LIGATURES = {"\ufb00": "ff", "\ufb01": "fi", "\ufb02": "fl", "\ufb03": "ffi", "\ufb04": "ffl"}
_FORMS = str.maketrans({"\u00ad": None, **_LIGATURES, "\ufb05": "st", "\ufb06": "st"})


def pdf_to_text(path: str, content: bytes) -> tuple[str, str]:
    """Return the title and the text of a PDF file, with form feeds between pages.

    Raises
    ------
    DocumentError
        When it is damaged, encrypted, or has no text layer; or pypdfium2 is not installed.
    """
    with reading(path, "PDF", "ingest"):
        import pypdfium2

        try:
            document = pypdfium2.PdfDocument(content)
        except pypdfium2.PdfiumError as error:
            if "password" in str(error).lower():
                why = "the PDF is encrypted; remove its password first"
                raise DocumentError(f"{path}: {why}") from error
            raise
        pages = [_page_text(document, number) for number in range(len(document))]
        title = document.get_metadata_value("Title").strip()
    if not any(page.strip() for page in pages):
        raise DocumentError(
            f"{path}: the PDF has {len(pages)} pages but no text layer; run OCR over it first"
        )
    return title, join_words(PAGE_BREAK.join(pages))


def _page_text(document: Any, number: int) -> str:
    page = document[number]
    text_page = page.get_textpage()
    text: str = text_page.get_text_range()
    text_page.close()
    page.close()
    return text.replace("\r\n", "\n").replace(PAGE_BREAK, "\n")


def join_words(text: str) -> str:
    """Return a text with words joined that a line's end cut, and letters for ligatures.

    A hyphen stays if it is one of several in a word; if the document has the word with it
    elsewhere, or has both parts as words; and where a capital or a digit is beside it. It goes in
    any case if the document has the word without it. A soft hyphen never stays.
    """
    text = re.sub("\u00ad[\ufffe\x02]?[ \\t]*\n", "", text).translate(_FORMS)
    words: set[str] = set()
    if _CUT.search(text):
        words = {word.lower() for word in _WORD.findall(_CUT.sub(" ", text))}

    def joined(cut: re.Match[str]) -> str:
        first, second, more = cut.groups()
        if (first + second).lower() in words:
            return first
        if second.lower() in _CONJUNCTIONS:
            return f"{first}- "
        before = cut.string[max(0, cut.start() - 1) : cut.start()]
        is_compound = (
            "-" in (before, more)
            or not (second[0].islower() and first.isalpha() and not first.isupper())
            or f"{first}-{second}".lower() in words
            or (first.lower() in words and second.lower() in words)
        )
        return f"{first}-" if is_compound else first

    return re.sub("[\ufffe\x02]", "-\n", _CUT.sub(joined, text))
