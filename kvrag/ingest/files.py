"""The files under a folder, their bytes, and the text in these.

A file must state its encoding: by being valid UTF-8, by a byte order mark, or (HTML) by its own
declaration. Any other file is refused, since a wrong guess would index garbage.
"""

from __future__ import annotations

import codecs
import errno
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from kvrag.errors import DocumentError
from kvrag.regularfile import other_kind, read_regular

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


@dataclass(frozen=True)
class Found:
    """The files found under a folder.

    Attributes
    ----------
    files
        Absolute paths.
    unlisted
        Folders that cannot be listed, with the reason; their content is unknown.
    """

    files: list[str]
    unlisted: dict[str, str]


def find_files(folder: Path, exclude: Path, suffixes: Collection[str]) -> Found:
    """Return the regular files with given suffixes at any depth under a folder, except hidden ones.

    Parameters
    ----------
    folder
        An absolute folder. Links to folders are not followed.
    exclude
        The index folder, which may be inside.
    suffixes
        File suffixes in lower case, with their dot.
    """
    found = Found([], {})
    waiting = [str(folder)]
    while waiting:
        place = waiting.pop()
        try:
            with os.scandir(place) as entries:
                visible = sorted(
                    (entry for entry in entries if not entry.name.startswith(".")),
                    key=lambda entry: entry.name,
                )
        except OSError as error:
            found.unlisted[place] = f"the folder cannot be listed ({error.strerror or error})"
            continue
        folders = []
        for entry in visible:
            if entry.is_dir(follow_symlinks=False):
                if entry.path != str(exclude):
                    folders.append(entry.path)
            elif Path(entry.name).suffix.lower() in suffixes and _is_file(entry):
                found.files.append(entry.path)
        waiting.extend(reversed(folders))
    return found


def resolve_path(given: str | Path) -> tuple[Path, os.stat_result]:
    """Return a path as an absolute one with links resolved, and its status.

    Raises
    ------
    DocumentError
        When the path is empty or does not exist.
    """
    if not str(given):
        raise DocumentError(
            "an empty path: expected a file or folder; '.' is the working directory"
        )
    try:
        path = Path(given).expanduser().resolve(strict=True)
        return path, path.stat()
    except FileNotFoundError:
        reason = "there is no such file or folder"
    except OSError as error:  # a link to itself, a name that is too long, no permission
        reason = f"cannot be read ({error.strerror or error})"
    except (RuntimeError, ValueError) as error:  # a user who does not exist, a NUL in the name
        reason = f"not a path to a file or folder ({error})"
    raise DocumentError(f"{printable(str(given))}: {reason}")


def printable(name: str) -> str:
    r"""Return a printable form of a name: invalid Unicode becomes ``\udce9`` and the like."""
    return name.encode("utf-8", "backslashreplace").decode()


def is_storable(source: str) -> bool:
    """Return whether the catalog can hold a source: SQLite stores text as UTF-8."""
    try:
        source.encode()
    except UnicodeEncodeError:
        return False
    return True


def encoded(source: str, text: str) -> bytes:
    """Return a document's text in UTF-8. Raises DocumentError if that is impossible."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DocumentError(
            f"{source}: the text holds half a surrogate pair at character {error.start}; decode it "
            "correctly before it is added"
        ) from error


def check_source(source: str) -> None:
    """Raise DocumentError if a file's name or an id is not valid Unicode."""
    if not is_storable(source):
        raise DocumentError(
            f"{printable(source)}: the name is not valid UTF-8; rename it, for example with "
            "'convmv -f latin1 -t utf8'"
        )


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # for example, a link to itself
        return False


def check_regular(path: str, mode: int) -> None:
    """Raise DocumentError unless a file with this mode is regular."""
    if kind := other_kind(mode):
        raise DocumentError(f"{path}: not a regular file but {kind}; give files of documents")


def read_file(path: str, max_bytes: int) -> bytes:
    """Return a regular file's bytes.

    Raises
    ------
    DocumentError
        When it cannot be read, is not a regular file, or has more than `max_bytes`.
    """
    try:
        return read_regular(path, max_bytes)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise DocumentError(
                f"{path}: {error.strerror}; split it, or raise the limit (--max-file-size, or "
                "ParseLimits.max_file_bytes)"
            ) from error
        raise DocumentError(f"{path}: cannot be read ({error.strerror or error})") from error


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
