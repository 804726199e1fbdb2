"""Generates a corpus: seeded, reproducible, with as many questions of each type as promised."""

from __future__ import annotations

from random import Random

from kvrag_corpus.context import Context, sample_context
from kvrag_corpus.corpus import ContextChunk, Corpus, CorpusQuestion, SourceDocument
from kvrag_corpus.grammar import Grammar
from kvrag_corpus.names import NameSource, Split
from kvrag_corpus.people import ChunkKind
from kvrag_corpus.questions import TYPE_SHARES, Question

QUESTIONS_PER_CONTEXT = 5


def generate_corpus(
    seed: int,
    split: Split = "test",
    num_questions: int = 1000,
    docs_per_question: int = 5,
    grammar: Grammar | None = None,
) -> Corpus:
    """Generate documents and questions about them.

    Parameters
    ----------
    seed
        The same seed gives the same corpus.
    split
        Whose names to use; splits share none.
    num_questions
        How many questions.
    docs_per_question
        How many chunks each question is given, 1 to 6.
    grammar
        How varied the text is.

    Returns
    -------
    Corpus
        Every five questions share one context. No two persons in the documents have the same
        name; a continuation is the second paragraph of its person's file.

    Raises
    ------
    ValueError
        When a count is out of range, the split is unknown, or it has too few names.
    """
    if num_questions < 1:
        raise ValueError(f"num_questions must be at least 1, not {num_questions}")
    if not 1 <= docs_per_question <= 6:
        raise ValueError(f"docs_per_question must be 1 to 6, not {docs_per_question}")
    rng = Random(f"corpus {split} {seed} {docs_per_question}")
    subjects, values = NameSource(split, rng), NameSource(split, rng)
    documents: list[SourceDocument] = []
    questions: list[CorpusQuestion] = []
    while len(questions) < num_questions:
        count = min(QUESTIONS_PER_CONTEXT, num_questions - len(questions))
        context = sample_context(
            rng, values, docs_per_question, count, TYPE_SHARES, grammar or Grammar(), subjects
        )
        chunks = _file_chunks(context, documents)
        for question in context.questions:
            questions.append(_corpus_question(question, chunks, len(questions)))
    return Corpus(tuple(documents), tuple(questions))


def _file_chunks(context: Context, documents: list[SourceDocument]) -> tuple[ContextChunk, ...]:
    """Append the files of `context` to `documents`; return its chunks with their places.

    An intro and its continuation are one file of two paragraphs; an update is a separate file, as a
    later report would be.
    """
    files: dict[tuple[int, bool], list[int]] = {}
    for index, chunk in enumerate(context.chunks):
        files.setdefault((id(chunk.person), chunk.kind is ChunkKind.UPDATE), []).append(index)
    chunks: dict[int, ContextChunk] = {}
    for indices in files.values():
        document_id = f"note-{len(documents):05d}"
        texts = tuple(context.texts[index] for index in indices)
        documents.append(SourceDocument(document_id, texts))
        for paragraph, index in enumerate(indices):
            chunks[index] = ContextChunk(document_id, paragraph, texts[paragraph])
    return tuple(chunks[index] for index in range(len(context.chunks)))


def _corpus_question(
    question: Question, chunks: tuple[ContextChunk, ...], number: int
) -> CorpusQuestion:
    return CorpusQuestion(
        question_id=f"question-{number:05d}",
        type=question.type,
        question=question.text,
        answers=question.answers,
        chunks=chunks,
        supporting=question.supporting,
    )
