"""Slides, spreadsheets, e-books and notebooks: what they become, and how they can be bad."""

import contextlib
import datetime
import io
import re
import sys
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest

from kvrag.chunk import Document
from kvrag.errors import DocumentError
from kvrag.ingest.chunker import chunk_document
from kvrag.ingest.converted import CONVERTED_SUFFIXES
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.loaders import load_bytes
from kvrag.ingest.parsing import Parser
from tests.support import office
from tests.support.models import make_tokenizer

pytest.importorskip("markitdown")

GOOD = {
    ".pptx": office.pptx_bytes,
    ".xlsx": office.xlsx_bytes,
    ".xls": office.xls_bytes,
    ".epub": office.epub_bytes,
    ".ipynb": office.ipynb_bytes,
}


@pytest.fixture(scope="module")
def parser() -> Iterator[Parser]:
    with Parser(ParseLimits(seconds=60)) as parser:
        yield parser


def load(parser: Parser, suffix: str, content: bytes | None = None) -> Document:
    (document,) = parser.parse(
        f"/docs/a{suffix}", GOOD[suffix.lower()]() if content is None else content
    )
    return document


def test_slides_are_pages(parser: Parser) -> None:
    document = load(parser, ".pptx")
    first, second, third = document.text.split("\f")
    assert first.strip() == "# The clock\nTomas repairs it.\n\n### Notes:\nSay it slowly."
    assert not second.strip()
    assert third.strip() == "# Ships\n| ship | day |\n| --- | --- |\n| Ria | 3 |"
    chunks = chunk_document(document, make_tokenizer(), 16)
    assert (chunks[0].metadata["page"], chunks[0].metadata["heading"]) == (1, "The clock")
    assert chunks[-1].metadata["page"] == 3
    assert chunks[-1].metadata["heading"] == "Ships"


def test_sheets_are_tables(parser: Parser) -> None:
    expected = (
        "## Ships\n| ship | day |  |\n| --- | --- | --- |\n| Ria | 3 | late |\n| Vega | 4 |  |"
        "\n\n## Crew\n| name |\n| --- |\n| Ines |"
    )
    assert load(parser, ".XLSX").text == expected
    assert load(parser, ".xls").text.endswith("\n| ship | day |\n| --- | --- |\n| Ria | Monday |")


def test_books_and_notebooks_keep_their_headings_and_titles(parser: Parser) -> None:
    book = load(parser, ".epub")
    assert book.metadata == {"title": "Varn by the sea"}
    assert book.text.endswith("# The clock\n\nIt ticks.\n\n## Its maker\n\nTomas")
    notebook = load(parser, ".ipynb")
    assert notebook.metadata == {"title": "The clock"}
    assert notebook.text == "# The clock\n\nIt ticks.\n\n```python\ntick()\n```"


@pytest.mark.parametrize("suffix", sorted(GOOD))
@pytest.mark.parametrize("how", ["noise", "half", "archive", "json"])
def test_damaged_files_are_refused(parser: Parser, suffix: str, how: str) -> None:
    content = {
        "noise": b"not one" * 99,
        "half": GOOD[suffix]()[:-40],
        "archive": office.archive_bytes({"a.txt": "x"}),
        "json": b"[1, 2]",
    }[how]
    if (suffix, how) == (".xls", "half"):
        content = content[:5]
    with pytest.raises(DocumentError, match=rf"^/docs/a\{suffix}: a damaged (Pow|Ex|e-b|note)"):
        load(parser, suffix, content)


def test_archives_that_unpack_without_end_are_refused_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvrag.ingest.archives._MAX_UNPACKED_BYTES", 1 << 24)
    content = office.archive_bytes({f"{n}.xml": b" " * (1 << 21) for n in range(9)})
    assert len(content) < 100_000
    for suffix in (".pptx", ".xlsx", ".epub"):
        with pytest.raises(DocumentError, match=r"unpacks to 18,874,368 bytes, and at most 16,777"):
            next(load_bytes(f"/docs/a{suffix}", content))


_LAUGHS = "<!DOCTYPE x [<!ENTITY a 'ha'>" + "".join(
    f"<!ENTITY {name} '{f'&{before};' * 10}'>"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
_LEAK = "<!DOCTYPE x [<!ENTITY i SYSTEM 'file:///etc/passwd'>"


@pytest.mark.parametrize("doctype", [_LAUGHS + "]>", _LEAK + "]>"], ids=["laughs", "leak"])
@pytest.mark.parametrize(
    ("suffix", "inside", "before"),
    [
        (".pptx", "ppt/slides/slide1.xml", "The clock"),
        (".xlsx", "xl/worksheets/sheet1.xml", "late"),
        (".xlsx", "xl/workbook.xml", "Ships"),
        (".epub", "b/c.opf", "Varn by the sea"),
        (".epub", "b/b.xhtml", "It ticks."),
    ],
)
def test_entities_are_not_expanded(
    parser: Parser, suffix: str, inside: str, before: str, doctype: str
) -> None:
    good = zipfile.ZipFile(io.BytesIO(GOOD[suffix]()))
    files = {name: good.read(name) for name in good.namelist()}
    assert before in files[inside].decode()
    xml = files[inside].decode().replace(before, "&i;")
    declaration = re.match(r"(<\?xml[^>]*\?>)?(<!DOCTYPE html>)?\s*", xml)
    files[inside] = (declaration[1] or "").encode() + doctype.encode()
    files[inside] += xml[declaration.end() :].encode()
    text = ""
    with contextlib.suppress(DocumentError):  # as Word files with such a declaration
        text = load(parser, suffix, office.archive_bytes(files)).text
    assert "haha" not in text
    assert "root:" not in text
    assert len(text) < 2_000


def test_a_sheet_with_a_cell_at_the_far_end_is_one_cell(parser: Parser) -> None:
    text = load(parser, ".xlsx", office.far_xlsx_bytes()).text
    assert text == "## Sheet\n| far |\n| --- |"


def test_cells_are_as_they_are_shown(parser: Parser) -> None:
    """Numbers stay whole beside empty cells, and words stay that pandas takes for missing ones."""
    import openpyxl

    book: Any = openpyxl.Workbook()
    sheet = book.active
    for row in (
        ["n", None, "what", "when"],
        [3, None, "NA", datetime.datetime(2026, 1, 2)],
        [None, None, "a|b\nc", datetime.datetime(2026, 1, 2, 3, 4)],
        [2.5, None, True, "nan"],
    ):
        sheet.append(row)
    packed = io.BytesIO()
    book.save(packed)
    assert load(parser, ".xlsx", packed.getvalue()).text.splitlines()[1:] == [
        "| n | what | when |",
        "| --- | --- | --- |",
        "| 3 | NA | 2026-01-02 0:00:00 |",
        "|  | a\\|b c | 2026-01-02 3:04:00 |",
        "| 2.5 | TRUE | nan |",
    ]


@pytest.mark.parametrize("suffix", sorted(CONVERTED_SUFFIXES))
def test_without_the_extra_the_line_says_what_brings_it(
    suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = GOOD[suffix]()
    for library in ("markitdown", "openpyxl", "xlrd"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        DocumentError, match=r"a\.\w+: .*more libraries: pip install 'kvrag\[docs\]'$"
    ):
        next(load_bytes(f"/docs/a{suffix}", content))
