"""Which errors fail a single document, and which end a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kvrag.errors import DocumentError, KVRagError

STAYS = "; the version indexed before stays"
"""The end of a failure's reason when the old version stays in the index."""


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
    except KVRagError:
        raise
    except Exception as error:
        fail(reason_of(error))
    except BaseException as error:
        # A panic in a Rust library (the tokenizer) is not an Exception.
        if type(error).__name__ != "PanicException":
            raise
        fail(reason_of(error))


def reason_of(error: BaseException) -> str:
    """Return a reason for an unforeseen error."""
    with contextlib.suppress(Exception):  # the error's message may itself fail
        return f"{type(error).__name__}: {str(error)[:1000] or 'no message was given'}"
    return type(error).__name__
