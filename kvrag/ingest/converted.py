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
from kvrag.ingest.archives import Archive, check_kind, damaged

# Cells of spreadsheets as their number formats show them: "00042", "12.5%", "30:15", "2 Jan 2026".
#
# Libraries that do it were tried: xlsx2html gets 21 of 46 values wrong (units in quotes, rounding)
# and brings 36 MB of locales; ssf has not changed since 2020.
#
# Names of days and months are English. Fractions, and what no format can show, are as without one.


# Formats that look different in each country: as ISO 8601.
_LOCAL = {"mm-dd-yy": "yyyy-mm-dd", "m/d/yy h:mm": "yyyy-mm-dd hh:mm"}
_TOKEN = re.compile(
    r"""(?P<literal>"[^"]*"|\\.|[_*].)|\[\$(?P<sign>[^\]-]*)[^\]]*\]|\[(?P<total>h+|m+|s+)\]
    |\[(?P<test>[<>=]+)(?P<than>-?\d+(?:\.\d+)?)\]|\[[^\]]*\]
    |(?P<general>general)|(?P<half>am/pm|a/p)|(?P<exponent>e[+-]0+)
    |(?P<date>y+|m+|d+|h+|s+(?:\.0+)?)|(?P<year>g*e+)|(?P<digit>[0\#?])|(?P<other>.)""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
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


@dataclass(frozen=True)
class _Section:
    """One of the up to four parts of a format."""

    tokens: tuple[tuple[str, str], ...] = ()
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
    sections = _sections(form) if len(form) <= _MOST_CHARACTERS else ()
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
def _sections(form: str) -> tuple[_Section, ...]:
    found: list[_Section] = []
    tokens: list[tuple[str, str]] = []
    test: tuple[str, float] | None = None
    for match in [*_TOKEN.finditer(form), None]:
        if match is None or match["other"] == ";":
            found.append(_Section(tuple(tokens), test))
            tokens, test = [], None
        elif match["literal"]:
            text = match["literal"]
            if text[0] == '"':
                tokens.append(("literal", text[1:-1]))
            elif text[0] != "*":  # fills the cell's width
                tokens.append(("literal", " " if text[0] == "_" else text[1:]))
        elif match["test"]:
            if match["test"] in _TESTS:
                test = match["test"], float(match["than"])
        elif match["sign"]:
            tokens.append(("literal", match["sign"]))
        elif match.lastgroup == "other":
            tokens.append(("text" if match[0] == "@" else "other", match[0]))
        elif match.lastgroup not in (None, "sign", "than"):
            kind = match.lastgroup
            tokens.append((kind, match[kind] if kind == "digit" else match[kind].lower()))
    return tuple(found[:4])


def _chosen(sections: tuple[_Section, ...], value: float) -> tuple[_Section | None, float]:
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
    tokens = list(section.tokens)
    places = [at for at, (kind, _) in enumerate(tokens) if kind == "digit"]
    if len(places) > 2 * _MOST_DIGITS or any(token == "/" for _, token in tokens[places[0] :]):
        raise ValueError
    point = next((at for at, token in enumerate(tokens) if token == ("other", ".")), len(tokens))
    whole = [at for at in places if at < point]
    number = _EXACT.create_decimal(repr(value))
    number = number.scaleb(2 * sum(token == ("other", "%") for token in tokens), _EXACT)
    power = 0
    if section.has("exponent"):
        power = number.adjusted() - max(0, len(whole) - 1) if number else 0
        number = number.scaleb(-power, _EXACT)
    # Commas after the last digit, before the point too, divide by a thousand; others group.
    last = whole[-1] if whole else -1
    commas = [at for at, token in enumerate(tokens) if token == ("other", ",")]
    num_thousands = sum(last < at < point or at > places[-1] for at in commas)
    is_grouped = any(whole[0] < at < last for at in commas) if whole else False
    tokens = [token for token in tokens if token != ("other", ",")]
    return _spelled(tokens, number.scaleb(-3 * num_thousands, _EXACT), power, is_grouped)


def _spelled(tokens: list[tuple[str, str]], number: Decimal, power: int, is_grouped: bool) -> str:
    """Return a number in the places that tokens have for its digits."""
    point = next((at for at, token in enumerate(tokens) if token == ("other", ".")), len(tokens))
    places = [at for at, (kind, _) in enumerate(tokens) if kind == "digit"]
    whole = [at for at in places if at < point]
    decimals = [tokens[at][1] for at in places if at > point]
    number = number.quantize(Decimal(1).scaleb(-len(decimals)), context=_EXACT)
    digits, _, fraction = format(abs(number), "f").partition(".")
    while fraction and decimals[len(fraction) - 1] != "0" and fraction[-1] == "0":
        fraction = fraction[:-1]
    digits = digits.lstrip("0")
    parts: list[str] = []
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
        else:
            parts.append(token)
    text = "".join(reversed(parts)) + ("" if whole else digits)
    rest = []
    digits_left = iter(fraction)
    for kind, token in tokens[point:]:
        if kind == "digit":
            rest.append(next(digits_left, ""))
        elif kind == "exponent":
            sign = "-" if power < 0 else "+" if token[1] == "+" else ""
            rest.append(f"E{sign}{abs(power):0{len(token) - 2}}")
        elif (kind, token) != ("other", "."):
            rest.append(token)
        elif fraction:
            rest.append(".")
    sign = "-" if number < 0 else ""
    return " ".join(f"{sign}{text}{''.join(rest)}".split())


def _date(section: _Section, value: float, is_1904: bool) -> str:
    tokens = section.tokens
    last = next((token for kind, token in reversed(tokens) if kind == "date" and "s" in token), "")
    num_decimals = len(last.partition(".")[2])
    # Rounded to what is shown, so that 59.9996 s are the next minute.
    is_total = section.has("total")
    unit = 10**num_decimals if "s" in last or is_total else 1
    ticks = int(
        _EXACT.multiply(Decimal(repr(value)), 86400 * unit).to_integral_value(ROUND_HALF_UP)
    )
    seconds, parts_of_second = divmod(abs(ticks) if is_total else ticks, unit)
    days, second = divmod(seconds, 86400)
    if not is_total and not 0 <= days < _LAST_DAY:
        raise ValueError  # Excel shows a row of hashes
    if is_1904:
        days += _DAYS_TO_1904
    elif days < 60:  # Excel has a 29 February 1900
        days += 1
    when = _EPOCH + datetime.timedelta(days % _LAST_DAY, second)
    has_half = section.has("half")
    hour = (when.hour % 12 or 12) if has_half else when.hour
    units = [token[0] for kind, token in tokens if kind in ("date", "total")]
    totals = {"h": seconds // 3600, "m": seconds // 60, "s": seconds}
    parts = ["-"] if is_total and ticks < 0 else []
    place = -1
    for kind, token in tokens:
        if kind in ("date", "total"):
            place += 1
        if kind == "total":
            parts.append(f"{totals[token[0]]:0{len(token)}}")
        elif kind == "half":
            half = "AM" if when.hour < 12 else "PM"
            parts.append(half if "m" in token else half[0])
        elif kind == "year":  # of an era, whose beginning kvrag does not know
            parts.append(f"{when.year}")
        elif kind != "date":
            parts.append(token)
        elif token[0] == "y":
            parts.append(f"{when.year:04}" if len(token) > 2 else f"{when.year % 100:02}")
        elif token[0] == "h":
            parts.append(f"{hour:0{min(2, len(token))}}")
        elif token[0] == "s":
            parts.append(f"{when.second:0{min(2, len(token.partition('.')[0]))}}")
            if num_decimals and "." in token:
                parts.append(f".{parts_of_second:0{num_decimals}}")
        elif token[0] == "d" and len(token) < 3:
            parts.append(f"{when.day:0{len(token)}}")
        elif token[0] == "d":
            parts.append(f"{when:%a}" if len(token) == 3 else f"{when:%A}")
        elif len(token) < 3 and ("h" in units[max(0, place - 1) : place] or _is_s(units, place)):
            parts.append(f"{when.minute:0{len(token)}}")
        elif len(token) < 3:
            parts.append(f"{when.month:0{len(token)}}")
        else:
            name = f"{when:%B}"
            parts.append(name[:3] if len(token) == 3 else name[0] if len(token) == 5 else name)
    return "".join(parts).strip()


def _is_s(units: list[str], place: int) -> bool:
    return units[place + 1 : place + 2] == ["s"]


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
    try:
        if suffix == ".xlsx":
            return "", _sheets_to_text(_xlsx_sheets(content))
        if suffix == ".xls":
            return "", _sheets_to_text(_xls_sheets(content))
        from markitdown import MissingDependencyException, StreamInfo, converters

        try:
            converter = getattr(converters, _CONVERTERS[suffix])()
            result = converter.convert(io.BytesIO(content), StreamInfo())
        except MissingDependencyException as error:
            raise _missing(path) from error
    except (MemoryError, DocumentError):  # at the limit: the process says so
        raise
    except ImportError as error:
        raise _missing(path) from error
    except Exception as error:  # any error of a library means that the file is bad
        raise damaged(path, kind, error) from error
    text = result.markdown.replace(PAGE_BREAK, "\n")
    if suffix == ".pptx":
        text = PAGE_BREAK.join(_SLIDE.split(text)[1:])
    return str(result.title or "").strip(), text


def _missing(path: str) -> DocumentError:
    return DocumentError(f"{path}: reading it needs more libraries: pip install 'kvrag[docs]'")


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
                row = {}
                for cell in cells:
                    style = cell["style_id"]
                    form = formats[style] if 0 <= style < len(formats) else "General"
                    if text := _one_line(shown(cell["value"], form, is_1904)):
                        row[cell["column"]] = text
                if row:
                    found.rows[number] = row
        ranges = parser.merged_cells.mergeCell if parser.merged_cells else ()
        found.merged = [(one.min_row, one.min_col, one.max_row) for one in ranges]
        found.hidden_rows = {
            int(number)
            for number, about in parser.row_dimensions.items()
            if about.get("hidden") in ("1", "true")
        }
        found.hidden_columns = [
            (int(about["min"]), int(about["max"]))
            for about in parser.column_dimensions.values()
            if about.get("hidden") in ("1", "true")
        ]
        yield found


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
                row = {}
                for column, cell in enumerate(sheet.row(number)):
                    value = cell.value
                    if cell.ctype == xlrd.XL_CELL_BOOLEAN:
                        value = bool(value)
                    elif cell.ctype == xlrd.XL_CELL_ERROR:
                        value = xlrd.error_text_from_code.get(value, "")
                    style = book.xf_list[cell.xf_index] if cell.xf_index is not None else None
                    form = "General"
                    if style is not None:
                        form = book.format_map[style.format_key].format_str
                        form = form or builtin(style.format_key)
                    if text := _one_line(shown(value, form, bool(book.datemode))):
                        row[column] = text
                if row:
                    found.rows[number] = row
            found.merged = [(first, left, last - 1) for first, last, left, _ in sheet.merged_cells]
            found.hidden_rows = {at for at, row in sheet.rowinfo_map.items() if row.hidden}
            found.hidden_columns = [(at, at) for at, it in sheet.colinfo_map.items() if it.hidden]
            yield found


def _format_of(book: Any, number: int) -> str:
    from openpyxl.styles.numbers import BUILTIN_FORMATS, BUILTIN_FORMATS_MAX_SIZE

    if number < BUILTIN_FORMATS_MAX_SIZE:
        return str(BUILTIN_FORMATS.get(number) or builtin(number))
    own = book._number_formats
    place = number - BUILTIN_FORMATS_MAX_SIZE
    return str(own[place]) if place < len(own) else "General"


def _one_line(text: str) -> str:
    # A cell is one line, and a bar would end it.
    return " ".join(text.split()).replace("|", "\\|")


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
_FORMS = str.maketrans(
    {
        "\u00ad": None,
        **dict(
            zip("\ufb00\ufb01\ufb02\ufb03\ufb04", ("ff", "fi", "fl", "ffi", "ffl"), strict=True)
        ),
        **dict.fromkeys("\ufb05\ufb06", "st"),
    }
)


def pdf_to_text(path: str, content: bytes) -> tuple[str, str]:
    """Return the title and the text of a PDF file, with form feeds between pages.

    Raises
    ------
    DocumentError
        When it is damaged, encrypted, or has no text layer; or pypdfium2 is not installed.
    """
    try:
        import pypdfium2
    except ImportError as error:
        raise DocumentError(
            f"{path}: reading it needs pypdfium2: pip install 'kvrag[ingest]'"
        ) from error
    try:
        document = pypdfium2.PdfDocument(content)
        pages = [_page_text(page) for page in _pages(document)]
        title = document.get_metadata_value("Title").strip()
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise DocumentError(
                f"{path}: the PDF is encrypted; remove its password first"
            ) from error
        raise damaged(path, "PDF", error) from error
    if not any(page.strip() for page in pages):
        raise DocumentError(
            f"{path}: the PDF has {len(pages)} pages but no text layer; run OCR over it first"
        )
    return title, join_words(PAGE_BREAK.join(pages))


def _pages(document: object) -> Iterator[object]:
    for number in range(len(document)):  # type: ignore[arg-type]
        page = document[number]  # type: ignore[index]
        yield page
        page.close()


def _page_text(page: object) -> str:
    text_page = page.get_textpage()  # type: ignore[attr-defined]
    text: str = text_page.get_text_range()
    text_page.close()
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
