"""PDF and Word files to text with its structure."""

from __future__ import annotations

import functools
import io
import zipfile
from collections.abc import Iterator

from kvrag.errors import DocumentError

PAGE_BREAK = "\f"
"""Loaders put it between the pages of a document; chunks record the page on which they begin."""
# PDFium's characters for a hyphen at a line's end, where it joins the two lines.
_LINE_END_HYPHENS = ("\ufffe", "\x02")

_MAX_UNPACKED_BYTES = 256 << 20
_MAX_STYLE_BYTES = 16 << 20
_PIECE_BYTES = 1 << 16
_WORD = frozenset(
    {
        "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}",
        "{http://purl.oclc.org/ooxml/wordprocessingml/main}",
    }
)
_TITLE = "{http://purl.org/dc/elements/1.1/}title"
# A second copy of the same text, for readers that do not know the first form.
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
_MARKS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}


def pdf_to_text(path: str, content: bytes) -> tuple[str, str]:
    """Return the title and the text of a PDF file, with form feeds between pages.

    Raises
    ------
    DocumentError
        When it is damaged, encrypted, or has no text layer; or pypdfium2 is not installed.
    """
    try:
        import pypdfium2
    except ImportError as error:
        raise DocumentError(
            f"{path}: reading it needs pypdfium2: pip install 'kvrag[ingest]'"
        ) from error
    try:
        document = pypdfium2.PdfDocument(content)
        pages = [_page_text(page) for page in _pages(document)]
        title = document.get_metadata_value("Title").strip()
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise DocumentError(
                f"{path}: the PDF is encrypted; remove its password first"
            ) from error
        raise damaged(path, "PDF", error) from error
    if not any(page.strip() for page in pages):
        raise DocumentError(
            f"{path}: the PDF has {len(pages)} pages but no text layer; run OCR over it first"
        )
    return title, PAGE_BREAK.join(pages)


def _pages(document: object) -> Iterator[object]:
    for number in range(len(document)):  # type: ignore[arg-type]
        page = document[number]  # type: ignore[index]
        yield page
        page.close()


def _page_text(page: object) -> str:
    text_page = page.get_textpage()  # type: ignore[attr-defined]
    text: str = text_page.get_text_range()
    text_page.close()
    for hyphen in _LINE_END_HYPHENS:
        text = text.replace(hyphen, "-\n")
    return text.replace("\r\n", "\n").replace(PAGE_BREAK, "\n")


def docx_to_text(path: str, content: bytes) -> tuple[str, str]:
    """Return the title and the text of a Word file: headings, paragraphs, table rows.

    The XML is read as a stream: a document of a million paragraphs, or a cell that spans a
    million columns, costs no more than its text.

    Raises
    ------
    DocumentError
        When it is damaged, or unpacks to more than 256 MiB.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            styles = _Styles()
            if "word/styles.xml" in archive.namelist():
                _parse(path, archive, "word/styles.xml", styles, _MAX_STYLE_BYTES)
            body = _Body(styles.headings)
            _parse(path, archive, "word/document.xml", body, _MAX_UNPACKED_BYTES)
            about = _About()
            if "docProps/core.xml" in archive.namelist():
                _parse(path, archive, "docProps/core.xml", about, _MAX_STYLE_BYTES)
    except DocumentError:
        raise
    except Exception as error:  # any error of a parser means that the file is bad
        raise damaged(path, "Word file", error) from error
    return "".join(about.title).strip(), "\n\n".join(body.blocks)


def check_archive(path: str, kind: str, content: bytes) -> None:
    """Check an archive before a library unpacks it that knows no limits.

    Nothing is unpacked: `zipfile` reads no more of a file than the archive says it holds.

    Raises
    ------
    DocumentError
        When it is damaged, or unpacks to more than 256 MiB in all.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            size = sum(one.file_size for one in archive.infolist())
    except Exception as error:
        raise damaged(path, kind, error) from error
    if size > _MAX_UNPACKED_BYTES:
        raise DocumentError(
            f"{path}: it unpacks to {size:,} bytes, and at most {_MAX_UNPACKED_BYTES:,} are read; "
            "save the document in parts"
        )


def _parse(path: str, archive: zipfile.ZipFile, name: str, target: _Target, limit: int) -> None:
    """Feed one file of an archive to `target`."""
    from lxml import etree

    # Unpacks no more than this, even if the header understates the size.
    if archive.getinfo(name).file_size > limit:
        raise DocumentError(
            f"{path}: {name} in it unpacks to {archive.getinfo(name).file_size:,} bytes, and at "
            f"most {limit:,} are read; save the document in parts"
        )
    parser = etree.XMLParser(
        target=target, huge_tree=True, resolve_entities=False, no_network=True, load_dtd=False
    )
    with archive.open(name) as file:
        while piece := file.read(_PIECE_BYTES):
            parser.feed(piece)
    parser.close()


