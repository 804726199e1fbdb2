"""What LangChain's suites do not ask of retriever, vector store and embeddings."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, index

from kvrag.chunk import normalise_text
from kvrag.errors import DocumentError, IndexMismatchError, IndexNotFoundError, ParameterError
from kvrag.llms.langchain import KVRagLLM
from kvrag.retrievers.langchain import KVRagEmbeddings, KVRagRetriever, KVRagVectorStore
from tests.support.rag import PASSAGES, Rag


@pytest.fixture
def store(rag: Rag, tmp_path: Path) -> Iterator[KVRagVectorStore]:
    store = KVRagVectorStore.from_texts(
        list(PASSAGES.values()),
        KVRagEmbeddings("hashing"),
        [{"title": name} for name in PASSAGES],
        ids=list(PASSAGES),
        path=tmp_path / "index",
        model=rag.model_folder,
        chunk_tokens=64,
    )
    yield store
    store.index.close()


def test_retriever_returns_chunks_as_they_are(rag: Rag) -> None:
    retriever = KVRagRetriever(index=rag.index, k=5)
    documents = retriever.invoke("harbour ledger of Varn, ships that enter")
    assert {document.page_content for document in documents} == set(PASSAGES.values())
    best = documents[0]
    assert best.page_content == PASSAGES["ledger"]
    assert best.metadata == {"source": "ledger", "ordinal": 0}
    (chunk,) = rag.index.get_chunks([str(best.id)])
    assert chunk.text == best.page_content


@pytest.mark.parametrize("door", [KVRagRetriever, KVRagVectorStore])
def test_copied_and_pickled(rag: Rag, door: Any) -> None:
    made = door(index=rag.index)
    ask = "invoke" if door is KVRagRetriever else "similarity_search"
    found = getattr(made, ask)("Who repairs the clock?")
    copied, restored = copy.deepcopy(made), pickle.loads(pickle.dumps(made))
    assert copied.index is made.index is rag.index
    for other in (copied, restored):
        assert getattr(other, ask)("Who repairs the clock?") == found


def test_bad_arguments_of_the_retriever(rag: Rag, tmp_path: Path) -> None:
    for wrong in ({"k": 0}, {"top_k": 3}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            KVRagRetriever(index=rag.path, **wrong)
    with pytest.raises(ParameterError, match=r"k -1: expected a whole number"):
        KVRagRetriever(index=rag.path).invoke("q", k=-1)
    with pytest.raises(TypeError, match="top_k"):
        KVRagRetriever(index=rag.path).invoke("q", top_k=3)
    with pytest.raises(IndexNotFoundError):
        KVRagRetriever(index=tmp_path / "nowhere").invoke("q")


def test_store_answers_with_reuse(store: KVRagVectorStore) -> None:
    documents = store.as_retriever(search_kwargs={"k": 2}).invoke("harbour ledger of Varn")
    llm = KVRagLLM(index=store.index, max_tokens=2)
    prompt = "\n\n".join(document.page_content for document in documents)
    info = llm.generate([prompt]).generations[0][0].generation_info
    assert info["report"]["num_cached"] > 20


def test_store_scores(store: KVRagVectorStore) -> None:
    query = PASSAGES["clock"]
    scored = store.similarity_search_with_score(query, k=3)
    assert [score for _, score in scored] == sorted((s for _, s in scored), reverse=True)
    assert scored[0][0] == Document(id="clock", page_content=query, metadata={"title": "clock"})
    assert scored[0][1] == pytest.approx(1.0, abs=1e-5)
    relevant = store.similarity_search_with_relevance_scores(query, k=3, score_threshold=0.99)
    assert [document.id for document, _ in relevant] == ["clock"]
    vector = store.embeddings.embed_query(query)
    assert store.similarity_search_by_vector(vector, k=1)[0].id == "clock"


def test_store_mmr(store: KVRagVectorStore) -> None:
    near = store.max_marginal_relevance_search(PASSAGES["clock"], k=3, lambda_mult=1.0)
    scored = store.similarity_search_with_score(PASSAGES["clock"], k=3)
    assert near == [document for document, _ in scored]
    retriever = store.as_retriever(search_type="mmr", search_kwargs={"k": 2, "lambda_mult": 0.0})
    assert len({document.id for document in retriever.invoke(PASSAGES["clock"])}) == 2
    store.delete()
    assert store.max_marginal_relevance_search("anything") == []


def test_a_long_document_is_found_by_chunks_that_say_where_they_stood(
    store: KVRagVectorStore,
) -> None:
    store.delete()
    text = "\n\n".join(PASSAGES.values())
    assert store.add_texts([text], [{"title": "All"}], ids=["all"]) == ["all"]
    parts = store.get_by_ids(["all"])
    assert len(parts) > 1
    for ordinal, part in enumerate(parts):
        place = part.metadata["start"]
        assert normalise_text(text)[place : place + len(part.page_content)] == part.page_content
        assert (part.metadata["source"], part.metadata["ordinal"]) == ("all", ordinal)
        assert part.metadata["title"] == "All"
    found = store.similarity_search(PASSAGES["clock"], k=10)
    assert {document.id for document in found} == {document.id for document in parts}
    assert store.get_by_ids([str(found[0].id)]) == [found[0]]
    store.delete([str(found[0].id)])
    assert len(store.get_by_ids(["all"])) == len(found) - 1
    store.delete(["all"])
    assert store.similarity_search("anything") == []


def test_store_ids_from_content(store: KVRagVectorStore) -> None:
    document = Document(page_content="A new passage about the quay.", metadata={"page": 3})
    first = store.add_documents([document])
    assert store.add_documents([document]) == first
    assert len(store.similarity_search("quay", k=20)) == len(PASSAGES) + 1
    with pytest.raises(ParameterError, match="2 ids"):
        store.add_documents([document], ids=["a", "b"])


def test_store_document_without_text(store: KVRagVectorStore) -> None:
    with pytest.raises(DocumentError, match="blank"):
        store.add_documents([Document(page_content=" \n", id="blank")])


def test_store_refuses_unknown_options(store: KVRagVectorStore) -> None:
    for call in (
        lambda: store.similarity_search("q", filters={"a": 1}),
        lambda: store.delete(["a"], force=True),
        lambda: store.add_documents([], batch=3),
    ):
        with pytest.raises(ParameterError, match="unknown option"):
            call()


@pytest.mark.parametrize(
    ("given", "named"),
    [({"codec": "lossless"}, "codec='packed'"), ({"chunk_tokens": 128}, "chunk_tokens=64")],
)
def test_store_there_was_made_otherwise(
    rag: Rag, store: KVRagVectorStore, given: dict[str, Any], named: str
) -> None:
    options: dict[str, Any] = {"path": store.index.path, "model": rag.model_folder}
    with pytest.raises(IndexMismatchError, match=named):
        KVRagVectorStore.from_texts(["new"], KVRagEmbeddings("hashing"), **options, **given)
    same: dict[str, Any] = {"codec": "packed", "chunk_tokens": 64}
    again = KVRagVectorStore.from_texts([], KVRagEmbeddings("hashing"), **options, **same)
    assert again.similarity_search("new", k=10) == store.similarity_search("new", k=10)
    again.index.close()


def test_store_made_with_foreign_embeddings(rag: Rag, tmp_path: Path) -> None:
    class Sided(DeterministicFakeEmbedding):
        def embed_query(self, text: str) -> list[float]:
            return super().embed_query({"red": "two fish"}.get(text, text))

    options: dict[str, Any] = {"path": tmp_path / "index", "model": rag.model_folder}
    foreign = Sided(size=6)
    store = KVRagVectorStore.from_texts(["one fish", "two fish"], foreign, **options)
    ((document, score),) = store.similarity_search_with_score("red", k=1)
    assert (document.page_content, score) == ("two fish", pytest.approx(1.0))
    store.index.close()
    again = KVRagVectorStore.from_texts([], foreign, **options)
    assert again.similarity_search("two fish", k=1)[0].page_content == "two fish"
    again.index.close()
    with pytest.raises(IndexMismatchError):
        KVRagVectorStore(tmp_path / "index").similarity_search("fish")


def test_filters(store: KVRagVectorStore) -> None:
    for number in range(4):
        place = {"n": number, "lang": "en" if number % 2 else "de"}
        store.add_texts([f"The fox number {number}."], [place], ids=[f"fox {number}"])
    vector = store.embeddings.embed_query("fox")
    wanted = {"n": {"$gte": 1}, "lang": "en"}
    for found in (
        store.similarity_search("fox", 9, filter=wanted),
        [one for one, _ in store.similarity_search_with_score("fox", 9, filter=wanted)],
        store.similarity_search_by_vector(vector, 9, filter=wanted),
        store.max_marginal_relevance_search("fox", 9, filter=wanted),
        [one for one, _ in store.similarity_search_with_relevance_scores("fox", 9, filter=wanted)],
        store.as_retriever(search_kwargs={"k": 9, "filter": wanted}).invoke("fox"),
        KVRagRetriever(index=store.index, k=9, filter=wanted).invoke("fox"),
        KVRagRetriever(index=store.index, k=9).invoke("fox", filter=wanted),
    ):
        assert sorted(one.metadata["n"] for one in found) == [1, 3]
    with pytest.raises(ParameterError, match="unknown operator"):
        store.similarity_search("fox", filter={"n": {"$like": 1}})


def test_a_filter_by_source_means_the_documents_metadata(store: KVRagVectorStore) -> None:
    pages = [
        Document(id=name, page_content=f"The {name} sleeps.", metadata={"source": f"{name}.md"})
        for name in ("fox", "owl")
    ]
    store.add_documents(pages)
    wanted = {"$or": [{"source": "owl.md"}, {"source": "absent.md"}]}
    assert [one.id for one in store.similarity_search("fox", 9, filter=wanted)] == ["owl"]
    assert not store.similarity_search("fox", 9, filter={"source": "owl"})
    found = KVRagRetriever(index=store.index, k=9, filter={"source": "owl"}).invoke("fox")
    assert [one.page_content for one in found] == ["The owl sleeps."]


@pytest.mark.parametrize("cleanup", ["incremental", "full", "scoped_full"])
def test_langchain_index_keeps_the_store_up_to_date(store: KVRagVectorStore, cleanup: Any) -> None:
    manager = InMemoryRecordManager("kvrag")
    manager.create_schema()

    def run(*texts: str) -> dict[str, int]:
        found = [Document(text, metadata={"source": "notes", "n": 1}) for text in texts]
        done = index(
            found, manager, store, cleanup=cleanup, source_id_key="source", key_encoder="blake2b"
        )
        return {name: count for name, count in done.items() if count}  # type: ignore[misc]

    assert run("The fox.", "The owl.") == {"num_added": 2}
    assert run("The fox.", "The owl.") == {"num_skipped": 2}
    assert run("The fox.", "The wren.") == {"num_added": 1, "num_skipped": 1, "num_deleted": 1}
    held = [chunk.page_content for chunk in store.similarity_search("the", 9, filter={"n": 1})]
    assert sorted(held) == ["The fox.", "The wren."]
