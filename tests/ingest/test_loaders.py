"""Every kind of file, and every way in which one can be bad."""

import io
import json
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrag.chunk import Document
from kvrag.errors import DocumentError, ParameterError
from kvrag.ingest.converted import join_words
from kvrag.ingest.files import find_files
from kvrag.ingest.filters import plain_metadata
from kvrag.ingest.html import html_to_text
from kvrag.ingest.loaders import SUFFIXES, load_bytes, to_document
from tests.ingest.hostile import NO_TEXT_CODECS, make_docx, make_pdf
from tests.support.documents import docx_bytes


def load(name: str, content: bytes) -> list[Document]:
    return list(load_bytes(f"/docs/{name}", content))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_marked_encodings_are_read(encoding: str) -> None:
    text = "Zürich, 東京"
    assert load("a.txt", text.encode(encoding)) == [Document("/docs/a.txt", text)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("Zürich".encode("latin-1"), r"not valid utf-8 at byte 1 \(0xfc\).*iconv"),
        ("Zürich".encode("utf-16")[:-1], "not valid utf-16"),
        ("Varn".encode("utf-16-le"), "NUL characters"),
        (b"", "the file is empty"),
        (b" \n\t\n", "holds no text"),
    ],
)
def test_text_that_cannot_be_read_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        load("a.txt", content)


@pytest.mark.parametrize("name", ["a.exe", "README"])
def test_unknown_kinds_are_refused(name: str) -> None:
    with pytest.raises(DocumentError, match=r"are not read; expected one of .*\.pdf"):
        load(name, b"text")


def test_html_is_read_in_the_encoding_it_declares() -> None:
    for declared, written, text in (
        ("iso-8859-1", "latin-1", "Zürich"),
        ("latin1", "cp1252", "\u201cVarn\u201d"),  # on the web that name means this one
        ("utf-16", "utf-8", "Zürich"),
        ("Shift_JIS", "shift_jis", "東京"),
    ):
        markup = f'<meta charset="{declared}"><p>{text}</p>'
        assert load("a.html", markup.encode(written))[0].text == text


@pytest.mark.parametrize(
    "name",
    NO_TEXT_CODECS,
)
def test_only_encodings_of_the_web_are_known(name: str) -> None:
    with pytest.raises(DocumentError, match=f"/docs/a.html: declares '{name}', an unknown enc"):
        load("a.html", f'<meta charset="{name}"><p>x</p>'.encode())


def test_markup_nested_without_end_is_refused() -> None:
    assert html_to_text("a.html", "<div>" * 4_000 + "x")[1] == "x"
    with pytest.raises(DocumentError, match=r"a\.html: elements are nested more than 5,000 deep"):
        html_to_text("a.html", "<div>" * 200_000 + "x")


