"""The documents of another vector store, to be indexed as they were cut there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kvrag.chunk import Document
from kvrag.errors import ParameterError
from kvrag.ingest.loaders import AsCut

_PAGE = 1000


def adopted(store: Any) -> Iterator[AsCut]:
    """Return an iterator over the documents of a vector store, each of which becomes one chunk.

    A document's id there is its source here. Text that is longer than the model's window is cut.

    Parameters
    ----------
    store
        A LangChain vector store that can list what it holds (FAISS, Chroma, InMemoryVectorStore), a
        Chroma collection, a LlamaIndex index, storage context, docstore or vector store, or any
        iterable of LangChain documents, LlamaIndex nodes and `kvrag.Document` objects.

    Raises
    ------
    ParameterError
        When it cannot list its documents.

    Examples
    --------
    >>> index.add(adopted(FAISS.load_local("faiss", embeddings, ...)))   # doctest: +SKIP
    """
    return map(AsCut, _listed(store))


def _listed(store: Any) -> Iterable[Any]:
    for find in _WAYS:
        found = find(store)
        if found is not None:
            return found
    if isinstance(store, Iterable) and not isinstance(store, str | bytes | Mapping):
        return store
    raise ParameterError(
        f"a {type(store).__name__} does not list its documents: give an iterable of LangChain "
        "documents or LlamaIndex nodes instead, such as a function that reads them with the "
        "store's own client (docs/ingest.md shows Qdrant and pgvector)"
    )


def _of_docstore_ids(store: Any) -> Iterable[Any] | None:
    """LangChain's FAISS: places with ids, and a docstore that is asked for each."""
    ids = getattr(store, "index_to_docstore_id", None)
    search = getattr(getattr(store, "docstore", None), "search", None)
    if not isinstance(ids, Mapping) or not callable(search):
        return None
    return (_with_id(search(one), one) for one in ids.values())


def _with_id(document: Any, name: str) -> Any:
    if isinstance(document, str):  # the docstore's way to say that it holds none
        raise ParameterError(f"the store names the document {name!r} and does not hold it")
    return Document(name, document.page_content, document.metadata)


def _of_dicts(store: Any) -> Iterable[Any] | None:
    """LangChain's InMemoryVectorStore: dictionaries by id."""
    held = getattr(store, "store", None)
    if not isinstance(held, Mapping) or not hasattr(store, "similarity_search"):
        return None
    return (Document(name, one["text"], one["metadata"]) for name, one in held.items())


def _of_columns(store: Any) -> Iterable[Any] | None:
    """Chroma, LangChain's and its own collections: columns, a page at a time."""
    get = getattr(store, "get", None)
    is_chroma = hasattr(store, "_collection") or hasattr(store, "peek")
    return _pages(get) if is_chroma and callable(get) else None


def _pages(get: Callable[..., Any]) -> Iterator[Any]:
    first = 0
    while True:
        page = get(limit=_PAGE, offset=first, include=["documents", "metadatas"])
        ids, texts = page["ids"], page["documents"]
        metadatas = page["metadatas"] or [None] * len(ids)
        for name, text, metadata in zip(ids, texts, metadatas, strict=True):
            yield Document(name, text or "", metadata or {})
        if len(ids) < _PAGE:
            return
        first += len(ids)


def _of_nodes(store: Any) -> Iterable[Any] | None:
    """LlamaIndex: the nodes of a docstore, or of a vector store that keeps their texts."""
    held = getattr(getattr(store, "docstore", store), "docs", None)
    if isinstance(held, Mapping) and held:
        return held.values()
    for owner in (store, getattr(store, "vector_store", None)):
        get = getattr(owner, "get_nodes", None)
        if callable(get) and getattr(owner, "stores_text", False):
            nodes: Iterable[Any] = get(None)
            return nodes
    return None


_WAYS: tuple[Callable[[Any], Iterable[Any] | None], ...] = (
    _of_docstore_ids,
    _of_dicts,
    _of_columns,
    _of_nodes,
)
