"""Word files as a reader of their last version sees them."""

import io
import re
import time
import zipfile
from collections.abc import Callable
from typing import Any

import pytest

from kvrag.errors import DocumentError
from kvrag.ingest.loaders import load_bytes
from tests.support.documents import docx_bytes, paragraph, run, word_bytes


def text_of(content: bytes) -> str:
    (document,) = load_bytes("/docs/a.docx", content)
    return document.text


def body_text(*blocks: str, **parts: str) -> str:
    return text_of(word_bytes("".join(blocks), parts))


def ruby(base: str, guide: str) -> str:
    return (
        f"<w:r><w:ruby><w:rt>{run(guide)}</w:rt><w:rubyBase>{run(base)}</w:rubyBase></w:ruby></w:r>"
    )


def test_moved_deleted_and_inserted_text_is_that_of_the_last_version() -> None:
    text = body_text(
        paragraph("Opening."),
        f"<w:p><w:moveFrom>{run('The fee is 40 euros.')}</w:moveFrom></w:p>",
        paragraph("Middle."),
        f"<w:p><w:moveTo>{run('The fee is 40 euros.')}</w:moveTo></w:p>",
        f"<w:p>{run('It is ')}<w:del><w:r><w:delText>not </w:delText></w:r>{run('never ')}</w:del>"
        f"<w:ins>{run('always ')}</w:ins>{run('due.')}</w:p>",
        # What a paragraph or run looked like before, and a mark between two that is gone.
        paragraph(run("seen", "<w:rPrChange><w:rPr><w:vanish/></w:rPr></w:rPrChange>")),
        paragraph("one ", "<w:rPr><w:del/></w:rPr>"),
        paragraph("paragraph"),
    )
    assert text.split("\n\n") == [
        *("Opening.", "Middle.", "The fee is 40 euros.", "It is always due.", "seen"),
        "one paragraph",
    ]


def test_text_goes_on_behind_a_comment_of_the_xml() -> None:
    equation = "<m:oMath><m:r><m:t>a<!-- of the XML -->b</m:t></m:r></m:oMath>"
    text = "<w:r><w:t>due in <!-- of the XML -->30 <?of the XML?>days, </w:t></w:r>"
    assert body_text(f"<w:p>{text}{equation}</w:p>") == "due in 30 days, ab"


def test_notes_follow_their_paragraph() -> None:
    def refer(kind: str, number: int) -> str:
        return f'<w:r><w:{kind}Reference w:id="{number}"/></w:r>'

    notes = (
        f'<w:footnote w:id="0" w:type="separator">{paragraph("")}</w:footnote>'
        f'<w:footnote w:id="2">{paragraph("Within 30 days.")}</w:footnote>'
        f'<w:footnote w:id="3">{paragraph("Or later.")}</w:footnote>'
    )
    text = body_text(
        paragraph(run("The deposit is refunded.") + refer("footnote", 2)),
        paragraph(run("In full.") + refer("endnote", 2) + refer("footnote", 3)),
        paragraph(run("End.") + refer("footnote", 9)),
        footnotes=notes,
        endnotes=f'<w:endnote w:id="2">{paragraph("See the lease.")}</w:endnote>',
    )
    assert text.split("\n\n") == [
        *("The deposit is refunded.[1]", "[1] Within 30 days."),
        *("In full.[i][2]", "[i] See the lease.", "[2] Or later.", "End."),
    ]
    # Without a relation that names them, as some programs write them.
    packed = io.BytesIO(word_bytes(paragraph(run("Due.") + refer("footnote", 2))))
    space = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    with zipfile.ZipFile(packed, "a") as archive:
        archive.writestr("word/footnotes.xml", f"<w:footnotes {space}>{notes}</w:footnotes>")
    assert text_of(packed.getvalue()) == "Due.[1]\n\n[1] Within 30 days."


def test_headers_come_first_and_footers_last_each_once() -> None:
    text = body_text(
        paragraph("Text."),
        header=paragraph("Lease of Varn"),
        header2=paragraph("Lease of Varn"),
        footer=paragraph("Page 1"),
        footer2=paragraph("- 2 -"),
    )
    assert text == "Lease of Varn\n\nText.\n\nPage 1"


def sign(text: str) -> str:
    return f"<m:r><m:t>{text}</m:t></m:r>"


