"""Slides, notebooks and spreadsheets to Markdown.

markitdown converts slides and notebooks. Each goes straight to the converter of its kind: its front
door would also guess what a file is with a neural network, and load plugins.

A spreadsheet's sheets are tables under their names, with each cell as it is shown. Hidden sheets,
rows and columns are left out. A merged cell's value is in its first column, in each of its rows.
markitdown would read spreadsheets with pandas, which turns 3 into 3.0 beside an empty cell, drops a
cell that says NA, and knows no formats.
"""

from __future__ import annotations

import io
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvrag.chunk import PAGE_BREAK
from kvrag.errors import DocumentError
from kvrag.ingest.archives import check_archive, check_kind, damaged
from kvrag.ingest.number_formats import builtin, shown

_KINDS = {
    ".pptx": "PowerPoint file",
    ".xlsx": "Excel file",
    ".xls": "Excel file",
    ".ipynb": "notebook",
}
_CONVERTERS = {
    ".pptx": "PptxConverter",
    ".ipynb": "IpynbConverter",
}
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
        check_archive(path, kind, content)
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
