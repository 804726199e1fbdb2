"""An index as a LlamaIndex vector store: nodes, filters, pipelines with a document store."""

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores.types import (
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)

from kvrag.errors import DocumentError, ParameterError
from kvrag.ingest.index import Index
from kvrag.retrievers.llamaindex import KVRagRetriever
from kvrag.retrievers.llamaindex_store import KVRagEmbedding, KVRagVectorStore
from tests.support.rag import Rag


@pytest.fixture
def store(rag: Rag, tmp_path: Path) -> Iterator[KVRagVectorStore]:
    with Index.create(
        tmp_path / "index", model=rag.model_folder, embedding="hashing", chunk_tokens=64
    ) as index:
        yield KVRagVectorStore(index)


def node(name: str, text: str, document: str, **metadata: Any) -> TextNode:
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document)}
    return TextNode(id_=name, text=text, metadata=metadata, relationships=source)


NODES = [
    node("n1", "The fox keeps the harbour ledger. " * 20, "d1", year=2019, source="web"),
    node("n2", "The owl counts coins at night.", "d1", year=2021),
    node("n3", "The wren mends nets by the quay.", "d2", year=2023),
]


def ids(store: KVRagVectorStore, **asked: Any) -> list[str]:
    return store.query(VectorStoreQuery(**{"similarity_top_k": 9, **asked})).ids or []


def test_times_in_metadata_and_filters(store: KVRagVectorStore) -> None:
    moments: dict[str, Any] = {
        "n1": datetime(2024, 3, 1, 12, 30),
        "n2": "2024-03-01T10:00",
        "n3": datetime(2024, 3, 1, 13, tzinfo=timezone(timedelta(hours=2))),
    }
    store.add([node(name, f"Fox {name}.", "d", when=when) for name, when in moments.items()])
    later = MetadataFilter(key="when", operator=FilterOperator.GTE, value="2024-03-01 10:30Z")
    filters = MetadataFilters(filters=[later])
    vector = store.client.embedding.embed_query("fox")
    assert sorted(ids(store, filters=filters, query_embedding=vector)) == ["n1", "n3"]
    assert sorted(one.node_id for one in store.get_nodes(filters=filters)) == ["n1", "n3"]
    assert len(KVRagRetriever(store.client, k=9, filters=filters).retrieve("fox")) == 2
    wanted = {"when": {"$lt": moments["n3"]}}  # a filter of kvrag's own takes times
    (found,) = KVRagRetriever(store.client, k=9, filters=wanted).retrieve("fox")
    assert "n2" in found.text


def test_nodes_come_back_as_they_were(store: KVRagVectorStore) -> None:
    assert store.add(NODES) == ["n1", "n2", "n3"]
    found = {one.node_id: one for one in store.get_nodes()}
    for one in NODES:
        again = found[one.node_id]
        assert again.get_content().strip() == one.text.strip()
        assert again.metadata == one.metadata
        assert again.ref_doc_id == one.ref_doc_id
    assert [one.node_id for one in store.get_nodes(["n2", "unknown"])] == ["n2"]
    result = store.query(VectorStoreQuery(query_str="who counts coins", similarity_top_k=1))
    assert (result.ids, [one.node_id for one in result.nodes or []]) == (["n2"], ["n2"])
    assert 0 < (result.similarities or [0])[0] <= 1


@pytest.mark.parametrize("mode", ["DEFAULT", "SPARSE", "TEXT_SEARCH", "HYBRID", "SEMANTIC_HYBRID"])
def test_queries(store: KVRagVectorStore, mode: str) -> None:
    store.add(NODES)
    asked: dict[str, Any] = {"query_str": "the", "mode": VectorStoreQueryMode[mode]}
    assert sorted(ids(store, **asked)) == ["n1", "n2", "n3"]
    plain = {**asked, "mode": VectorStoreQueryMode[mode].value}
    assert sorted(ids(store, **plain)) == ["n1", "n2", "n3"]
    year = MetadataFilters(filters=[MetadataFilter(key="year", value=2021)])
    assert ids(store, **asked, filters=year) == ["n2"]
    assert ids(store, **asked, node_ids=["n3"]) == ["n3"]
    assert sorted(ids(store, **asked, doc_ids=["d1"])) == ["n1", "n2"]
    assert ids(store, **asked, doc_ids=["d1"], node_ids=["n3"]) == []


async def test_queries_by_vector_and_bad_ones(store: KVRagVectorStore) -> None:
    store.add(NODES)
    vector = await KVRagEmbedding(store.client).aget_query_embedding("coins owl night")
    assert ids(store, query_embedding=vector, similarity_top_k=1) == ["n2"]
    with pytest.raises(ParameterError, match="neither a text nor a vector"):
        ids(store)
    for mode in (VectorStoreQueryMode.MMR, "other"):
        with pytest.raises(ParameterError, match="expected DEFAULT"):
            ids(store, query_str="x", mode=mode)
    with pytest.raises(ParameterError, match="unknown option"):
        store.query(VectorStoreQuery(query_str="x"), other=1)
    with pytest.raises(DocumentError, match="holds no text"):
        store.add([TextNode(id_="empty", text=" ")])


def test_deletes(store: KVRagVectorStore) -> None:
    store.add(NODES)
    store.delete("d1")
    assert [one.node_id for one in store.get_nodes()] == ["n3"]
    store.add(NODES)
    recent = MetadataFilters(filters=[MetadataFilter(key="year", value=2020, operator=">")])  # type: ignore[arg-type]
    store.delete_nodes(["n1", "n2"], recent)
    assert sorted(one.node_id for one in store.get_nodes()) == ["n1", "n3"]
    store.delete_nodes(["n1"])
    store.clear()
    assert store.get_nodes() == []


@pytest.mark.parametrize("strategy", list(DocstoreStrategy))
def test_a_pipeline_keeps_it_up_to_date(
    store: KVRagVectorStore, strategy: DocstoreStrategy
) -> None:
    pipeline = IngestionPipeline(
        transformations=[
            SentenceSplitter(chunk_size=64, chunk_overlap=0),
            KVRagEmbedding(store.client),
        ],
        docstore=SimpleDocumentStore(),
        docstore_strategy=strategy,
        vector_store=store,
    )

    def run(**texts: str) -> int:
        return len(pipeline.run(documents=[Document(id_=i, text=texts[i]) for i in texts]))

    def held() -> set[str]:
        return {one.get_content() for one in store.get_nodes()}

    assert run(fox="The fox keeps the ledger.", owl="The owl counts coins.") == 2
    assert run(fox="The fox keeps the ledger.", owl="The owl counts coins.") == 0
    assert run(fox="The fox sleeps.") == 1
    if strategy == DocstoreStrategy.UPSERTS:
        assert held() == {"The fox sleeps.", "The owl counts coins."}
    elif strategy == DocstoreStrategy.UPSERTS_AND_DELETE:
        assert held() == {"The fox sleeps."}
    else:
        assert len(held()) == 3
