"""Which errors fail a single document, and which end a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kvrag.errors import DocumentError
from kvrag.foreign import reason

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
    except BaseException as error:
        fail(reason(error))
