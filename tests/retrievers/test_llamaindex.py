import copy
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from llama_index.core.schema import MetadataMode, QueryBundle
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
)

from kvrag.errors import IndexNotFoundError, ParameterError
from kvrag.ingest.embedding import HashingEmbedding
from kvrag.retrievers.llamaindex import KVRagRetriever
from tests.support.rag import PASSAGES, Rag


def test_nodes_read_as_the_chunks(rag: Rag) -> None:
    nodes = KVRagRetriever(rag.path, k=5).retrieve("harbour ledger of Varn, ships that enter")
    texts = [node.node.get_content(MetadataMode.LLM) for node in nodes]
    assert texts[0] == PASSAGES["ledger"]
    assert set(texts) == set(PASSAGES.values())
    assert [node.score for node in nodes] == sorted((n.score for n in nodes), reverse=True)
    best = nodes[0].node
    assert best.ref_doc_id == "ledger"
    assert best.metadata == {"source": "ledger", "ordinal": 0}
    (chunk,) = rag.index.get_chunks([best.node_id])
    assert chunk.text == texts[0]


async def test_async(rag: Rag) -> None:
    retriever = KVRagRetriever(rag.index, k=2)
    query = "Who repairs the clock?"
    later = await retriever.aretrieve(query)
    assert [n.node_id for n in later] == [n.node_id for n in retriever.retrieve(query)]


def test_query_by_vector_and_by_several_texts(rag: Rag) -> None:
    retriever = KVRagRetriever(rag.path, k=1)
    (vector,) = rag.index.embedding.embed([PASSAGES["fox"]])
    (node,) = retriever.retrieve(QueryBundle("unrelated", embedding=vector.tolist()))
    assert node.text == PASSAGES["fox"]
    (node,) = retriever.retrieve(QueryBundle("x", custom_embedding_strs=[PASSAGES["book"]] * 2))
    assert node.text == PASSAGES["book"]


def test_several_texts_are_embedded_as_questions(rag: Rag, monkeypatch: pytest.MonkeyPatch) -> None:
    (fox,) = rag.index.embedding.embed([PASSAGES["fox"]])
    embed = Mock(return_value=fox)
    monkeypatch.setattr(HashingEmbedding, "embed_query", embed)
    bundle = QueryBundle("x", custom_embedding_strs=["one", "two"])
    (node,) = KVRagRetriever(rag.path, k=1).retrieve(bundle)
    assert (node.text, embed.mock_calls) == (PASSAGES["fox"], [call("one"), call("two")])


def test_copied_and_pickled(rag: Rag) -> None:
    retriever = KVRagRetriever(rag.index, k=2)
    found = [node.node_id for node in retriever.retrieve("Who repairs the clock?")]
    for other in (copy.deepcopy(retriever), pickle.loads(pickle.dumps(retriever))):
        assert [node.node_id for node in other.retrieve("Who repairs the clock?")] == found


def test_bad_arguments(rag: Rag, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="k 0: expected a whole number"):
        KVRagRetriever(rag.path, k=0)
    with pytest.raises(IndexNotFoundError):
        KVRagRetriever(tmp_path / "nowhere").retrieve("q")


def test_filters(rag: Rag) -> None:
    def found(filters: MetadataFilters | dict[str, Any] | None) -> set[str]:
        nodes = KVRagRetriever(rag.path, k=9, filters=filters).retrieve("the harbour ledger")
        return {node.node.metadata["source"] for node in nodes}

    def where(operator: FilterOperator, value: Any) -> MetadataFilter:
        return MetadataFilter(key="source", operator=operator, value=value)

    first, second, *_ = PASSAGES
    one, other = where(FilterOperator.EQ, first), where(FilterOperator.IN, [second])
    assert found(MetadataFilters(filters=[one])) == {first}
    assert found(MetadataFilters(filters=[one, other])) == set()
    either = MetadataFilters(filters=[one, other], condition=FilterCondition.OR)
    assert found(either) == {first, second}
    not_first = where(FilterOperator.NE, first)
    assert found(MetadataFilters(filters=[either, not_first])) == {second}
    assert found(MetadataFilters(filters=[where(FilterOperator.ALL, [first])])) == {first}
    assert found({"source": second}) == {second}
    assert found(MetadataFilters(filters=[])) == set(PASSAGES)
    with pytest.raises(ParameterError, match="TEXT_MATCH"):
        found(MetadataFilters(filters=[where(FilterOperator.TEXT_MATCH, "x")]))
    with pytest.raises(ParameterError, match="AND or OR"):
        found(MetadataFilters(filters=[one], condition=FilterCondition.NOT))
