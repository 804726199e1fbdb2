"""An index as a LlamaIndex vector store and embedding, for pipelines and query engines.

Nodes are indexed as they were cut, each as one chunk. A document store with any `DocstoreStrategy`
keeps the index up to date: what a pipeline removes, `delete` removes here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrag import arguments
from kvrag.chunk import Chunk, Document
from kvrag.engine.shared import shared_index
from kvrag.errors import DocumentError, ParameterError
from kvrag.ingest.filters import on_metadata, read_filter
from kvrag.ingest.index import Index
from kvrag.ingest.search import SearchHit
from kvrag.retrievers.llamaindex import to_filter, to_node  # says what to install

from llama_index.core.base.embeddings.base import BaseEmbedding  # isort: skip
from llama_index.core.bridge.pydantic import PrivateAttr  # isort: skip
from llama_index.core.schema import (  # isort: skip
    BaseNode,
    MetadataMode,
    NodeRelationship,
    RelatedNodeInfo,
)
from llama_index.core.vector_stores.types import (  # isort: skip
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)

_REF = "ref_doc_id"
_NODE = "node_id"
_SEARCHES = {
    "default": "search_dense",
    "sparse": "search_words",
    "text_search": "search_words",
    "hybrid": "search",
    "semantic_hybrid": "search",
}


class KVRagEmbedding(BaseEmbedding):
    """The embedding of an index, for LlamaIndex's pipelines, which embed nodes before storing them.

    Parameters
    ----------
    index
        The folder of an index, or an opened `kvrag.Index`.
    """

    _index: Index | str | Path = PrivateAttr()

    def __init__(self, index: Index | str | Path, **settings: Any) -> None:
        super().__init__(model_name="kvrag", **settings)
        self._index = index

    def _get_query_embedding(self, query: str) -> list[float]:
        vector: list[float] = shared_index(self._index).embedding.embed_query(query).tolist()
        return vector

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    def _get_text_embedding(self, text: str) -> list[float]:
        (vector,) = shared_index(self._index).embedding.embed_whole([text]).tolist()
        return vector  # type: ignore[no-any-return]


class KVRagVectorStore(BasePydanticVectorStore):
    """An index as a LlamaIndex vector store.

    The index embeds nodes and questions itself. Query modes: ``DEFAULT`` searches by meaning,
    ``SPARSE`` and ``TEXT_SEARCH`` by words, ``HYBRID`` and ``SEMANTIC_HYBRID`` by both.

    Parameters
    ----------
    index
        The folder of an index, or an opened `kvrag.Index`.

    Examples
    --------
    >>> store = KVRagVectorStore("my-index")                                    # doctest: +SKIP
    >>> IngestionPipeline(
    ...     transformations=[SentenceSplitter(), KVRagEmbedding("my-index")],
    ...     docstore=SimpleDocumentStore(), vector_store=store,
    ... ).run(documents=documents)                                              # doctest: +SKIP
    """

    stores_text: bool = True
    is_embedding_query: bool = False
    _index: Index | str | Path = PrivateAttr()

    def __init__(self, index: Index | str | Path) -> None:
        super().__init__()  # type: ignore[call-arg]  # its fields have defaults
        self._index = index

    @classmethod
    def class_name(cls) -> str:
        """Return the name under which LlamaIndex serialises it."""
        return "KVRagVectorStore"

    @property
    def client(self) -> Index:
        """The index, opened at first use."""
        return shared_index(self._index)

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes, each as one chunk, replacing those with the same ids; return their ids.

        Raises
        ------
        DocumentError
            When a node contains no text; the others are added.
        """
        arguments.refuse_options(kwargs)
        report = self.client.add([_to_document(node) for node in nodes])
        if report.failed:
            refused = "; ".join(f"{failed.source!r}: {failed.reason}" for failed in report.failed)
            raise DocumentError(f"added all but {len(report.failed)} nodes: {refused}")
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **kwargs: Any) -> None:
        """Delete the nodes of a document."""
        arguments.refuse_options(kwargs)
        found = self._chunks({_REF: ref_doc_id})
        self.client.delete(sources=[*(chunk.source for chunk in found), ref_doc_id])

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **kwargs: Any,
    ) -> None:
        """Delete nodes by id, by filters, or those with one of the ids that the filters admit."""
        arguments.refuse_options(kwargs)
        self.client.delete(sources=[chunk.source for chunk in self._named(node_ids, filters)])

    def clear(self) -> None:
        """Delete all nodes."""
        self.client.delete(sources=[row.source for row in self.client.documents()])

    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Return nodes by id, by filters, by both, or all of them."""
        return [_to_own_node(chunk) for chunk in self._named(node_ids, filters)]

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Return the nodes that best match a question or its vector, best first.

        Raises
        ------
        ParameterError
            When the mode or a filter is not known, or there is nothing to search for.
        """
        arguments.refuse_options(kwargs)
        hits = self._hits(query)
        return VectorStoreQueryResult(
            nodes=[_to_own_node(hit.chunk) for hit in hits],
            similarities=[hit.score for hit in hits],
            ids=[hit.chunk.source for hit in hits],
        )

    def _hits(self, query: VectorStoreQuery) -> list[SearchHit]:
        parts: list[dict[str, Any]] = []
        if query.filters is not None and (given := to_filter(query.filters)):
            parts.append(on_metadata(given))
        # LlamaIndex gives empty lists for all.
        if query.node_ids:
            parts.append({_NODE: {"$in": query.node_ids}})
        if query.doc_ids:
            parts.append({_REF: {"$in": query.doc_ids}})
        wanted = {"$and": parts} if parts else None
        k, text = query.similarity_top_k, query.query_str
        if query.mode == VectorStoreQueryMode.DEFAULT and query.query_embedding is not None:
            return self.client.search_by_vector(query.query_embedding, k, filter=wanted)
        if text is None:
            raise ParameterError("the query has neither a text nor a vector to search for")
        if query.mode not in _SEARCHES:  # by value: it may be a plain str
            known = ", ".join(_SEARCHES).upper()
            raise ParameterError(f"query mode {query.mode}: expected {known}")
        search = getattr(self.client, _SEARCHES[query.mode])
        hits: list[SearchHit] = search(text, k, filter=wanted)
        return hits

    def _named(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> list[Chunk]:
        wanted = None if filters is None else on_metadata(to_filter(filters))
        if node_ids is None:
            return self._chunks(wanted or {_NODE: {"$ne": ""}})
        named: dict[str, Any] = {_NODE: {"$in": node_ids}}
        return self._chunks({"$and": [named, wanted]} if wanted else named)

    def _chunks(self, wanted: dict[str, Any]) -> list[Chunk]:
        admitted = read_filter(wanted)
        assert admitted is not None
        catalog = self.client.catalog
        return list(catalog.chunks_at(catalog.words.rows_of(admitted)).values())


def _to_document(node: BaseNode) -> Document:
    text = node.get_content(metadata_mode=MetadataMode.NONE)
    ref = {} if node.ref_doc_id is None else {_REF: node.ref_doc_id}
    metadata = {**node.metadata, _NODE: node.node_id, **ref}
    return Document(node.node_id, text, metadata, is_whole=True)


def _to_own_node(chunk: Chunk) -> BaseNode:
    """Return a node as it was added: under its own id, with its document as its source."""
    node = to_node(chunk)
    own = {name: value for name, value in chunk.metadata.items() if name not in (_REF, _NODE)}
    ref = str(chunk.metadata.get(_REF, chunk.source))
    return node.model_copy(
        update={
            "id_": chunk.source,
            "metadata": own,
            "excluded_llm_metadata_keys": list(own),
            "excluded_embed_metadata_keys": list(own),
            "relationships": {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=ref)},
        }
    )
