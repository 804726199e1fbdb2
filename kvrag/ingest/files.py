"""The files under a folder, and their bytes."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from kvrag.errors import DocumentError
from kvrag.regularfile import other_kind, read_regular


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
