"""Open an index and load what it needs, with a note on stderr during slow steps."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from kvrag import arguments
from kvrag.cli import console
from kvrag.errors import ParameterError

if TYPE_CHECKING:
    from kvrag.ingest.index import Index
    from kvrag.ingest.ranking import Reranker


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
    embedding: str | None = None,
) -> Index:
    """Open an index without loading its model; `embedding` is ``module:attribute``."""
    given = None if embedding is None else load_object(embedding, "--embedding")
    opened = _open(path, model=model, device=device, store=store, mend=mend, embedding=given)
    # Imports the libraries, which takes seconds: an index that is not there is reported before.
    quiet_libraries()
    return opened


def load_object(name: str, option: str) -> Any:
    """Return the object that ``module:attribute`` names; a class or function is called for it.

    Raises
    ------
    ParameterError
        When there is none. Errors that the module itself raises pass through.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute.isidentifier():
        raise ParameterError(
            f"{option} {arguments.shown(name)}: expected MODULE:NAME, such as embeddings:minilm"
        )
    try:
        found = getattr(import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ParameterError(
            f"{option} {arguments.shown(name)}: {error}; install the module, or name its folder in "
            "PYTHONPATH (PYTHONPATH=. for the current one, which is not searched)"
        ) from error
    return found() if isinstance(found, type | FunctionType) else found


def load_reranker(name: str | None) -> Reranker | None:
    """Return the cross-encoder that ``--rerank`` names, or None."""
    if name is None:
        return None
    from kvrag.ingest.ranking import Reranker

    return Reranker(name)


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
        index.embedding.embed_query("warm-up")
        _ = index.matcher
        if index.compression is None:
            _ = index.run_finder.fingerprints