def brackets(properties: str, *parts: str) -> str:
    inside = "".join(f"<m:e>{part}</m:e>" for part in parts)
    return f"<m:d><m:dPr>{properties}</m:dPr>{inside}</m:d>"


BARS = "<m:begChr m:val='|'/><m:endChr m:val='|'/>"


@pytest.mark.parametrize(
    ("equation", "text"),
    [
        (sign("A=πr2"), "A=πr2"),
        (f"<m:sSup><m:e>{sign('r')}</m:e><m:sup>{sign('2')}</m:sup></m:sSup>", "r^2"),
        (f"<m:f><m:num>{sign('a+b')}</m:num><m:den>{sign('2')}</m:den></m:f>", "(a+b)/2"),
        (f"<m:rad><m:radPr/><m:deg/><m:e>{sign('x+1')}</m:e></m:rad>", "√(x+1)"),
        (
            f"<m:nary><m:naryPr><m:chr m:val='∑'/></m:naryPr><m:sub>{sign('i=1')}</m:sub><m:sup/>"
            f"<m:e>{sign('i')}</m:e></m:nary>",
            "∑_(i=1) i",
        ),
        (brackets("<m:sepChr m:val=';'/>", sign("0"), sign("1")), "(0;1)"),
        (brackets("", sign("A"), brackets(BARS, sign("B"))), "(A||B|)"),
        (brackets("<m:begChr m:val='['/><m:endChr m:val=']'/>", sign("0,1")), "[0,1]"),
    ],
)
def test_equations_stand_in_their_sentence(equation: str, text: str) -> None:
    content = run("The area is ") + f"<m:oMath>{equation}</m:oMath>" + run(" square metres.")
    assert body_text(paragraph(content)) == f"The area is {text} square metres."


_NUMBERING = """
<w:abstractNum w:abstractNumId="0">
 <w:lvl w:ilvl="0"><w:start w:val="1"/><w:numFmt w:val="decimal"/><w:lvlText w:val="%1."/></w:lvl>
 <w:lvl w:ilvl="1"><w:start w:val="1"/><w:numFmt w:val="lowerLetter"/>
  <w:lvlText w:val="(%2)"/></w:lvl>
</w:abstractNum>
<w:abstractNum w:abstractNumId="1">
 <w:lvl w:ilvl="0"><w:start w:val="1"/><w:numFmt w:val="decimal"/><w:lvlText w:val="Article %1"/>
  <w:pStyle w:val="H1"/></w:lvl>
 <w:lvl w:ilvl="1"><w:start w:val="1"/><w:numFmt w:val="decimal"/><w:lvlText w:val="%1.%2"/>
  <w:pStyle w:val="H2"/></w:lvl>
</w:abstractNum>
<w:abstractNum w:abstractNumId="2">
 <w:lvl w:ilvl="0"><w:numFmt w:val="bullet"/><w:lvlText w:val="&#xF0B7;"/></w:lvl>
</w:abstractNum>
<w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num>
<w:num w:numId="2"><w:abstractNumId w:val="1"/></w:num>
<w:num w:numId="3"><w:abstractNumId w:val="2"/></w:num>
<w:num w:numId="4"><w:abstractNumId w:val="0"/>
 <w:lvlOverride w:ilvl="0"><w:startOverride w:val="7"/></w:lvlOverride></w:num>
"""
_STYLES = """
<w:style w:type="paragraph" w:styleId="H1"><w:name w:val="heading 1"/>
 <w:pPr><w:numPr><w:numId w:val="2"/></w:numPr></w:pPr></w:style>
<w:style w:type="paragraph" w:styleId="H2"><w:name w:val="heading 2"/>
 <w:basedOn w:val="H1"/></w:style>
<w:style w:type="paragraph" w:styleId="Own"><w:name w:val="Clause"/>
 <w:basedOn w:val="H2"/></w:style>
<w:style w:type="paragraph" w:styleId="Out"><w:name w:val="Part"/>
 <w:pPr><w:outlineLvl w:val="2"/></w:pPr></w:style>
<w:style w:type="paragraph" w:styleId="List"><w:name w:val="List Number"/>
 <w:pPr><w:numPr><w:numId w:val="1"/></w:numPr></w:pPr></w:style>
<w:style w:type="character" w:styleId="Secret"><w:name w:val="Secret"/>
 <w:rPr><w:vanish/></w:rPr></w:style>
"""


def item(text: str, number: int, depth: int = 0) -> str:
    properties = f'<w:numPr><w:ilvl w:val="{depth}"/><w:numId w:val="{number}"/></w:numPr>'
    return paragraph(text, properties)


