"""Documents made to hang, crash or fill whoever reads them."""

import functools
import io
import json
import zipfile
import zlib
from collections.abc import Iterator

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support import office
from tests.support.documents import docx_bytes

NO_TEXT_CODECS = (
    *("hex", "zlib", "base64", "bz2", "uu", "quopri", "rot13", "punycode", "undefined", "idna"),
    *("unicode_escape", "raw_unicode_escape", "mbcs", "oem", "utf-7", "utf-32", "martian"),
)
_DOCUMENT = (
    '<?xml version="1.0"?><w:document xmlns:w='
    '"http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>%s</w:body>'
    "</w:document>"
)
_PARAGRAPH = "<w:p><w:r><w:t>a</w:t></w:r></w:p>"
_SPAN = (
    '<w:tbl><w:tr><w:tc><w:tcPr><w:gridSpan w:val="100000000"/></w:tcPr>'
    f"{_PARAGRAPH}</w:tc></w:tr></w:tbl>"
)

_CELL = f"<w:tc><w:tcPr><w:vMerge/></w:tcPr>{_PARAGRAPH}</w:tc>"
_BELOW = f"<w:tr>{_CELL}{_CELL.replace(_PARAGRAPH, '<w:p/>') * 30}</w:tr>"


def make_docx(body: bytes, num_repeats: int = 1) -> bytes:
    """Return a Word file whose body is `body`, so many times."""
    before, after = (_DOCUMENT % "|").encode().split(b"|")
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("word/document.xml", "w", force_zip64=True) as file,
    ):
        file.write(before)
        for _ in range(num_repeats):
            file.write(body)
        file.write(after)
    return packed.getvalue()


def make_pdf(content: bytes, filters: str = "") -> bytes:
    """Return a PDF file with one page of this content stream."""
    objects = (
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
        b" /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d /Filter [%s] >>\nstream\n%b\nendstream"
        % (len(content), filters.encode(), content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    )
    made, places = b"%PDF-1.7\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(made))
        made += b"%d 0 obj\n%b\nendobj\n" % (number, one)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return (
        made
        + b"xref\n0 6\n0000000000 65535 f \n%btrailer\n<< /Size 6 /Root 1 0 R >>\n" % (table)
        + b"startxref\n%d\n%%%%EOF\n" % len(made)
    )


def make_bomb(unit: bytes, num_repeats: int, num_layers: int) -> bytes:
    """Return a PDF file whose content stream is packed several times over."""
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(unit) for _ in range(num_repeats)) + packer.flush()
    for _ in range(num_layers - 1):
        packed = zlib.compress(packed, 9)
    return make_pdf(packed, "/FlateDecode " * num_layers)


