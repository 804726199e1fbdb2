"""What is one document's failure, and what ends a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kvrag.errors import DocumentError, KVRagError

STAYS = "; the version indexed before stays"
"""Ends the reason of a failure that leaves an old version in the index."""


@contextlib.contextmanager
def document_failures(fail: Callable[[str], None]) -> Iterator[None]:
    """Hand whatever a document made go wrong inside to `fail`, as a reason.

    Errors of the store, the disk, the catalog or the model, which have types of their own, are
    raised: all documents after this one would fail too.
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
        # What a panic of a Rust library (the tokenizer) becomes is no Exception.
        if type(error).__name__ != "PanicException":
            raise
        fail(reason_of(error))


def reason_of(error: BaseException) -> str:
    """Return an unforeseen error as a reason."""
    with contextlib.suppress(Exception):  # a message that cannot be made
        return f"{type(error).__name__}: {str(error)[:1000] or 'no message was given'}"
    return type(error).__name__
