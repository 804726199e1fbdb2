"""The bytes of text files and pages to text.

A file must state its encoding: by being valid UTF-8, by a byte order mark, or (HTML) by its own
declaration. Any other file is refused, since a wrong guess would index garbage.
"""

from __future__ import annotations

import codecs
import re

from kvrag.errors import DocumentError

_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark is the beginning of this one
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Encodings that pages declare, by their Python name, and the encoding to read them as, both
# from https://encoding.spec.whatwg.org. Python has more codecs, some of which do not even
# produce text.
_WEB_ENCODINGS = {
    **{name: name for name in ("utf-8", "cp866", "koi8-r", "koi8-u", "mac-roman", "mac-cyrillic")},
    **{f"iso8859-{part}": f"iso8859-{part}" for part in (2, 3, 4, 5, 6, 7, 8, 10, 13, 14, 15, 16)},
    **{f"cp{page}": f"cp{page}" for page in (874, 932, 949, *range(1250, 1259))},
    **{name: name for name in ("gbk", "gb18030", "euc_jp", "iso2022_jp")},
    **dict.fromkeys(("ascii", "iso8859-1"), "cp1252"),
    **dict.fromkeys(("iso8859-11", "tis-620"), "cp874"),
    "iso8859-9": "cp1254",
    "gb2312": "gbk",
    **dict.fromkeys(("big5", "big5hkscs"), "big5hkscs"),
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    # Markup whose declaration could be read as ASCII is in none of these.
    **dict.fromkeys(("utf-16", "utf-16-le", "utf-16-be"), "utf-8"),
}
_DECLARED = re.compile(rb"<(?:meta[^>]+charset|\?xml[^>]+encoding)=[\"']?([\w.:-]+)", re.IGNORECASE)


def read_text(path: str, content: bytes, declared: str | None = None) -> str:
    """Decode a text file.

    Raises
    ------
    DocumentError
        When it is neither UTF-8 nor marked otherwise, or is not text at all.
    """
    encoding = declared or "utf-8"
    for mark, name in _BYTE_ORDER_MARKS:
        if content.startswith(mark):
            encoding = name
            break
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{path}: not valid {encoding} at byte {error.start} "
            f"(0x{content[error.start]:02x}); convert it, for example with "
            f"'iconv -f latin1 -t utf-8'"
        ) from error
    if "\0" in text:
        raise DocumentError(
            f"{path}: holds NUL characters, so it is binary or UTF-16 without a byte order "
            "mark; expected text"
        )
    return text


def read_page(path: str, content: bytes) -> str:
    """Decode a page in the encoding that it declares.

    Raises
    ------
    DocumentError
        When it declares an encoding that the web does not know, or is not in the one it declares.
    """
    declared = None
    if match := _DECLARED.search(content[:4096]):
        try:
            declared = _WEB_ENCODINGS[codecs.lookup(match[1].decode("ascii")).name]
        except LookupError as error:
            raise DocumentError(
                f"{path}: declares {match[1].decode('ascii')!r}, an unknown encoding for pages; "
                "declare the right one, or convert it to UTF-8"
            ) from error
    return read_text(path, content, declared)
