"""An index in LlamaIndex: `KVRagRetriever`."""

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
except ImportError as error:
    raise ImportError(
        "kvrag.retrievers.llamaindex needs llama-index-core: pip install 'kvrag[llama-index]'"
    ) from error

from kvrag import arguments
from kvrag.engine.shared import shared_index
from kvrag.ingest.index import Index
from kvrag.ingest.search import SearchHit


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
    """

    def __init__(
        self,
        index: Index | str | Path,
        *,
        k: int = 4,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        k = arguments.whole(k, "k", 1)
        super().__init__(callback_manager=callback_manager)
        self._index = index
        self._k = k

    def __getstate__(self) -> dict[str, Any]:
        folder = self._index.path if isinstance(self._index, Index) else self._index
        return {**self.__dict__, "_index": str(folder)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # An opened index holds locks and open files: shared, not copied.
        return type(self)(self._index, k=self._k, callback_manager=self.callback_manager)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        index = shared_index(self._index)
        if query_bundle.embedding is not None:
            hits = index.search_by_vector(query_bundle.embedding, self._k)
        elif query_bundle.custom_embedding_strs:
            # Like LlamaIndex's retrievers, search for several texts (HyDE) by their mean vector.
            texts = query_bundle.custom_embedding_strs
            vectors = [index.embedding.embed_query(text) for text in texts]
            hits = index.search_by_vector(np.mean(vectors, axis=0), self._k)
        else:
            hits = index.search(query_bundle.query_str, self._k)
        return [_to_node(hit) for hit in hits]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


def _to_node(hit: SearchHit) -> NodeWithScore:
    chunk = hit.chunk
    metadata = {"source": chunk.source, "ordinal": chunk.ordinal, **chunk.metadata}
    node = TextNode(
        id_=chunk.chunk_id,
        text=chunk.text,
        metadata=metadata,
        excluded_llm_metadata_keys=list(metadata),
        excluded_embed_metadata_keys=list(metadata),
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=chunk.source)},
    )
    return NodeWithScore(node=node, score=hit.score)
