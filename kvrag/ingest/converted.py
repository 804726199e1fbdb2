"""Slides and notebooks to Markdown, converted by markitdown, and spreadsheets.

Each file goes straight to the converter of its kind. markitdown's front door would also guess what
a file is with a neural network, and load plugins.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from kvrag.chunk import PAGE_BREAK
from kvrag.errors import DocumentError
from kvrag.ingest.archives import check_archive, check_kind, damaged
from kvrag.ingest.spreadsheets import sheets_to_text, xls_sheets, xlsx_sheets

_KINDS = {
    ".pptx": "PowerPoint file",
    ".xlsx": "Excel file",
    ".xls": "Excel file",
    ".ipynb": "notebook",
}
_CONVERTERS = {
    ".pptx": "PptxConverter",
    ".ipynb": "IpynbConverter",
}
_SHEETS = {".xlsx": xlsx_sheets, ".xls": xls_sheets}
CONVERTED_SUFFIXES = frozenset(_KINDS)
"""The suffixes of the files that `converted_to_text` reads."""

_ARCHIVES = frozenset({".pptx", ".xlsx"})
_SLIDE = re.compile(r"^<!-- Slide number: \d+ -->$", re.MULTILINE)


def converted_to_text(path: str, content: bytes) -> tuple[str, str]:
    """Return the title and the text of a file as Markdown.

    Slides are separated by form feeds, as pages are. A spreadsheet becomes a table under the
    name of each sheet.

    Parameters
    ----------
    path, content
        The file's path, which ends in one of `CONVERTED_SUFFIXES`, and its bytes.

    Raises
    ------
    DocumentError
        When it is damaged or unpacks to more than 256 MiB, or markitdown is not installed.
    """
    suffix = Path(path).suffix.lower()
    kind = _KINDS[suffix]
    if suffix in _ARCHIVES:
        check_archive(path, kind, content)
    elif suffix == ".xls":
        check_kind(path, kind, content)
    try:
        if suffix in _SHEETS:
            return "", sheets_to_text(_SHEETS[suffix](content))
        from markitdown import MissingDependencyException, StreamInfo, converters

        try:
            converter = getattr(converters, _CONVERTERS[suffix])()
            result = converter.convert(io.BytesIO(content), StreamInfo())
        except MissingDependencyException as error:
            raise _missing(path) from error
    except (MemoryError, DocumentError):  # at the limit: the process says so
        raise
    except ImportError as error:
        raise _missing(path) from error
    except Exception as error:  # any error of a library means that the file is bad
        raise damaged(path, kind, error) from error
    text = result.markdown.replace(PAGE_BREAK, "\n")
    if suffix == ".pptx":
        text = PAGE_BREAK.join(_SLIDE.split(text)[1:])
    return str(result.title or "").strip(), text


def _missing(path: str) -> DocumentError:
    return DocumentError(f"{path}: reading it needs more libraries: pip install 'kvrag[docs]'")
