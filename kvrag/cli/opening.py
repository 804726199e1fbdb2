"""Open an index and load what it needs, with a note on stderr during slow steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.cli import console

if TYPE_CHECKING:
    from kvrag.ingest.index import Index


def quiet_libraries() -> None:
    """Silence the progress bars and notes that Transformers writes while it loads a model."""
    from transformers.utils import logging

    quiet: Any = logging  # untyped in Transformers
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()


def open_index(
    path: Path,
    model: str | None = None,
    device: str | None = None,
    store: str | None = None,
    mend: bool = False,
) -> Index:
    """Open an index without loading its model."""
    opened = _open(path, model=model, device=device, store=store, mend=mend)
    # Imports the libraries, which takes seconds: an index that is not there is reported before.
    quiet_libraries()
    return opened


def open_catalog(path: Path, store: str | None = None) -> Index:
    """Open an index for work that needs no model; no model library is imported."""
    return _open(path, store=store)


def _open(path: Path, **given: Any) -> Index:
    from kvrag.ingest.index import Index

    return Index.open(path, **given)


def warm_up(index: Index) -> None:
    """Load model, embedding and matcher, so that no answer's time includes loading them."""
    with console.working("loading the model"):
        _ = index.model
        index.embedding.embed(["warm-up"])
        _ = index.matcher
        if index.compression is None:
            _ = index.run_finder.fingerprints