def test_jsonl_rows_are_documents() -> None:
    rows = [
        {"text": "first\u2028line", "id": 7, "metadata": {"lang": "en"}},
        {"page_content": "second", "tags": ["a"]},
        "third",
    ]
    content = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()
    content += b'\n{"text": " "}\n""'  # rows without text are left out
    assert load("a.jsonl", content) == [
        Document("/docs/a.jsonl#1", "first\u2028line", {"id": 7, "lang": "en"}),
        Document("/docs/a.jsonl#3", "second", {"tags": ["a"]}),
        Document("/docs/a.jsonl#5", "third"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text"', "line 2: not JSON"),
        (b'{"name": "a"}', "line 1: expected an object with its text under one of text"),
        (b"[1]", "line 1: expected an object"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b'{"text":"a","x":' + b"[" * 400 + b"]" * 400 + b"}", "line 1: the metadata is nested"),
        (b'{"text":"a","x":' + b"9" * 5000 + b"}", "line 1: not JSON"),
    ],
)
def test_bad_jsonl_names_the_line(content: bytes, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        load("a.jsonl", content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'ship,day\n"Ria, old",3\n,\nVega,4,late\n'),
        ("a.csv", 'ship;day\r\n"Ria, old";3\r\n;\r\nVega;4;late\r\n'),
        ("a.tsv", 'ship\tday\n"Ria, old"\t3\n\t\nVega\t4\tlate\n'),
    ],
)
def test_csv_rows_are_documents(name: str, content: str) -> None:
    path = f"/docs/{name}"
    assert load(name, content.encode()) == [
        Document(f"{path}#1", "ship: Ria, old\nday: 3", {"row": 1}),
        Document(f"{path}#3", "ship: Vega\nday: 4\ncolumn 3: late", {"row": 3}),
    ]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        # The separator is the one that cuts the rows alike, whatever the first line holds.
        ("a.tsv", "Name\tTown, county, code\nAda\tRiga\n", "Name: Ada\nTown, county, code: Riga"),
        ("a.tsv", "Town, x\tB, y\nRiga, z\tC, w\n", "Town, x: Riga, z\nB, y: C, w"),
        ("a.tsv", "Name,Town\nAda,Riga\n", "Name: Ada\nTown: Riga"),
        ("a.csv", "Name, a;Name, b;Age\nAda;Byron;36\n", "Name, a: Ada\nName, b: Byron\nAge: 36"),
        ("a.csv", "Town, x;B, y\nRiga, z;C, w\n", "Town, x: Riga, z\nB, y: C, w"),
        ("a.csv", "day, month, year\n2, May, 2024\n", "day: 2\nmonth: May\nyear: 2024"),
        ("a.csv", "x;y\n1,5;2,5\n", "x: 1,5\ny: 2,5"),
        ("a.csv", "a|b\n1,2|3\n", "a: 1,2\nb: 3"),
        ("a.csv", "a;b\n;\n\n1,2;3,4\n", "a: 1,2\nb: 3,4"),
        # Quotes count, also over lines.
        ("a.csv", '"City, State";Pop\n"Riga, LV";600\n', "City, State: Riga, LV\nPop: 600"),
        ("a.csv", 'a;b\n"x, y,\nz, w";2\n', "a: x, y,\nz, w\nb: 2"),
        # Excel's own line.
        ("a.csv", "sep=;\nName, x;Town\nAda;Riga\n", "Name, x: Ada\nTown: Riga"),
        ("a.csv", "\ufeffSEP=|\r\nName|Town\r\nAda|Riga\r\n", "Name: Ada\nTown: Riga"),
        ("a.csv", "sep=\t\nName\tTown\nAda\tRiga", "Name: Ada\nTown: Riga"),
        # An empty corner is no name.
        ("a.csv", ",2022\nRevenue,11\n", "column 1: Revenue\n2022: 11"),
        ("a.csv", "word\nship\n", "word: ship"),
        # A single column of decimals, of sentences; a line above the table; no name for a row's.
        ("a.csv", "Preis\n1,50\n", "Preis: 1,50"),
        ("a.csv", "said\nOnce, twice, thrice.\n", "said: Once, twice, thrice."),
        ("a.tsv", "said\nOne; two\n", "said: One; two"),
        ("a.csv", "Varn\na;b;c\n1;2,5;3\n", "Varn: 1\ncolumn 2: 2,5\ncolumn 3: 3"),
        ("a.csv", '"x"\n"0",4\n"1",5\n', "x: 1\ncolumn 2: 5"),
    ],
)
def test_the_separator_is_that_of_the_file(name: str, content: str, text: str) -> None:
    *_, document = load(name, content.encode())
    assert document.text == text


def test_the_separator_of_a_long_file_is_that_of_its_first_rows() -> None:
    rows = [f'"town, {number}";b, {number}' for number in range(20_000)]
    documents = load("a.csv", "\n".join(["Town, x;B, y", *rows]).encode())
    assert documents[-1].text == "Town, x: town, 19999\nB, y: b, 19999"
    long_cell = ('a;b\n"' + "x, " * 100_000 + '";2\n').encode()
    assert load("a.csv", long_cell)[0].text.endswith("\nb: 2")
    assert load("a.csv", long_cell.replace(b"x", "\u2028".encode()))[0].text.endswith("\nb: 2")


def test_bad_csv_names_the_line() -> None:
    with pytest.raises(DocumentError, match="line 2"):
        load("a.csv", b'a,b\n"x" y,1\n')


def test_hidden_files_other_kinds_and_the_index_are_not_found(docs: Path) -> None:
    (docs / ".hidden.txt").write_text("x")
    (docs / ".git").mkdir()
    (docs / ".git" / "x.txt").write_text("x")
    (docs / "photo.png").write_bytes(b"x")
    (docs / "index").mkdir()
    (docs / "index" / "x.txt").write_text("x")
    (docs / "loop").symlink_to(docs)
    found = find_files(docs, docs / "index", SUFFIXES).files
    found = [Path(path).relative_to(docs).as_posix() for path in found]
    assert found == ["clock.md", "ledger.txt", "deep/fox.txt"]


