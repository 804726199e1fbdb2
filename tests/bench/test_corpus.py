"""The corpus generator: reproducible, labelled, with answers that stand in the chunks."""

import json
from collections import Counter

import pytest

from kvrag_bench.judge.exact_match import exact_match
from kvrag_corpus import (
    SPLITS,
    TYPE_SHARES,
    UNKNOWN_ANSWER,
    Corpus,
    QuestionType,
    generate_corpus,
    names_of_split,
    split_of_name,
)
from kvrag_corpus.names import name_heads, name_tails

ANSWERABLE = {
    QuestionType.INSIDE,
    QuestionType.CARRIED_OVER,
    QuestionType.TWO_HOP,
    QuestionType.SUPERSEDED,
}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return generate_corpus(seed=7, split="test", num_questions=1000)


def names_in(corpus: Corpus) -> set[str]:
    words = {
        word.strip(".,")
        for document in corpus.documents
        for paragraph in document.paragraphs
        for word in paragraph.split()
    }
    heads = tuple(name_heads())
    every = {head + tail for head in heads for tail in name_tails()}
    return words & every


def test_same_seed_gives_the_same_corpus(corpus: Corpus) -> None:
    assert generate_corpus(seed=7, split="test", num_questions=1000) == corpus
    assert generate_corpus(seed=8, split="test", num_questions=1000) != corpus


def test_splits_share_no_names() -> None:
    names = [set(names_of_split(split)) for split in SPLITS]
    assert sum(map(len, names)) == len(set.union(*names)) == len(name_heads()) * len(name_tails())
    for split in SPLITS:
        used = names_in(generate_corpus(seed=1, split=split, num_questions=100))
        assert len(used) > 100
        assert {split_of_name(name) for name in used} == {split}


def test_types_come_in_the_promised_shares(corpus: Corpus) -> None:
    counts = Counter(question.type for question in corpus.questions)
    assert sum(counts.values()) == 1000
    assert set(counts) == set(TYPE_SHARES)
    assert counts[QuestionType.CARRIED_OVER] >= 400
    for kind in ANSWERABLE | {QuestionType.UNANSWERABLE}:
        assert counts[kind] >= 60


def test_answers_are_copied_from_a_supporting_chunk(corpus: Corpus) -> None:
    for question in corpus.questions:
        texts = [chunk.text for chunk in question.chunks]
        if question.type in ANSWERABLE:
            assert any(question.answers[0] in texts[index] for index in question.supporting)
        else:
            assert question.answers == (UNKNOWN_ANSWER,)


def subject_of(question: str) -> str:
    return next(
        word.strip("?")
        for word in reversed(question.split())
        if word[0].isupper() and word not in ("Where", "Who", "Which")
    )


def test_a_carried_over_answer_stands_apart_from_its_subject(corpus: Corpus) -> None:
    orphans = 0
    for question in corpus.questions:
        name = subject_of(question.question)
        texts = [chunk.text for chunk in question.chunks]
        if question.type is QuestionType.CARRIED_OVER:
            earlier, later = question.supporting
            assert earlier < later
            assert name in texts[earlier]
            assert question.answers[0] in texts[later]
            assert name not in texts[later]
        if question.type is QuestionType.CARRIED_OVER_ORPHAN:
            orphans += 1
            assert not any(name in text for text in texts)
    assert orphans >= 10


def test_two_hops_may_say_the_person_in_between(corpus: Corpus) -> None:
    for question in corpus.questions:
        if question.type is not QuestionType.TWO_HOP:
            assert len(question.answers) == 1
            continue
        bare, full = question.answers
        between, answer = full.split(": ")
        assert answer == bare
        # Its own document names it as its subject, and the other one as a value.
        first, second = sorted(
            (question.chunks[index].text for index in question.supporting),
            key=lambda text: f", {between} the " in text,
        )
        assert f" {between}." in first
        assert f", {between} the " in second
        assert f" {answer}." in second
        assert exact_match(full, question.answers) == 1
        assert exact_match(bare, question.answers) == 1
        assert exact_match(f"{answer}: {answer}", question.answers) == 0


def test_superseded_values_are_corrected_later(corpus: Corpus) -> None:
    for question in corpus.questions:
        if question.type is QuestionType.SUPERSEDED:
            old, new = question.supporting
            assert old < new
            assert " now " in question.chunks[new].text
            assert question.answers[0] not in question.chunks[old].text


def test_files_read_back_as_written(corpus: Corpus, tmp_path) -> None:
    corpus.write(tmp_path)
    assert Corpus.read(tmp_path) == corpus
    rows = json.loads((tmp_path / "questions.json").read_text("utf-8"))
    assert {"question", "answers", "ctxs", "type", "id"} <= set(rows[0])
    assert {"title", "text"} <= set(rows[0]["ctxs"][0])
