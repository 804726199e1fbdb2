"""PDF and Word files to text with its structure."""

from __future__ import annotations

import io
import logging
import warnings

from kvrag.errors import DocumentError

_PAGE_BREAK = "\f"


def pdf_to_text(path: str, content: bytes) -> tuple[str, str]:
    """Return the title and the text of a PDF file, its pages apart by form feeds.

    Raises
    ------
    DocumentError
        When it is damaged, encrypted, or has no text layer; or pypdf is not installed.
    """
    try:
        import pypdf
    except ImportError as error:
        raise _missing(path, "pypdf") from error
    # Its warnings about small defects of a file are of no use to who indexes a thousand.
    logger = logging.getLogger("pypdf")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        reader = pypdf.PdfReader(io.BytesIO(content))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError(f"{path}: the PDF is encrypted; remove its password first")
        pages = [page.extract_text() for page in reader.pages]
        title = str((reader.metadata and reader.metadata.title) or "").strip()
    except DocumentError:
        raise
    except Exception as error:  # whatever a parser of hostile files raises, the file is at fault
        raise _damaged(path, "PDF", error) from error
    finally:
        logger.setLevel(level)
    if not any(page.strip() for page in pages):
        raise DocumentError(
            f"{path}: the PDF has {len(pages)} pages but no text layer; run OCR over it first"
        )
    return title, _PAGE_BREAK.join(page.replace(_PAGE_BREAK, "\n") for page in pages)


def docx_to_text(path: str, content: bytes) -> tuple[str, str]:
    """Return the title and the text of a Word file: headings, paragraphs, table rows.

    Raises
    ------
    DocumentError
        When it is damaged, or python-docx is not installed.
    """
    try:
        import docx
        from docx.table import Table
    except ImportError as error:
        raise _missing(path, "python-docx") from error
    blocks: list[str] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # duplicate names inside the archive
            document = docx.Document(io.BytesIO(content))
        for item in document.iter_inner_content():
            if isinstance(item, Table):
                rows = (" | ".join(cell.text.strip() for cell in row.cells) for row in item.rows)
                blocks.append("\n".join(rows))
            elif item.text.strip():
                blocks.append(_heading_marks(item.style) + item.text.strip())
        title = (document.core_properties.title or "").strip()
    except Exception as error:  # whatever a parser of hostile files raises, the file is at fault
        raise _damaged(path, "Word file", error) from error
    return title, "\n\n".join(blocks)


def _heading_marks(style: object) -> str:
    name = str(getattr(style, "name", "") or "")
    if name == "Title":
        return "# "
    if name.startswith("Heading "):
        level = name.removeprefix("Heading ")
        return "#" * min(6, max(1, int(level) if level.isdecimal() else 1)) + " "
    return ""


def _missing(path: str, package: str) -> DocumentError:
    return DocumentError(f"{path}: reading it needs {package}: pip install 'kvrag[ingest]'")


def _damaged(path: str, kind: str, error: Exception) -> DocumentError:
    return DocumentError(f"{path}: a damaged {kind} ({type(error).__name__}: {error})")
