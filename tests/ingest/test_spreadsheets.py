"""Spreadsheets as Excel shows them."""

import datetime
import io
import re
import time
import zipfile
from typing import Any

import pytest

from kvrag.ingest.converted import shown
from kvrag.ingest.loaders import load_bytes
from tests.support.office import merged_xlsx_bytes, old_xls_bytes

openpyxl = pytest.importorskip("openpyxl")


def text_of(book: Any) -> str:
    packed = io.BytesIO()
    book.save(packed)
    (document,) = load_bytes("/docs/a.xlsx", packed.getvalue())
    return document.text


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (42, "00000", "00042"),
        (0.125, "0.0%", "12.5%"),
        (0.5, "0%", "50%"),
        (1.2604166666666667, "[h]:mm", "30:15"),
        (-0.5, "[h]:mm", "-12:00"),
        (0.0006944444, "mm:ss", "01:00"),
        (0.99999, "h:mm:ss.000", "23:59:59.136"),
        # What looks different in each country.
        (46024, "mm-dd-yy", "2026-01-02"),
        (46024, "dd/mm/yyyy", "02/01/2026"),
        (46024.5, "d mmm yyyy h:mm AM/PM", "2 Jan 2026 12:00 PM"),
        (46024, "dddd, mmmm d", "Friday, January 2"),
        (46024.126, "yyyy-mm-dd h:mm:ss", "2026-01-02 3:01:26"),
        (1, "yyyy-mm-dd", "1900-01-01"),
        (61, "yyyy-mm-dd", "1900-03-01"),
        (-1, "yyyy-mm-dd", "-1"),
        (1234567.891, "#,##0.00", "1,234,567.89"),
        (-1234.5, "#,##0.00;(#,##0.00)", "(1,234.50)"),
        (-1234, "#,##0;[Red]-#,##0", "-1,234"),
        (1234.5, '"€"#,##0.00', "€1,234.50"),
        (1234.5, "[$€-407] #,##0.00", "€ 1,234.50"),
        (0.1, "_-* #,##0.00_-;-* #,##0.00_-", "0.10"),
        (5551234, "[<=9999999]###-####;(###) ###-####", "555-1234"),
        (2125551234, "[<=9999999]###-####;(###) ###-####", "(212) 555-1234"),
        (123456789, "000-00-0000", "123-45-6789"),
        (12345, "0.00E+00", "1.23E+04"),
        (0.00012, "0.0E+00", "1.2E-04"),
        (1500000, '0.0,,"M"', "1.5M"),
        (0, '0;-0;"-"', "-"),
        (2.5, "0", "3"),
        (-0.004, "0.00", "0.00"),
        (0.5, "#.##", ".5"),
        (12, '0 "kg"', "12 kg"),
        (5, 'General" kg"', "5 kg"),
        (1e300, "0", "1" + "0" * 300),
        (0.30000000000000004, "General", "0.3"),
        (3.0, "General", "3"),
        (12345678901234, "General", "12345678901234"),
        (45352, '[$-411]ggge"年"m"月"d"日"', "2024年3月1日"),
        (0.5, "", "0.5"),
        # What is not rendered is as it would be without a format.
        (0.75, "# ?/?", "0.75"),
        (7, "0" * 100, "7"),
        (7, "[>1.2.3]0.0", "7.0"),
        (float("inf"), "yyyy", "inf"),
        (7, ";;;", ""),
        (True, "General", "TRUE"),
        ("00042", "@", "00042"),
        ("kg", '0;0;0;"in "@', "in kg"),
        (None, "0", ""),
    ],
)
def test_a_value_is_as_its_format_shows_it(value: Any, form: str, text: str) -> None:
    assert shown(value, form) == text


def test_dates_of_east_asia_are_dates_though_no_file_spells_their_format_out() -> None:
    book: Any = openpyxl.Workbook()
    book.active.append([45352.25])
    book.active["A1"].number_format = "0.00"
    packed, changed = io.BytesIO(), io.BytesIO()
    book.save(packed)
    with zipfile.ZipFile(packed) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b'numFmtId="2"', b'numFmtId="31"'))
    (document,) = load_bytes("/docs/a.xlsx", changed.getvalue())
    assert document.text.splitlines()[1] == "| 2024-03-01 |"
    # Records of the old form's cell formats, with a built-in number in place of an own one.
    content = re.sub(rb"(\xe0\0\x14\0..)[\xa4-\xff]\0", b"\\1\x1f\0", old_xls_bytes(), flags=re.S)
    (document,) = load_bytes("/docs/a.xls", content)
    assert document.text.splitlines()[3] == "| 1900-02-11 | 1899-12-31 | 1900-01-01 | 2026-01-02 |"


def test_dates_that_count_from_1904() -> None:
    book: Any = openpyxl.Workbook()
    book.epoch = openpyxl.utils.datetime.CALENDAR_MAC_1904
    book.active.append([datetime.date(2026, 1, 2)])
    assert text_of(book).splitlines()[1] == "| 2026-01-02 |"


def test_merged_cells_stand_in_each_of_their_rows() -> None:
    book: Any = openpyxl.Workbook()
    for row in (["Region", "Product", "Units"], ["EU", "Cable", 12], [None, "Hub", 7], ["Total"]):
        book.active.append(row)
    book.active["C4"] = 19
    book.active.merge_cells("A2:A3")
    book.active.merge_cells("A4:B4")
    assert text_of(book).splitlines()[1:] == [
        *("| Region | Product | Units |", "| --- | --- | --- |", "| EU | Cable | 12 |"),
        *("| EU | Hub | 7 |", "| Total |  | 19 |"),
    ]


def test_what_is_hidden_is_left_out() -> None:
    book: Any = openpyxl.Workbook()
    for row in (["name", "secret", "town", "late"], ["Ada", "1", "Riga", "x"], ["Bo", "2", "Oslo"]):
        book.active.append(row)
    book.active.row_dimensions[3].hidden = True
    book.active.column_dimensions["B"].hidden = True
    book.active.column_dimensions.group("D", "F", hidden=True)
    for state in ("hidden", "veryHidden"):
        sheet = book.create_sheet(state)
        sheet.append(["secret"])
        sheet.sheet_state = state
    assert text_of(book) == "## Sheet\n| name | town |\n| --- | --- |\n| Ada | Riga |"
    book.active.sheet_state = "hidden"
    book.create_sheet("Seen").append(["x"])
    assert text_of(book) == "## Seen\n| x |\n| --- |"


def test_large_merged_ranges_cost_no_more_than_their_text() -> None:
    content = merged_xlsx_bytes(3_000)
    started = time.process_time()
    (document,) = load_bytes("/docs/a.xlsx", content)
    assert document.text.endswith("\n| 3000 |")
    assert time.process_time() - started < 20


def test_old_files_show_their_cells_too() -> None:
    (document,) = load_bytes("/docs/a.xls", old_xls_bytes())
    assert document.text.splitlines() == [
        *("## Ships", "| code | share | time | day |", "| --- | --- | --- | --- |"),
        *("| 00042 | 12.5% | 30:15 | 2 Jan 2026 |", "| 00042 | 7.0% |  |  |"),
    ]
