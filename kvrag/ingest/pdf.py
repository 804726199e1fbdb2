"""PDF files to text, page by page, with words whole that a line's end has cut."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvrag.chunk import PAGE_BREAK
from kvrag.errors import DocumentError
from kvrag.ingest.archives import damaged

# Between the two halves of a word: PDFium's characters for a hyphen that ends a line, where it
# joins the lines, or a hyphen before a line's end, which it leaves after a digit.
_CUT = re.compile("(?<!\\w)(\\w++)(?:[\ufffe\x02]|[-\u2010]\n)(?=(\\w++)(-?))")
_WORD = re.compile(r"\w+(?:-\w+)*")
# "Haupt- und Nebeneingang": the hyphen stands for the rest of a word, which follows.
_CONJUNCTIONS = frozenset({"and", "or", "und", "oder", "bzw", "och", "og", "eller"})
_FORMS = str.maketrans(
    {
        "\u00ad": None,
        **dict(
            zip("\ufb00\ufb01\ufb02\ufb03\ufb04", ("ff", "fi", "fl", "ffi", "ffl"), strict=True)
        ),
        **dict.fromkeys("\ufb05\ufb06", "st"),
    }
)


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
    return title, join_words(PAGE_BREAK.join(pages))


def _pages(document: object) -> Iterator[object]:
    for number in range(len(document)):  # type: ignore[arg-type]
        page = document[number]  # type: ignore[index]
        yield page
        page.close()


def _page_text(page: object) -> str:
    text_page = page.get_textpage()  # type: ignore[attr-defined]
    text: str = text_page.get_text_range()
    text_page.close()
    return text.replace("\r\n", "\n").replace(PAGE_BREAK, "\n")


def join_words(text: str) -> str:
    """Return a text with words joined that a line's end cut, and letters for ligatures.

    A hyphen stays if it is one of several in a word; if the document has the word with it
    elsewhere, or has both parts as words; and where a capital or a digit is beside it. It goes in
    any case if the document has the word without it. A soft hyphen never stays.
    """
    text = re.sub("\u00ad[\ufffe\x02]?[ \\t]*\n", "", text).translate(_FORMS)
    words: set[str] = set()
    if _CUT.search(text):
        words = {word.lower() for word in _WORD.findall(_CUT.sub(" ", text))}

    def joined(cut: re.Match[str]) -> str:
        first, second, more = cut.groups()
        if (first + second).lower() in words:
            return first
        if second.lower() in _CONJUNCTIONS:
            return f"{first}- "
        before = cut.string[max(0, cut.start() - 1) : cut.start()]
        is_compound = (
            "-" in (before, more)
            or not (second[0].islower() and first.isalpha() and not first.isupper())
            or f"{first}-{second}".lower() in words
            or (first.lower() in words and second.lower() in words)
        )
        return f"{first}-" if is_compound else first

    return re.sub("[\ufffe\x02]", "-\n", _CUT.sub(joined, text))
