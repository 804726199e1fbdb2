"""An index in LlamaIndex: `KVRagRetriever`, and filters and nodes as LlamaIndex has them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Self

import numpy as np

try:
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.schema import (
        NodeRelationship,
        NodeWithScore,
        QueryBundle,
        RelatedNodeInfo,
        TextNode,
    )
    from llama_index.core.vector_stores.types import (
        FilterCondition,
        FilterOperator,
        MetadataFilters,
    )
except ImportError as error:
    raise ImportError(
        "kvrag.retrievers.llamaindex needs llama-index-core: pip install 'kvrag[llama-index]'"
    ) from error

from kvrag import arguments
from kvrag.chunk import Chunk
from kvrag.engine.shared import place_of, shared_index
from kvrag.errors import ParameterError
from kvrag.ingest.index import Index


class KVRagRetriever(BaseRetriever):
    """Returns the chunks of an index nearest to a query, as text nodes.

    A node's id is the chunk's id, and its source relationship names the document. The language
    model reads no metadata, so that the node's text in a prompt is the chunk's text and nothing
    else.

    Parameters
    ----------
    index
        The folder of an index, or an opened `kvrag.Index`.
    k
        Number of nodes to return.
    filters
        Which chunks may be found: LlamaIndex's, or a mapping as in `Index.search`; None means all.
    """

    def __init__(
        self,
        index: Index | str | Path,
        *,
        k: int = 4,
        filters: MetadataFilters | dict[str, Any] | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        k = arguments.whole(k, "k", 1)
        super().__init__(callback_manager=callback_manager)
        self._index = index
        self._k = k
        self._filters = filters
        self._wanted = to_filter(filters) if isinstance(filters, MetadataFilters) else filters

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_index": place_of(self._index)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # An opened index holds locks and open files: shared, not copied.
        return type(self)(
            self._index, k=self._k, filters=self._filters, callback_manager=self.callback_manager
        )

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        index, wanted = shared_index(self._index), self._wanted
        if query_bundle.embedding is not None:
            hits = index.search_by_vector(query_bundle.embedding, self._k, filter=wanted)
        elif query_bundle.custom_embedding_strs:
            # Like LlamaIndex's retrievers, search for several texts (HyDE) by their mean vector.
            texts = query_bundle.custom_embedding_strs
            vectors = [index.embedding.embed_query(text) for text in texts]
            hits = index.search_by_vector(np.mean(vectors, axis=0), self._k, filter=wanted)
        else:
            hits = index.search(query_bundle.query_str, self._k, filter=wanted)
        return [NodeWithScore(node=to_node(hit.chunk), score=hit.score) for hit in hits]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


def to_node(chunk: Chunk) -> TextNode:
    """Return a chunk as a node. Language models read its text, and no metadata."""
    metadata = chunk.fields
    return TextNode(
        id_=chunk.chunk_id,
        text=chunk.text,
        metadata=metadata,
        excluded_llm_metadata_keys=list(metadata),
        excluded_embed_metadata_keys=list(metadata),
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=chunk.source)},
    )


_OPERATORS = {
    FilterOperator.EQ: "$eq",
    FilterOperator.NE: "$ne",
    FilterOperator.GT: "$gt",
    FilterOperator.GTE: "$gte",
    FilterOperator.LT: "$lt",
    FilterOperator.LTE: "$lte",
    FilterOperator.IN: "$in",
    FilterOperator.NIN: "$nin",
    FilterOperator.ANY: "$in",
    FilterOperator.CONTAINS: "$eq",
}
_CONDITIONS = {FilterCondition.AND: "$and", FilterCondition.OR: "$or", None: "$and"}


def to_filter(filters: MetadataFilters) -> dict[str, Any] | None:
    """Return LlamaIndex's filters as `Index.search` takes them; None if there are none.

    Raises
    ------
    ParameterError
        When an operator or condition has no equivalent (`TEXT_MATCH`, `IS_EMPTY`, `NOT`).
    """
    joined = _CONDITIONS.get(filters.condition)
    if joined is None:
        raise ParameterError(
            f"condition {filters.condition}: expected AND or OR; use NE and NIN to exclude"
        )
    parts = []
    for one in filters.filters:
        if isinstance(one, MetadataFilters):
            parts.append(to_filter(one))
        elif one.operator == FilterOperator.ALL and isinstance(one.value, list):
            parts.append({"$and": [{one.key: value} for value in one.value]})
        elif one.operator in _OPERATORS:
            parts.append({one.key: {_OPERATORS[one.operator]: one.value}})
        else:
            raise ParameterError(
                f"filter of {one.key!r}: operator {one.operator} is not known; expected one of "
                f"{', '.join(known.name for known in (*_OPERATORS, FilterOperator.ALL))}"
            )
    kept = [part for part in parts if part is not None]
    return {joined: kept} if kept else None