class _Target:
    """Receives the XML parser's calls."""

    def start(self, tag: str, attributes: dict[str, str]) -> None: ...

    def end(self, tag: str) -> None: ...

    def data(self, data: str) -> None: ...

    def doctype(self, name: str, public_id: str, system_url: str) -> None:
        del public_id, system_url
        # Entity definitions in one can make a small file expand without end.
        raise ValueError(f"a document type declaration of {name!r}, which no Word file has")

    def close(self) -> None:
        """Return nothing."""


class _Styles(_Target):
    """Prefixes for paragraphs of a style, by the style's id."""

    def __init__(self) -> None:
        self.headings: dict[str, str] = {}
        self._style = ""

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        name = _local(tag)
        if name == "style":
            self._style = _value(attributes, "styleId")
        elif name == "name":
            style = _value(attributes, "val").lower()
            level = style.removeprefix("heading ")  # up to 9; Markdown has 6
            if style == "title":
                self.headings[self._style] = "# "
            elif level != style:
                number = "123456".find(level) + 1 if len(level) == 1 else 0
                self.headings[self._style] = "#" * (number or 6) + " "


class _About(_Target):
    def __init__(self) -> None:
        self.title: list[str] = []
        self._in_title = False

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        del attributes
        self._in_title = tag == _TITLE

    def end(self, tag: str) -> None:
        del tag
        self._in_title = False

    def data(self, data: str) -> None:
        if self._in_title:
            self.title.append(data)


class _Body(_Target):
    """Collects paragraphs, and the rows of the outermost tables.

    A cell that spans several columns appears once; tables inside a cell become lines of it.
    """

    def __init__(self, headings: dict[str, str]) -> None:
        self.blocks: list[str] = []
        self._headings = headings
        self._mark = ""
        self._text: list[str] = []
        self._in_text = False
        self._num_tables = 0
        self._rows: list[str] = []
        self._cells: list[str] = []
        self._cell: list[str] = []
        self._num_skipped = 0

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if self._num_skipped or tag == _FALLBACK:
            self._num_skipped += 1
            return
        name = _local(tag)
        if name == "t":
            self._in_text = True
        elif name in _MARKS:
            # `tab` is also the name of a tab stop, in a paragraph's properties.
            if name != "tab" or not attributes:
                self._text.append(_MARKS[name])
        elif name == "pStyle":
            self._mark = self._headings.get(_value(attributes, "val"), "")
        elif name == "p":
            # A paragraph inside another, in a text box: the outer one's text so far is first.
            self._end_paragraph()
        elif name == "tbl":
            self._num_tables += 1

    def data(self, data: str) -> None:
        if self._in_text:
            self._text.append(data)

    def end(self, tag: str) -> None:
        if self._num_skipped:
            self._num_skipped -= 1
            return
        name = _local(tag)
        if name == "t":
            self._in_text = False
        elif name == "p":
            self._end_paragraph()
        elif name == "tbl":
            self._num_tables -= 1
            if not self._num_tables:
                self._end_table()
        elif self._num_tables == 1:
            if name == "tc":
                self._cells.append("\n".join(self._cell))
                self._cell.clear()
            elif name == "tr":
                self._rows.append(" | ".join(self._cells))
                self._cells.clear()

    def _end_paragraph(self) -> None:
        text = "".join(self._text).strip()
        self._text.clear()
        if text and self._num_tables:
            self._cell.append(text)
        elif text:
            self.blocks.append(self._mark + text)
        self._mark = ""

    def _end_table(self) -> None:
        rows = "\n".join(self._rows)
        self._rows.clear()
        if rows.strip():
            self.blocks.append(rows)


@functools.lru_cache(maxsize=256)
def _local(tag: str) -> str:
    """Return an element's name in Word's namespace, "" for other elements."""
    namespace, brace, name = tag.rpartition("}")
    return name if namespace + brace in _WORD else ""


def _value(attributes: dict[str, str], name: str) -> str:
    """Return an attribute in Word's namespace, "" if there is none."""
    return next((attributes[space + name] for space in _WORD if space + name in attributes), "")


def damaged(path: str, kind: str, error: Exception) -> DocumentError:
    """Return the error of a file whose parser failed."""
    return DocumentError(f"{path}: a damaged {kind} ({type(error).__name__}: {error})")
