"""Documents of other vector stores, indexed as they were cut there."""

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.documents import Document as LangChainDocument
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import MockEmbedding, StorageContext, VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore

from kvrag.chunk import Document
from kvrag.errors import ParameterError
from kvrag.ingest.adopting import adopted
from kvrag.ingest.index import Index

LONG = " ".join(f"The clerk of pier {n} notes the ship, its cargo and its hour." for n in range(30))
TEXTS = {"a": "The fox keeps the ledger of the harbour.", "b": LONG, "c": "The owl counts coins."}


class FaissLike:
    """What LangChain's FAISS shows of itself; its package is no dependency."""

    class Docstore:
        def search(self, name: str) -> LangChainDocument | str:
            if name not in TEXTS:
                return f"ID {name} not found."
            return LangChainDocument(TEXTS[name], metadata={"source": "notes"})

    def __init__(self, *names: str) -> None:
        self.docstore = self.Docstore()
        self.index_to_docstore_id = dict(enumerate(names or TEXTS))


class ChromaLike:
    """What a Chroma collection shows of itself."""

    def __init__(self, num: int) -> None:
        self._ids = [f"id {n}" for n in range(num)]

    def peek(self) -> None: ...

    def get(self, *, limit: int, offset: int, include: list[str]) -> dict[str, Any]:
        assert include == ["documents", "metadatas"]
        ids = self._ids[offset : offset + limit]
        return {"ids": ids, "documents": [f"text of {one}" for one in ids], "metadatas": None}


def in_memory() -> InMemoryVectorStore:
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
    store.add_texts(list(TEXTS.values()), [{"source": "notes"}] * 3, ids=list(TEXTS))
    return store


def nodes() -> list[TextNode]:
    return [
        TextNode(id_=name, text=text, metadata={"source": "notes"}) for name, text in TEXTS.items()
    ]


def docstore() -> SimpleDocumentStore:
    store = SimpleDocumentStore()
    store.add_documents(nodes())
    return store


def documents() -> Iterator[LangChainDocument]:
    for name, text in TEXTS.items():
        yield LangChainDocument(text, id=name, metadata={"source": "notes"})


@pytest.mark.parametrize(
    "make",
    [
        FaissLike,
        in_memory,
        nodes,
        docstore,
        documents,
        lambda: VectorStoreIndex(nodes(), embed_model=MockEmbedding(8)),
        lambda: StorageContext.from_defaults(docstore=docstore()),
    ],
)
def test_every_document_is_one_chunk(index: Index, make: Any) -> None:
    report = index.add(adopted(make()))
    assert report.ok, report.failed
    assert report.num_chunks == len(TEXTS)
    for name, text in TEXTS.items():
        (chunk,) = index.get_chunks(index.catalog.chunk_ids_of(name))
        assert chunk.text == text
        assert chunk.metadata["source"] == "notes"
    assert (
        max(len(chunk.token_ids) for chunk in index.get_chunks(index.catalog.chunk_ids_of("b")))
        > 64
    )
    again = index.add(adopted(make()))
    assert len(again.unchanged) == len(TEXTS)


def test_a_large_chroma_is_read_in_pages(index: Index) -> None:
    found = [one.value for one in adopted(ChromaLike(2500))]
    assert [one.source for one in found] == [f"id {n}" for n in range(2500)]
    assert found[2400].text == "text of id 2400"


def test_text_longer_than_the_window_is_cut(index: Index) -> None:
    report = index.add(adopted([Document("huge", " ".join([LONG] * 60))]))
    assert report.ok
    assert report.num_chunks > 1


@pytest.mark.parametrize("store", [object(), "a path", {"a": 1}, 3, SimpleDocumentStore(), None])
def test_a_store_that_lists_nothing_is_refused(store: Any) -> None:
    with pytest.raises(ParameterError, match="does not list its documents"):
        list(adopted(store))


def test_a_faiss_without_its_documents_is_refused() -> None:
    with pytest.raises(ParameterError, match="names the document 'gone' and does not hold it"):
        list(adopted(FaissLike("gone")))
