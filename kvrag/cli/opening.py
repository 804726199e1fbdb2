"""Open an index and load what it needs, with a note on stderr during slow steps."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from kvrag import arguments, metakernels
from kvrag.cli import console
from kvrag.errors import KVRagError, ParameterError

if TYPE_CHECKING:
    from kvrag.ingest.index import Index
    from kvrag.ingest.search import Reranker

_WHERE_MODULES_ARE = (
    "install the module, or name its folder in PYTHONPATH (PYTHONPATH=. for the current one, "
    "which is not searched)"
)


def quiet_libraries() -> None:
    """Silence the progress bars and notes that Transformers writes while it loads a model."""
    # It and `kvrag.models.pretrained` read this when they load: many commands never import them.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def open_index(index: Path | str, *, embedding: str | None = None, **given: Any) -> Index:
    """Open an index without loading its model; `embedding` is ``module:attribute``."""
    from kvrag.ingest.index import Index

    made = None if embedding is None else load_object(embedding, "--embedding")
    opened = Index.open(index, embedding=made, **given)
    quiet_libraries()
    return opened


def load_object(name: str, option: str) -> Any:
    """Return the object that ``module:attribute`` names; a class or function is called for it.

    Raises
    ------
    ParameterError
        When there is none, or its own code fails.
    """
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ParameterError(
            f"{option} {arguments.shown(name)}: expected MODULE:NAME, such as embeddings:minilm"
        )
    what = f"{option} {arguments.shown(name)}"
    metakernels.need()
    with _code_of_user(what):
        loaded = import_module(module)
    try:
        found = getattr(loaded, attribute)
    except AttributeError as error:
        raise ParameterError(f"{what}: {error}; {_WHERE_MODULES_ARE}") from error
    if not isinstance(found, type | FunctionType):
        return found
    try:
        inspect.signature(found).bind()
    except ValueError:
        pass  # some built-in classes have no signature
    except TypeError as error:
        raise ParameterError(
            f"{option} {name}: it is called without arguments: {error}; name an object, or a "
            "function without parameters that returns it"
        ) from error
    with _code_of_user(what):
        return found()


@contextmanager
def _code_of_user(what: str) -> Iterator[None]:
    """Turn whatever a user's module raises, SystemExit too, into an error that names its place."""
    try:
        yield
    except (KVRagError, KeyboardInterrupt):
        raise
    except ModuleNotFoundError as error:
        raise ParameterError(f"{what}: {error}; {_WHERE_MODULES_ARE}") from error
    except BaseException as error:
        if isinstance(error, SyntaxError) and error.filename:
            place = f"{error.filename}, line {error.lineno}"
            reason = error.msg
        else:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place, reason = f"{last.filename}, line {last.lineno}", str(error)
        raise ParameterError(
            f"{what}: that module failed with {type(error).__name__}: "
            f"{arguments.cut(reason) or 'no message'} ({place}); correct it there"
        ) from error


def load_reranker(name: str | None) -> Reranker | None:
    """Return the cross-encoder that ``--rerank`` names, or None."""
    if name is None:
        return None
    from kvrag.ingest.search import Reranker

    return Reranker(name)


def warm_up(index: Index) -> None:
    """Load model, embedding and matcher, so that no answer's time includes loading them."""
    with console.working("loading the model"):
        _ = index.model
        index.embedding.embed_query("warm-up")
        _ = index.matcher
        if index.config.has_kv:
            _ = index.run_finder.fingerprints
