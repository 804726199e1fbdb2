"""Spreadsheets to Markdown tables: each sheet under its name, each cell as it is shown.

`kvrag.ingest.converted` has the other formats. markitdown would read spreadsheets with pandas,
which turns 3 into 3.0 beside an empty cell and drops a cell that says NA.
"""

from __future__ import annotations

import datetime
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Sheet = tuple[str, Iterable[Sequence[Any]]]


def sheets_to_text(sheets: Iterable[Sheet]) -> str:
    """Return sheets as Markdown tables, without rows and columns that are empty."""
    parts = []
    for name, cells in sheets:
        rows = [row for row in (_filled(cells_of_row) for cells_of_row in cells) if row]
        if rows:
            parts.append(f"## {name}\n" + "\n".join(_table(rows)))
    return "\n\n".join(parts)


def xlsx_sheets(content: bytes) -> Iterator[Sheet]:
    """Yield the sheets of an Excel file; formulas have the values that Excel last stored."""
    import openpyxl

    book = openpyxl.load_workbook(io.BytesIO(content), read_only=True, data_only=True)
    for sheet in book.worksheets:
        # A file may say that a sheet has billions of cells: only those that are there count.
        sheet.reset_dimensions()
        yield sheet.title, sheet.iter_rows(values_only=True)


def xls_sheets(content: bytes) -> Iterator[Sheet]:
    """Yield the sheets of an Excel file from before 2007."""
    import xlrd

    # xlrd's complaints about a file would go to stdout.
    with xlrd.open_workbook(file_contents=content, logfile=io.StringIO(), on_demand=True) as book:
        for sheet in book.sheets():
            rows = (
                [_xls_value(cell, book.datemode) for cell in sheet.row(number)]
                for number in range(sheet.nrows)
            )
            yield sheet.name, rows


def _xls_value(cell: Any, datemode: int) -> Any:
    import xlrd

    if cell.ctype == xlrd.XL_CELL_DATE:
        return xlrd.xldate_as_datetime(cell.value, datemode)
    if cell.ctype == xlrd.XL_CELL_BOOLEAN:
        return bool(cell.value)
    if cell.ctype == xlrd.XL_CELL_ERROR:
        return xlrd.error_text_from_code.get(cell.value, "")
    return cell.value


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, datetime.datetime) and value.time() == datetime.time.min:
        value = value.date()
    # A cell is one line, and a bar would end it.
    return " ".join(str(value).split()).replace("|", "\\|")


def _filled(cells: Iterable[Any]) -> dict[int, str]:
    """Return the texts of a row's cells that are not empty, by column."""
    return {column: text for column, cell in enumerate(cells) if (text := _shown(cell))}


def _table(rows: Sequence[Mapping[int, str]]) -> Iterator[str]:
    columns = sorted({column for row in rows for column in row})
    for number, row in enumerate(rows):
        yield "| " + " | ".join(row.get(column, "") for column in columns) + " |"
        if number == 0:
            yield "|" + " --- |" * len(columns)
