"""An index in LangChain: a retriever, a vector store and embeddings.

They return each chunk's text exactly as it was encoded, so that the language models of
`kvrag.llms.langchain` find the chunk in the prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

try:
    from langchain_core.callbacks import CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.vectorstores import VectorStore
    from langchain_core.vectorstores.utils import maximal_marginal_relevance
except ImportError as error:
    raise ImportError(
        "kvrag.retrievers.langchain needs langchain-core: pip install 'kvrag[langchain]'"
    ) from error

from pydantic import ConfigDict, Field

from kvrag import arguments
from kvrag.chunk import Chunk
from kvrag.chunk import Document as KVRagDocument
from kvrag.codec.config import choose_codec
from kvrag.engine.shared import place_of, shared_index
from kvrag.errors import DocumentError, IndexMismatchError, IndexNotFoundError, ParameterError
from kvrag.ingest.embedding import Embedding, get_embedding
from kvrag.ingest.filters import on_metadata
from kvrag.ingest.index import Index
from kvrag.ingest.search import SearchHit


class KVRagRetriever(BaseRetriever):
    """Returns the chunks of an index that best match a query.

    A document's ``page_content`` is the chunk's text and nothing else, and its ``id`` is the
    chunk's id. ``metadata`` holds the source document's metadata, with ``source`` and ``ordinal``
    (the chunk's number in the document) added unless the document defines them, and where known
    ``title``, ``page``, ``heading``, ``headings`` (the path of headings under which the chunk
    begins, from the outermost) and ``start`` (the chunk's first character in the document).

    Attributes
    ----------
    index
        The folder of an index, or an opened `kvrag.Index`.
    k
        Number of documents to return; `invoke(query, k=...)` replaces it for one call.
    filter
        Which chunks may be found, as in `Index.search`; `invoke(query, filter=...)` replaces it.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    index: Index | str | Path
    k: int = Field(default=4, ge=1)
    filter: dict[str, Any] | None = None

    def __getstate__(self) -> dict[Any, Any]:
        state: dict[Any, Any] = dict(super().__getstate__())
        state["__dict__"] = {**state["__dict__"], "index": place_of(self.index)}
        return state

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        memo[id(self.index)] = self.index  # holds locks and open files: shared, not copied
        return super().__deepcopy__(memo)

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,  # noqa: ARG002
        k: int | None = None,
        filter: dict[str, Any] | None = None,
    ) -> list[Document]:
        wanted = self.filter if filter is None else filter
        hits = shared_index(self.index).search(query, self.k if k is None else k, filter=wanted)
        return [
            Document(id=hit.chunk.chunk_id, page_content=hit.chunk.text, metadata=hit.chunk.fields)
            for hit in hits
        ]


class KVRagEmbeddings(Embeddings):
    """The embedding of an index as LangChain embeddings.

    Parameters
    ----------
    embedding
        The name of a built-in embedding, or the `embedding` of an index.
    """

    def __init__(self, embedding: str | Embedding = "minilm") -> None:
        self.embedding = get_embedding(embedding)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return one vector for each text: of a long one, the mean of its windows' vectors."""
        return [one.tolist() for one in self.embedding.embed_whole(texts)]

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a question."""
        vector: list[float] = self.embedding.embed_query(text).tolist()
        return vector


class KVRagVectorStore(VectorStore):
    """An index as a LangChain vector store.

    `add_documents` chunks, embeds and prefills documents like any others. An id names one added
    document: adding a document with the same id replaces it. A document without an id gets one
    derived from its content, so that adding it again changes nothing. If a document has several
    chunks, searches return its chunks, each under the chunk's id; `get_by_ids` and `delete`
    accept both kinds of id. Texts are normalised (see `kvrag.chunk.normalise_text`). A chunk of
    several has ``source``, ``ordinal`` and ``start`` in its metadata, a whole document its own
    metadata only. Every search takes ``filter``, as `Index.search` does; its fields are those of
    the metadata, ``source`` and ``ordinal`` too.

    LangChain's ``index()`` with a record manager keeps the store up to date.

    Parameters
    ----------
    index
        The folder of an index, or an opened `kvrag.Index`.

    Examples
    --------
    >>> store = KVRagVectorStore("my-index")                     # doctest: +SKIP
    >>> store.as_retriever(search_type="mmr").invoke("...")      # doctest: +SKIP
    """

    def __init__(self, index: Index | str | Path) -> None:
        self._index = index

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_index": place_of(self._index)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(self._index)  # holds locks and open files: shared, not copied

    @property
    def index(self) -> Index:
        """The index, opened at first use."""
        return shared_index(self._index)

    @property
    def embeddings(self) -> Embeddings:
        """The embedding of the index."""
        return KVRagEmbeddings(self.index.embedding)

    @classmethod
    def from_texts(  # type: ignore[override]  # named parameters in place of **kwargs
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        path: str | Path,
        model: str | Path,
        **made_with: Any,
    ) -> Self:
        """Create an index in `path`, or open the existing one, and add `texts` to it.

        Parameters
        ----------
        embedding
            Any LangChain embeddings. An index created with embeddings other than
            `KVRagEmbeddings` can be opened only with the same embeddings.
        path
            Folder of the index.
        model
            As in `Index.create`; an existing index must have the same.
        made_with
            ``codec`` and ``chunk_tokens``, of which the same holds. None means the existing
            index's value, or the default of `Index.create`.

        Raises
        ------
        IndexMismatchError
            When the existing index has another model, embedding, codec or chunk length.
        """
        wanted = {name: made_with.pop(name, None) for name in ("codec", "chunk_tokens")}
        arguments.refuse_options(made_with)
        chosen = embedding.embedding if isinstance(embedding, KVRagEmbeddings) else embedding
        try:
            index = Index.open(path, model=model, embedding=chosen)
        except IndexNotFoundError:
            given = {name: value for name, value in wanted.items() if value is not None}
            index = Index.create(path, model=model, embedding=chosen, **given)
        try:
            _check_made_with(index, **wanted)
        except IndexMismatchError:
            index.close()
            raise
        store = cls(index)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    def add_documents(
        self,
        documents: list[Document],
        *,
        ids: list[str] | None = None,
        batch_size: int | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> list[str]:
        """Add documents, replacing those with the same ids; return one id for each.

        Parameters
        ----------
        ids
            One for each document; None takes the documents' own.
        batch_size
            LangChain's ``index()`` says it; kvrag chooses its batches by their tokens.

        Raises
        ------
        ParameterError
            When `ids` and `documents` differ in length, or an option is unknown.
        DocumentError
            When a document contains no text; the others are added.
        """
        arguments.refuse_options(kwargs)
        if ids is not None and len(ids) != len(documents):
            raise ParameterError(
                f"{len(documents)} documents, {len(ids)} ids: expected one id each"
            )
        names = [
            given or document.id or _content_id(document)
            for given, document in zip(ids or [""] * len(documents), documents, strict=True)
        ]
        report = self.index.add(
            KVRagDocument(name, document.page_content, document.metadata)
            for name, document in zip(names, documents, strict=True)
        )
        if report.failed:
            refused = "; ".join(f"{failed.source!r}: {failed.reason}" for failed in report.failed)
            raise DocumentError(f"added all but {len(report.failed)} documents: {refused}")
        return names

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents or chunks by id; None deletes everything. Unknown ids are ignored."""
        arguments.refuse_options(kwargs)
        if ids is None:
            ids = [row.source for row in self.index.documents()]
        self.index.delete(sources=ids, chunk_ids=ids)
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents or chunks with these ids, in that order; skip unknown ids."""
        index = self.index
        chunk_ids: dict[str, None] = {}
        for name in ids:
            chunk_ids |= dict.fromkeys(index.catalog.chunk_ids_of(name) or [name])
        return [self._to_document(chunk) for chunk in index.get_chunks(list(chunk_ids))]

    def similarity_search(
        self, query: str, k: int = 4, *, filter: dict[str, Any] | None = None, **kwargs: Any
    ) -> list[Document]:
        """Return the `k` chunks that best match `query`, by meaning and words, best first."""
        arguments.refuse_options(kwargs)
        return self._documents(self.index.search(query, k, filter=on_metadata(filter)))

    def similarity_search_with_score(
        self, query: str, k: int = 4, *, filter: dict[str, Any] | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """Return the nearest chunks by meaning, with their cosine similarities, best first."""
        arguments.refuse_options(kwargs)
        hits = self.index.search_dense(query, k, filter=on_metadata(filter))
        return [(self._to_document(hit.chunk), float(hit.score)) for hit in hits]

    def similarity_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        *,
        filter: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Return the `k` chunks nearest to a vector, best first."""
        arguments.refuse_options(kwargs)
        return self._documents(
            self.index.search_by_vector(embedding, k, filter=on_metadata(filter))
        )

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Return `k` chunks that are near to `query` and different from each other.

        They are chosen from the `fetch_k` nearest chunks. With `lambda_mult` 1 only nearness
        counts; with 0 only difference counts.
        """
        vector = self.embeddings.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(
            vector, k, fetch_k, lambda_mult, **kwargs
        )

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        *,
        filter: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Return `k` chunks that are near to a vector and different from each other."""
        arguments.refuse_options(kwargs)
        fetch_k = arguments.whole(fetch_k, "fetch_k", 0)
        lambda_mult = arguments.number(lambda_mult, "lambda_mult", 0.0, 1.0)
        most = max(arguments.whole(k, "k", 1), fetch_k)
        hits = self.index.search_by_vector(embedding, most, filter=on_metadata(filter))
        if not hits:
            return []
        vectors = self.embeddings.embed_documents([hit.chunk.text for hit in hits])
        chosen = maximal_marginal_relevance(np.asarray(embedding), vectors, lambda_mult, k)
        return self._documents(hits[place] for place in chosen)

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        # A negative cosine means irrelevant, just as 0 does.
        return lambda cosine: min(max(cosine, 0.0), 1.0)

    def _documents(self, hits: Iterable[SearchHit]) -> list[Document]:
        return [self._to_document(hit.chunk) for hit in hits]

    def _to_document(self, chunk: Chunk) -> Document:
        is_whole = len(self.index.catalog.chunk_ids_of(chunk.source)) == 1
        return Document(
            id=chunk.source if is_whole else chunk.chunk_id,
            page_content=chunk.text,
            metadata=dict(chunk.metadata) if is_whole else chunk.fields,
        )


def _check_made_with(index: Index, *, codec: str | None, chunk_tokens: int | None) -> None:
    label = None if codec is None else choose_codec(codec).label
    for name, wanted in (("codec", label), ("chunk_tokens", chunk_tokens)):
        recorded = getattr(index.config, name)
        if wanted is not None and wanted != recorded:
            raise IndexMismatchError(
                f"the index at {place_of(index)} was made with {name}={arguments.shown(recorded)}, "
                f"asked for {arguments.shown(wanted)}: leave it out, or make a new index in "
                "another folder"
            )


def _content_id(document: Document) -> str:
    content = json.dumps([document.page_content, document.metadata], sort_keys=True, default=str)
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
