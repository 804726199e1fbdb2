"""The retriever, tool, vector-store and embeddings suites that LangChain ships."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import BaseTool, create_retriever_tool
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import (
    EmbeddingsIntegrationTests,
    RetrieversIntegrationTests,
    ToolsIntegrationTests,
    VectorStoreIntegrationTests,
)
from langchain_tests.unit_tests import EmbeddingsUnitTests

from kvrag.retrievers.langchain import KVRagEmbeddings, KVRagRetriever, KVRagVectorStore
from tests.support.rag import Rag


class TestKVRagRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _use_index(self, rag: Rag) -> None:
        self.rag = rag

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return KVRagRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"index": str(self.rag.path)}

    @property
    def retriever_query_example(self) -> str:
        return "Who keeps the harbour ledger?"


class TestRetrieverTool(ToolsIntegrationTests):
    @pytest.fixture(autouse=True)
    def _use_index(self, rag: Rag) -> None:
        self.rag = rag

    @property
    def tool_constructor(self) -> BaseTool:
        retriever = KVRagRetriever(index=str(self.rag.path))
        return create_retriever_tool(
            retriever, "passages", "About Varn.", response_format="content_and_artifact"
        )

    @property
    def tool_invoke_params_example(self) -> dict[str, Any]:
        return {"query": "Who keeps the harbour ledger?"}


class TestKVRagVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, rag: Rag, tmp_path: Path) -> Iterator[VectorStore]:
        store = KVRagVectorStore.from_texts(
            [], self.get_embeddings(), path=tmp_path / "index", model=rag.model_folder
        )
        yield store
        store.index.close()


class TestMiniLMUnit(EmbeddingsUnitTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return KVRagEmbeddings


class TestMiniLMIntegration(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return KVRagEmbeddings