def test_lists_and_headings_have_the_numbers_that_word_shows() -> None:
    def styled(text: str, style: str) -> str:
        return paragraph(text, f'<w:pStyle w:val="{style}"/>')

    text = body_text(
        styled("Rent", "H1"),
        styled("When", "H2"),
        styled("Turn off the gas.", "List"),
        item("the main valve", 1, 1),
        item("the other", 1, 1),
        item("Leave.", 1),
        paragraph("Between."),
        item("a bullet", 3),
        # Another list in between: this one goes on.
        item("Come back.", 1),
        item("again", 1, 1),
        item("from seven", 4),
        item("none", 0),
        styled("Where", "Own"),
        styled("Deposit", "H1"),
        styled("How much", "H2"),
        styled("Part", "Out"),
        numbering=_NUMBERING,
        styles=_STYLES,
    )
    assert text.split("\n\n") == [
        *("# Article 1 Rent", "## 1.1 When"),
        "1. Turn off the gas.\n  (a) the main valve\n  (b) the other\n2. Leave.",
        "Between.",
        "- a bullet\n3. Come back.\n  (a) again\n7. from seven",
        *("none", "## Article 2 Where", "# Article 3 Deposit", "## 3.1 How much", "### Part"),
    ]


def test_a_list_at_the_end_is_read_everywhere() -> None:
    numbering = """<w:abstractNum w:abstractNumId="0">
      <w:lvl w:ilvl="0"><w:numFmt w:val="upperRoman"/><w:lvlText w:val="%1."/></w:lvl>
      <w:lvl w:ilvl="1"><w:numFmt w:val="decimal"/><w:isLgl/><w:lvlText w:val="%1.%2"/></w:lvl>
    </w:abstractNum><w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num>"""
    note = f'<w:footnote w:id="2">{item("noted", 1)}</w:footnote>'
    text = body_text(
        paragraph(run("Off.") + '<w:r><w:footnoteReference w:id="2"/></w:r>'),
        item("gas", 1),
        item("valve", 1, 1),
        numbering=numbering,
        footnotes=note,
        header=item("head", 1),
    )
    assert text.split("\n\n") == ["I. head", "Off.[1]", "[1] I. noted", "I. gas\n  1.1 valve"]


def test_a_phonetic_guide_is_beside_its_word() -> None:
    text = body_text(paragraph(run("私は") + ruby("東京", "とうきょう") + run("に行く。")))
    assert text == "私は東京(とうきょう)に行く。"


def test_hidden_text_is_left_out() -> None:
    text = body_text(
        paragraph(
            run("Hidden. ", "<w:vanish/>")
            + run("Styled. ", '<w:rStyle w:val="Secret"/>')
            + run("Seen. ", '<w:vanish w:val="0"/>')
            + run("Too.", "<w:webHidden/>")
            + "<w:r><w:rPr><w:vanish/></w:rPr><w:txbxContent><w:p><m:oMath>"
            + brackets("", sign("x"))
            + "</m:oMath></w:p></w:txbxContent></w:r>"
        ),
        # Of a paragraph's mark alone.
        paragraph("The rest.", "<w:rPr><w:vanish/></w:rPr>"),
        styles=_STYLES,
    )
    assert text == "Seen. Too.\n\nThe rest."


def test_cells_stand_under_their_columns() -> None:
    def cell(text: str, properties: str = "") -> str:
        return f"<w:tc><w:tcPr>{properties}</w:tcPr>{paragraph(text)}</w:tc>"

    below, first = "<w:vMerge/>", '<w:vMerge w:val="restart"/>'
    span, before = '<w:gridSpan w:val="2"/>', '<w:trPr><w:gridBefore w:val="1"/></w:trPr>'
    rows = (
        before + cell("2022") + cell("2023"),
        cell("EU", first) + cell("Cable") + cell("12"),
        cell("", below) + cell("Hub") + cell("7"),
        cell("Total", span) + cell("19"),
        f"<w:tc>{paragraph('no properties')}</w:tc>" + cell("") + cell("x"),
    )
    table = "<w:tbl>" + "".join(f"<w:tr>{row}</w:tr>" for row in rows) + "</w:tbl>"
    assert body_text(table).split("\n") == [
        *("| 2022 | 2023", "EU | Cable | 12", "EU | Hub | 7", "Total |  | 19"),
        "no properties |  | x",
    ]


