"""Documents that a framework loaded are ingested as they are and found in its prompts."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate
from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import MetadataMode, TextNode

from kvrag.ingest.index import Index
from kvrag.llms.langchain import ChatKVRag
from kvrag.llms.llamaindex import KVRagLLM
from tests.support.rag import PASSAGES, Rag


@pytest.fixture
def index(rag: Rag, tmp_path: Path) -> Iterator[Index]:
    with Index.create(tmp_path / "index", model=rag.model_folder, embedding="hashing") as index:
        yield index


def test_langchain_documents(index: Index) -> None:
    documents = [
        Document(page_content=f"  {text}\r\n", metadata={"title": name})
        for name, text in PASSAGES.items()
    ]
    index.add(documents)
    chat = ChatKVRag(index=index, max_tokens=2)
    prompt = PromptTemplate.from_template("{context}\n\nQuestion: {input}")
    # The chain joins the documents as they were loaded, outer whitespace included.
    message = (create_stuff_documents_chain(chat, prompt, output_parser=_same)).invoke(
        {"context": documents, "input": "Who keeps the ledger?"}
    )
    report = message.response_metadata["report"]
    assert report["num_chunks"] == len(PASSAGES)
    assert report["num_cached"] > report["num_tokens"] / 2


def _same(message: object) -> object:
    return message


def test_llamaindex_nodes_with_metadata(index: Index) -> None:
    nodes = [
        TextNode(text=text, metadata={"title": name, "year": 1900})
        for name, text in PASSAGES.items()
    ]
    assert nodes[0].get_content(MetadataMode.LLM) != nodes[0].text
    index.add(nodes)
    llm = KVRagLLM(index=index, max_tokens=2)
    theirs = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=4))
    found = theirs.as_retriever(similarity_top_k=3).retrieve("Who keeps the ledger?")
    prompt = "\n\n".join(node.node.get_content(MetadataMode.LLM) for node in found)
    raw = llm.chat([ChatMessage(prompt)]).raw
    assert raw["report"]["num_chunks"] == 3
    assert {source["source"] for source in raw["sources"]} == {node.node_id for node in found}


@pytest.mark.parametrize(
    ("module", "framework"),
    [
        ("kvrag.llms.langchain", "langchain_core.callbacks"),
        ("kvrag.retrievers.langchain", "langchain_core.callbacks"),
        ("kvrag.llms.llamaindex", "llama_index.core.base.llms.generic_utils"),
        ("kvrag.retrievers.llamaindex", "llama_index.core.base.base_retriever"),
    ],
)
def test_framework_missing(module: str, framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, framework, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    extra = "langchain" if "langchain" in module else "llama-index"
    with pytest.raises(ImportError, match=rf"kvrag\[{extra}\]"):
        __import__(module)
