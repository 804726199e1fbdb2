"""Slides, spreadsheets, e-books and notebooks for tests."""

import io
import json
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CONTAINER = '<container><rootfiles><rootfile full-path="b/c.opf"/></rootfiles></container>'
_PACKAGE = (
    '<package xmlns:dc="http://purl.org/dc/elements/1.1/"><metadata><dc:title>Varn by the sea'
    '</dc:title></metadata><manifest><item id="a" href="a.xhtml"/><item id="b" href="b.xhtml"/>'
    '</manifest><spine><itemref idref="b"/><itemref idref="a"/></spine></package>'
)


def pptx_bytes() -> bytes:
    """Return a file of three slides: text with notes, nothing, and a table."""
    import pptx

    show: Any = pptx.Presentation()
    first = show.slides.add_slide(show.slide_layouts[1])
    first.shapes.title.text = "The clock"
    first.placeholders[1].text = "Tomas repairs it."
    first.notes_slide.notes_text_frame.text = "Say it slowly."
    show.slides.add_slide(show.slide_layouts[6])
    last = show.slides.add_slide(show.slide_layouts[5])
    last.shapes.title.text = "Ships"
    table = last.shapes.add_table(2, 2, 0, 9_000_000, 99, 99).table
    for place, text in enumerate(("ship", "day", "Ria", "3")):
        table.cell(*divmod(place, 2)).text = text
    packed = io.BytesIO()
    show.save(packed)
    return packed.getvalue()


def xlsx_bytes() -> bytes:
    """Return a file of two sheets, with empty cells and a column without a name."""
    import openpyxl

    book: Any = openpyxl.Workbook()
    book.active.title = "Ships"
    for row in (["ship", "day", None], ["Ria", 3, "late"], ["Vega", 4, None]):
        book.active.append(row)
    book.create_sheet("Crew").append(["name"])
    book["Crew"].append(["Ines"])
    packed = io.BytesIO()
    book.save(packed)
    return packed.getvalue()


def far_xlsx_bytes() -> bytes:
    """Return a file whose one cell is the last that a sheet can have."""
    import openpyxl

    book: Any = openpyxl.Workbook()
    book.active["XFD1048576"] = "far"
    packed = io.BytesIO()
    book.save(packed)
    return packed.getvalue()


def merged_xlsx_bytes(number: int) -> bytes:
    """Return a file of this many rows, and as many merged ranges that reach to the last cell."""
    import openpyxl

    book: Any = openpyxl.Workbook()
    for row in range(1, number + 1):
        book.active.append([row])
        book.active.merged_cells.add(f"A{row}:XFD1048576")
    packed = io.BytesIO()
    book.save(packed)
    return packed.getvalue()


def xls_bytes() -> bytes:
    """Return a file in the oldest form, BIFF2, which is simple enough to write by hand."""

    def record(kind: int, body: bytes) -> bytes:
        return struct.pack("<HH", kind, len(body)) + body

    def label(row: int, column: int, text: str) -> bytes:
        body = struct.pack("<HH3xB", row, column, len(text)) + text.encode("ascii")
        return record(0x0004, body)

    cells = [(0, 0, "ship"), (0, 1, "day"), (1, 0, "Ria"), (1, 1, "Monday")]
    return (
        record(0x0009, struct.pack("<HH", 2, 0x10))
        + b"".join(label(*cell) for cell in cells)
        + record(0x000A, b"")
    )


def archive_bytes(files: Mapping[str, str | bytes]) -> bytes:
    """Return a zip archive of these files."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


def epub_bytes(first: str = "<h1>The clock</h1><p>It ticks.</p>", package: str = _PACKAGE) -> bytes:
    """Return a book of two chapters, of which `first` is the body of one."""
    return archive_bytes(
        {
            "META-INF/container.xml": _CONTAINER,
            "b/c.opf": package,
            "b/a.xhtml": "<html><body><h2>Its maker</h2><p>Tomas</p></body></html>",
            "b/b.xhtml": f"<!DOCTYPE html><html><body>{first}</body></html>",
        }
    )


def ipynb_bytes() -> bytes:
    """Return a notebook of a heading, a cell of code and its output."""
    cells = [
        {"cell_type": "markdown", "source": ["# The clock\n", "\n", "It ticks."]},
        {"cell_type": "code", "source": "tick()", "outputs": [{"text": ["tock"]}]},
    ]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}).encode()


# Made by xlwt: formats, a merged cell, a hidden row, a hidden column and a hidden sheet.
def old_xls_bytes() -> bytes:
    """Return a file in the form of Excel 97."""
    return Path(__file__).with_name("excel97.xls").read_bytes()