def rewritten(edit: Callable[[str, bytes], tuple[str, bytes]]) -> bytes:
    """Return a Word file with other names and contents of its parts."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(docx_bytes())) as old, zipfile.ZipFile(packed, "w") as new:
        for part in old.namelist():
            info = zipfile.ZipInfo("x")
            info.filename, content = edit(part, old.read(part))
            new.writestr(info, content)
    return packed.getvalue()


def test_parts_are_found_by_their_relations_whatever_their_names() -> None:
    expected = text_of(docx_bytes())
    for before, after in (
        ("word/document.xml", "word/document2.xml"),
        ("word/document.xml", "word/Document.XML"),
        ("word/", "office/"),
    ):

        def renamed(part: str, content: bytes, old: str = before, new: str = after) -> Any:
            names_parts = part.startswith(("_rels", "[Content"))
            content = content.replace(old.encode(), new.encode()) if names_parts else content
            return part.replace(old, new), content

        assert text_of(rewritten(renamed)) == expected
    content = rewritten(lambda part, content: (part.replace("/", "\\"), content))
    assert b"word\\document.xml" in content
    assert text_of(content) == expected


def test_files_of_the_strict_form_are_read() -> None:
    usual = b"http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    strict = b"http://purl.oclc.org/ooxml/wordprocessingml/main"
    content = rewritten(lambda part, content: (part, content.replace(usual, strict)))
    assert text_of(content) == text_of(docx_bytes())


OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.docx", OLE, r"an old Word file \(\.doc\).*save it as \.docx$"),
        ("a.xlsx", OLE, r"an old Excel file \(\.xls\).*save it as \.xlsx, or name it \.xls$"),
        ("a.pptx", OLE, r"an old PowerPoint file \(\.ppt\).*save it as \.pptx$"),
        ("a.docx", OLE + "EncryptedPackage".encode("utf-16-le"), "is encrypted; remove its passw"),
        ("a.docx", rb"{\rtf1 Varn}", "no Word file but RTF; open it and save it as .docx"),
        ("a.xls", b"\n<html><table><tr><td>a", "no Excel file but HTML or XML; name it .html"),
        ("a.docx", b"%PDF-1.7\n", "no Word file but PDF; name it .pdf"),
    ],
)
def test_a_file_of_another_kind_is_named_as_that(name: str, content: bytes, message: str) -> None:
    with pytest.raises(DocumentError, match=rf"^/docs/{re.escape(name)}: .*{message}"):
        list(load_bytes(f"/docs/{name}", content))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["depths", "styles", "equations", "notes", "markers", "spans"])
def test_a_file_that_names_the_same_again_and_again_costs_what_its_text_does(kind: str) -> None:
    place = '<w:numPr><w:ilvl w:val="{}"/><w:numId w:val="1"/></w:numPr>'
    equation = "<m:oMath><m:r><m:t>x</m:t></m:r></m:oMath>"
    styled = [paragraph("x", f'<w:pStyle w:val="s{6_000 - i % 3_000}"/>') for i in range(6_000)]
    cell = "<w:tc><w:tcPr><w:vMerge/></w:tcPr><w:p/></w:tc>"
    row = f"<w:tr>{cell * 50}{cell.replace('<w:p/>', paragraph('x'))}</w:tr>"
    blocks, part = {
        "depths": ([paragraph("x", place.format(i)) for i in range(5_000)], _NUMBERING),
        "styles": (
            styled,
            "".join(
                f'<w:style w:styleId="s{i}"><w:basedOn w:val="s{i - 1}"/></w:style>'
                for i in range(6_001)
            ),
        ),
        "equations": ([paragraph(equation * 30_000)], ""),
        "notes": (
            [paragraph('<w:r><w:footnoteReference w:id="2"/></w:r>')] * 5_000,
            f'<w:footnote w:id="2">{paragraph("n" * 100_000)}</w:footnote>',
        ),
        "spans": ([f"<w:tbl>{row * 300}</w:tbl>"], ""),
        "markers": ([item("x", 1)] * 5_000, _NUMBERING.replace("%1.", "%1x" * 20_000)),
    }[kind]
    name = {"styles": "styles", "notes": "footnotes"}.get(kind, "numbering")
    started = time.process_time()
    assert len(body_text(*blocks, **{name: part})) < 2_000_000
    assert time.process_time() - started < 6