def make_known(scale: float = 1.0) -> dict[str, bytes]:
    """Return files that once stopped, hung or filled an ingestion, by name.

    Parameters
    ----------
    scale
        Of the sizes of the large ones; 1 for what was found at first.
    """
    many = int(scale * 30_000)
    operators = b"BT /F1 12 Tf (a) Tj ET\n" * 40_000
    files: dict[str, str | bytes] = {
        **{f"{name}.html": f'<meta charset="{name}"><p>text' for name in NO_TEXT_CODECS},
        "marked.html": "<![" * many,
        "comments.html": "<!--" * many,
        "svg.html": "<svg>" * many + "</q>" * many,
        "cdata.html": "<![CDATA[" * many,
        "deep.html": "<div>" * (5 * many) + "x",
        "fonts.html": "".join(f"<font size={i}>" for i in range(many // 10)) + "<p>x" * many,
        "inline.html": "a<b>b</b>" * many,
        "attributes.html": "<p " + " ".join(f"a{i}=1" for i in range(many)) + ">x",
        "deep400.jsonl": json.dumps({"text": "a", "deep": json.loads("[" * 400 + "]" * 400)}),
        "deep100000.jsonl": '{"text":"a","deep":' + "[" * 100_000 + "]" * 100_000 + "}",
        "digits.jsonl": '{"text":"a","n":' + "9" * 100_000 + "}",
        "digits-few.jsonl": '{"text":"a","n":' + "9" * 4_000 + "}",
        "nan.jsonl": '{"text":"a","m":NaN,"m":-Infinity,"n":1e999}',
        "half.jsonl": '{"text":"half \\ud800"}',
        "wide.jsonl": '{"text":"a","list":[' + "1," * 5 * many + "1]}",
        "rows.jsonl": '"a"\n' * (many // 10),
        "hashes.md": "# a" + " #" * many + "x",
        "spaces.md": "# a" + " " * 2 * many + "x",
        "dashes.md": "a\n" + "-" * 2 * many + "x",
        "fences.md": "```\n" * many,
        "title.md": "# " + "t" * many,
        "span.docx": make_docx(_SPAN.encode()),
        "paragraphs.docx": make_docx(_PARAGRAPH.encode() * 1000, int(scale * 400)),
        "gigabyte.docx": make_docx(b"<w:p/>" * 170_000, int(scale * 1024) + 280),
        "nested.docx": make_docx(b"<w:tbl><w:tr><w:tc>" * (many // 3)),
        "merged.docx": make_docx(f"<w:tbl>{_BELOW * (many // 10)}</w:tbl>".encode()),
        "spans.html": "<table><tr>"
        + "<td rowspan=65534 colspan=999>a" * (many // 10)
        + "<tr><td>b" * many,
        "tables.html": "<table><tr><td>a<td>" * 1_000 + "text " * 2 * many,
        "lists.html": "<ol><li>" * 1_500 + "<li>x<p>y" * many,
        "ruby.html": "<ruby>a<rt>b" * 2_000,
        "fronts.md": "---\na:\n" + "<!--\n<pre>\n" * many,
        "separators.csv": "a,b;c\td|e\n" * many + '"' * many,
        "merged.xlsx": office.merged_xlsx_bytes(many // 10),
        "newlines.pdf": make_bomb(b"\n" * (1 << 20), int(scale * 1024), 3),
        "operators.pdf": make_bomb(operators, int(scale * 20) + 1, 2),
        "field.csv": 'a,b\n"' + "x" * int(scale * 10_000_000) + '",1\n',
        "columns.csv": ",".join("c" * 10 * many) + "\n" + ",".join("1" * 10 * many),
        "short-rows.csv": ",".join("c" * many) + "\n" + "1\n" * (many // 10),
        "wide-names.csv": "n" * many + "\n" + "1\n" * many,
        "marks.txt": "a" + "\u0300\u0316" * many,
        "word.txt": "w" * 10 * many,
        "breaks.txt": "x\f" * many,
        "lines.txt": "\n \n" * many + "x",
        "nul.txt": "a\0b",
        "latin.txt": b"Z\xfcrich",
        "deep.epub": office.epub_bytes("<div>" * many + "x"),
        "table.epub": office.epub_bytes("<table><tr><td>" * (many // 3)),
        "cells.ipynb": '{"cells":[' + '{"cell_type":"code","source":"a"},' * many + "{}]}",
        "open.py": "(" * 10 * many,
        "deep.js": "{" * many,
        "assigned.js": "a=" * 3 * many,
        "here.rb": "<<A\n" * many,
        "conditions.c": "#if A\n" * many,
        "statements.js": "a;\n" * 10 * many,
        "names.py": f"class {'a' * 300}:\n  def {'b' * 300}():\n" + "    c()\n" * many,
        "source.ipynb": '{"cells":[{"cell_type":"markdown","source":{"a":1}}]}',
    }
    return {
        name: content if isinstance(content, bytes) else content.encode()
        for name, content in files.items()
    }


@functools.cache
def _good() -> dict[str, bytes]:
    """Return a good file of each kind, to be damaged."""
    page = (
        "<html><head><title>Varn</title></head><body><h1>Clock</h1><p>It <b>ticks</b>.</p>"
        "<ul><li>one<li>two</ul><table><tr><td>a<td>b</table><pre>x\n y</pre></body></html>"
    )
    rows = '{"text": "one", "metadata": {"a": [1, null]}}\n"two"\n'
    return {
        "txt": b"Ines keeps the harbour ledger of Varn.\n\nTomas repairs it.",
        "md": b"# Clock\n\nIt ticks.\n\n```\n# no\n```\n\nEnd\n---\n\n- a\n- b\n",
        "html": page.encode(),
        "jsonl": rows.encode(),
        "csv": b'ship,day\n"Ria, old",3\nVega,4,late\n',
        "pdf": make_pdf(b"BT /F1 12 Tf 72 700 Td (The clock of Varn ticks.) Tj ET"),
        "docx": docx_bytes(),
        "py": b"import a\n\n\n# c\n@d\nclass A:\n    def f(self):\n        return 1\n" * 9,
        "js": b"export class A { f() { return 1 } }\nconst g = (x) => { x }\n",
        "cpp": b"#ifdef A\nnamespace n {\nint A::f() { return 1; }\n}\n#endif\n",
        "pptx": office.pptx_bytes(),
        "xlsx": office.xlsx_bytes(),
        "xls": office.xls_bytes(),
        "epub": office.epub_bytes(),
        "ipynb": office.ipynb_bytes(),
    }


_PIECES = {
    "html": (
        *("<", ">", "<!--", "<![CDATA[", "<svg>", "</p>", "<table>", "&#x110000;", "&amp", "<p "),
    ),
    "md": ("# ", "#", "```", "~~~", "\n", "---", "===", "> ", "- ", " ", "\t", "[a]: "),
    "jsonl": ("{", "}", "[", "]", '"', ":", "\\ud800", "null", "1e999", "\n", '"text"', ","),
    "csv": (",", ";", '"', "\n", "\r", "a", "\t"),
    "txt": ("\x00", "\ufeff", "\u0301", "\u202e", "😀", " ", "\n", "\f", "<eos>", "a"),
}


@st.composite
def files(draw: st.DrawFn) -> tuple[str, bytes]:
    """A suffix and what a file of it might hold: damaged, of odd pieces, or noise."""
    kind = draw(st.sampled_from(sorted(_good())))
    how = draw(st.integers(0, 4))
    if how == 0:
        return kind, draw(st.binary(max_size=400))
    if how == 1 and kind in _PIECES:
        pieces = draw(st.lists(st.sampled_from(_PIECES[kind]), max_size=60))
        return kind, ("".join(pieces) * draw(st.sampled_from((1, 1, 1, 50)))).encode()
    if how == 2:
        return kind, draw(st.text(max_size=300)).encode("utf-8", "replace")
    content = bytearray(_good()[kind])
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(content)))
        match draw(st.integers(0, 3)):
            case 0 if place < len(content):
                content[place] = draw(st.integers(0, 255))
            case 1:
                del content[place : place + draw(st.integers(1, 100))]
            case 2:
                content[place:place] = draw(st.binary(max_size=20))
            case 3:
                content[place:place] = content[: draw(st.integers(1, 400))]
    return kind, bytes(content)


def make_files(number: int) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents, the same ones every time."""
    drawn: list[tuple[str, bytes]] = []

    @seed(15)
    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(files())
    def draw(file: tuple[str, bytes]) -> None:
        drawn.append(file)

    draw()
    for place, (kind, content) in enumerate(drawn):
        yield f"{place}.{kind}", content
