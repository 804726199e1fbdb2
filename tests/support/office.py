"""Slides, spreadsheets, e-books and notebooks for tests."""

import base64
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
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
_OLD_XLS = (
    b"c-rk)O=uHA6#iy+lO}1}q`%M#F%(+0EmH9!LQN}Zy;!Oq6o1gPSxBf!N?MQ#YPIIzK@dGDUJCWELe+~uD55tHLPZ"
    b"aPAhe1nPeKI`ZR4A_yEScBXrLA<`-OQk@6FG9JM-<#WZzAcO^!UOox&pQfQq@C7w$ZppyaibAgDf<lSM1{P|7)2Q"
    b"}B9dA>A%KFL_%e*HEta6cjwvUXujAP&$e}bf!~!congeV~7eFL#xn;dkSt+Dn$*)RnD@9Wd+Lz-1Y^_Hnv=5*-C9"
    b"E#bHcDIvcl{JU*n<aa}1%fhXMO6I-^R3U4Hj&s`BlTNm0hiRekEVo60v^J5f5n+`ptXQb}KEviI|L`d`EHZ;;Ux7"
    b"3HUV%(ABIubv&J(&z?0o;WTh=r5MWO$G;iAt&;#m`(An6`GAS7FD#x^@Aw|5|7-`itE|%WY?u3vXxl5eMw-#Y6@>"
    b"yWeJ<YYI_n2)PqNzPeeIpvfg`TsRO<^z~=yoxW5gN$SR)L@cJKX3)+jlic2@Yfn0+Q-}U|G^3L`kVxu8%YMBlqYt"
    b"P=$mk$h<B6E=<BSFfXVRy9^62BOGPq!?Ea45rPcnu8m&<q?36jg1dq3Xq?e2;kXUh-=Ap;Yrm(PG4&dVPDGt^(D-"
    b"__y(AF)tMxupi<xqwC<p^4=M_Og!4wJa;C4do48Rc2xLFt@qLwGHHVE8|0CLtc3!m9yXXJq=~QMmAA-ykqKg<@m?"
    b"Q2<mA4VjQQyFq%cPxN%+LS;WePx&3}-S+is-_9#I!_MCZh2w+ye?u0Uyh9+lA%xj7{cZQ~trp{{`X_`5*STyok#m"
    b"BaCjLCj9douD0i!l+yqR>3uA0sqQN934-J;>QL`fIey)lDeuLE&ircz8+kV;nk0YdO2sSZ~Io=Cux+Ppa~>Nrrr5"
    b"UxNG7wMr?+V=lJkU947;U0B2}i%nu)u2nV(TQ;fItio<q9XN2{z<~n?HV}My0Ux89dEIoIw`KWVXO_~O^O@wo#eS"
    b"seH$Z=~b|FQ127?9hry4F{jU|@Z$NF9<age-c(2H)4qqkuG($!JqKhLr|23PJCD%Ag6A#wg=|GxqM*g@g"
)


def old_xls_bytes() -> bytes:
    """Return a file in the form of Excel 97."""
    return zlib.decompress(base64.b85decode(_OLD_XLS))
