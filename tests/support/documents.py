"""Word files for tests."""

from __future__ import annotations

import io
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