@dataclass
class PageContent:
    """The shape of a LangChain Document."""

    page_content: str
    metadata: dict[str, Any] = field(default_factory=dict)
    id: str | None = None


def test_an_object_without_an_id_is_named_by_its_content() -> None:
    first = to_document(PageContent("text", {"source": "book"}))
    assert first.source.startswith("book#")
    assert first == to_document(PageContent("text", {"source": "book"}))
    assert first.source != to_document(PageContent("other", {"source": "book"})).source


def test_objects_of_other_shapes_are_refused() -> None:
    with pytest.raises(ParameterError, match="cannot ingest a value of type dict"):
        to_document({"text": "x"})
    with pytest.raises(DocumentError, match="x: holds no text"):
        to_document(Document("x", "  "))


def test_metadata_becomes_plain_json() -> None:
    for given, plain in (
        ({"path": Path("/a")}, {"path": "/a"}),
        ({1: np.float32(0.5)}, {"1": 0.5}),
        ({"nan": float("nan"), "set": {3}}, {"nan": "nan", "set": [3]}),
        ({"deep": {"x": (1, None, True)}}, {"deep": {"x": [1, None, True]}}),
        ({"big": 1 << 70, "bytes": b"\xff"}, {"big": hex(1 << 70), "bytes": "b'\\xff'"}),
        ({"half": "\ud800", "key \udce9": Path("/\udce9")}, {"half": "?", "key ?": "/?"}),
    ):
        assert plain_metadata(given) == plain


def test_word_files_keep_their_structure() -> None:
    (document,) = load("a.docx", docx_bytes())
    assert document.text == (
        "# Varn\n\n# The clock\n\nIt\tticks loudly.\n\nship | day of arrival inner\nRia"
    )
    assert document.metadata == {"title": "Varn by the sea"}


def test_word_files_cost_what_their_text_does() -> None:
    started = time.process_time()
    paragraphs = make_docx(b"<w:p><w:r><w:t>a</w:t></w:r></w:p>" * 1000, 50)
    assert load("a.docx", paragraphs)[0].text == "\n\n".join("a" * 50_000)
    assert time.process_time() - started < 5
    with pytest.raises(DocumentError, match=r"unpacks to 2\d\d,000,\d+ bytes, and at most"):
        load("a.docx", make_docx(b" " * 1_000_000, 270))


def test_word_files_with_entities_are_refused() -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("word/document.xml", '<!DOCTYPE x [<!ENTITY a "aa">]><x>&a;</x>')
    with pytest.raises(DocumentError, match=r"damaged Word.*type declaration of 'x'"):
        load("a.docx", packed.getvalue())


def pdf_text(*lines: str) -> str:
    shown = " 0 -14 Td ".join(f"({line}) Tj" for line in lines)
    (document,) = load("a.pdf", make_pdf(f"BT /F1 12 Tf 72 700 Td {shown} ET".encode("latin-1")))
    return document.text


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (("the har-", "bour"), "the harbour"),
        (("the har-", "bour of the Har-", "bour Office"), "the harbour of the Harbour Office"),
        # A hyphen that belongs to the word stays, whichever way the document tells it.
        (("well known. A well-", "known clock"), "well known. A well-known clock"),
        (("a well-known clock, well-", "known"), "a well-known clock, well-known"),
        (("state-of-", "the-art"), "state-of-the-art"),
        (
            ("the A-", "Level non-", "British COVID-", "positive"),
            "the A-Level non-British COVID-positive",
        ),
        (("Haupt-", "und Nebeneingang"), "Haupt- und Nebeneingang"),
        (("INTRO-", "DUCTION. The introduction"), "INTRODUCTION. The introduction"),
        (("from 12-", "34 mid-", "1990s"), "from 12-34 mid-1990s"),
        (("no cut -", "here"), "no cut -\nhere"),
    ],
)
def test_words_that_a_pdf_line_cuts_are_whole(lines: tuple[str, ...], text: str) -> None:
    assert pdf_text(*lines) == text


def test_pdf_words_have_letters_for_ligatures_and_no_soft_hyphens() -> None:
    text = (
        "e\ufb03cient \ufb01\ufb02e so\u00adft har\u00ad\nbour har\u00ad\ufffebour har\u2010\nbour"
    )
    assert join_words(text) == "efficient fifle soft harbour harbour harbour"
    assert join_words("har\u00ad\n\f\nbour") == "har\f\nbour"  # on the next page
    started = time.process_time()
    join_words("w" * 1_000_000 + "a-\n" * 200_000)
    assert time.process_time() - started < 5
