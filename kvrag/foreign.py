"""Failures of libraries over files and texts that others wrote."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kvrag.errors import DocumentError, KVRagError


def reason(error: BaseException) -> str:
    """Return what a library says about foreign input; raise `error` if it is not the library's.

    Parsers raise whatever the bytes lead to, and a panic in a Rust library (tokenizers) is not even
    an `Exception`.
    """
    is_panic = type(error).__name__ == "PanicException"
    if isinstance(error, KVRagError) or not (isinstance(error, Exception) or is_panic):
        raise error
    return told(error)


def told(error: BaseException) -> str:
    """Return an error's kind and message."""
    with contextlib.suppress(Exception):  # the error's message may itself fail
        return f"{type(error).__name__}: {str(error)[:1000] or 'no message was given'}"
    return type(error).__name__


@contextlib.contextmanager
def document_failures(fail: Callable[[str], None]) -> Iterator[None]:
    """Pass any error that a document causes inside to `fail`, as a reason.

    Errors of the store, the disk, the catalog or the model have specific types. They are raised:
    every later document would fail too.
    """
    try:
        yield
    except DocumentError as error:
        fail(str(error))
    except BaseException as error:
        fail(reason(error))
