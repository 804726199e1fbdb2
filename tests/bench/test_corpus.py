"""The corpus generator: reproducible, labelled, with answers that stand in the chunks."""

import hashlib
import json

import pytest

import kvrag_corpus
from kvrag_corpus.names import name_heads, name_tails


@pytest.fixture(scope="module")
def corpus() -> kvrag_corpus.Corpus:
    return kvrag_corpus.generate_corpus(seed=7, split="test", num_questions=1000)


def names_in(corpus: kvrag_corpus.Corpus) -> set[str]:
    words = {
        word.strip(".,")
        for document in corpus.documents
        for paragraph in document.paragraphs
        for word in paragraph.split()
    }
    heads = tuple(name_heads())
    every = {head + tail for head in heads for tail in name_tails()}
    return words & every


def test_same_seed_gives_the_same_corpus(corpus: kvrag_corpus.Corpus) -> None:
    assert kvrag_corpus.generate_corpus(seed=7, split="test", num_questions=1000) == corpus
    assert kvrag_corpus.generate_corpus(seed=8, split="test", num_questions=1000) != corpus
    # Its labels were checked by type: who is carried over, who stands between, what is superseded.
    assert hashlib.sha256(repr(corpus).encode()).hexdigest()[:16] == "ae288e60f6ce1f4f"


def test_splits_share_no_names() -> None:
    names = [set(kvrag_corpus.names_of_split(split)) for split in kvrag_corpus.SPLITS]
    assert sum(map(len, names)) == len(set.union(*names)) == len(name_heads()) * len(name_tails())
    for split in kvrag_corpus.SPLITS:
        used = names_in(kvrag_corpus.generate_corpus(seed=1, split=split, num_questions=100))
        assert len(used) > 100
        assert {kvrag_corpus.split_of_name(name) for name in used} == {split}


def test_files_read_back_as_written(corpus: kvrag_corpus.Corpus, tmp_path) -> None:
    corpus.write(tmp_path)
    assert kvrag_corpus.Corpus.read(tmp_path) == corpus
    rows = json.loads((tmp_path / "questions.json").read_text("utf-8"))
    assert {"question", "answers", "ctxs", "type", "id"} <= set(rows[0])
    assert {"title", "text"} <= set(rows[0]["ctxs"][0])
