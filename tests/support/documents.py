"""Word files for tests."""

import io
import zipfile
from collections.abc import Mapping
from typing import Any


def docx_bytes() -> bytes:
    """Return a Word file with headings, a paragraph, a table and a merged cell."""
    import docx

    document: Any = docx.Document()
    document.core_properties.title = "Varn by the sea"
    document.add_heading("Varn", 0)
    document.add_heading("The clock", 1)
    paragraph = document.add_paragraph("It\tticks")
    paragraph.add_run(" loudly.").bold = True
    table = document.add_table(2, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "ship", "day\nof arrival"
    table.cell(1, 0).merge(table.cell(1, 1)).text = "Ria"
    table.cell(0, 1).add_table(1, 1).cell(0, 0).text = "inner"
    packed = io.BytesIO()
    document.save(packed)
    return packed.getvalue()


_NAMESPACES = (
    'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main" '
    'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
)
_RELATION = '<Relationship Id="r{number}" Type="http://x/{kind}" Target="{target}"/>'


def run(text: str, properties: str = "") -> str:
    """Return a run of a Word paragraph."""
    return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


def paragraph(content: str, properties: str = "") -> str:
    """Return a Word paragraph of runs, or of a text."""
    content = content if content.startswith("<") else run(content)
    return f"<w:p><w:pPr>{properties}</w:pPr>{content}</w:p>"


def word_bytes(
    body: str, parts: Mapping[str, str] | None = None, main: str = "word/document.xml"
) -> bytes:
    """Return a Word file: its body, and other parts by kind, as that of their root element.

    A kind may be repeated with a number: "header", "header2".
    """
    packed = io.BytesIO()
    relations = []
    roots = {"footnotes": "footnotes", "endnotes": "endnotes", "header": "hdr", "footer": "ftr"}
    with zipfile.ZipFile(packed, "w") as archive:
        target = _RELATION.format(number=1, kind="officeDocument", target=main)
        archive.writestr("_rels/.rels", f"<Relationships>{target}</Relationships>")
        content = f"<w:document {_NAMESPACES}><w:body>{body}</w:body></w:document>"
        archive.writestr(main, content)
        folder, _, base = main.rpartition("/")
        for number, (name, part) in enumerate((parts or {}).items()):
            kind = name.rstrip("0123456789")
            root = roots.get(kind, kind)
            archive.writestr(f"{folder}/{name}.xml", f"<w:{root} {_NAMESPACES}>{part}</w:{root}>")
            relations.append(_RELATION.format(number=number, kind=kind, target=f"{name}.xml"))
        archive.writestr(
            f"{folder}/_rels/{base}.rels", f"<Relationships>{''.join(relations)}</Relationships>"
        )
    return packed.getvalue()
