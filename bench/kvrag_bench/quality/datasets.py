"""Data sets of `kvrag bench quality`: generated ones, and files (`kvrag_bench.judge.datasets`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvrag.chunk import normalise_text
from kvrag.errors import ParameterError
from kvrag_bench.judge.datasets import read_questions
from kvrag_bench.judge.questions import JudgedQuestion
from kvrag_bench.quality.handbook import handbook_pages
from kvrag_corpus import generate_corpus
from kvrag_corpus.grammar import UNKNOWN_ANSWER
from kvrag_corpus.questions import QuestionType
from kvrag_corpus.real import cut, generate_set

GENERATED = "generated"
MUSIQUE = "musique"
DEFAULT_NUM_GENERATED = 1000

LEFT_OUT = "carried_over_left_out"
"""Type of the generated questions whose predecessor is in the document and not in the prompt."""


def load_questions(
    data: str,
    num_questions: int | None = None,
    *,
    seed: int = 2024,
    num_documents: int = 5,
    with_left_out: bool = False,
) -> list[JudgedQuestion]:
    """Read a data set, or generate one.

    Parameters
    ----------
    data
        ``"generated"`` for the corpus generator's test split, or the path of a file
        (`read_questions`).
    num_questions
        Number of questions, from the first; None takes all of a file, and 1,000 generated ones.
    seed, num_documents
        Seed of the generated set, and the number of chunks that a question is given.
    with_left_out
        Ask carried-over questions of the generated set once more without their predecessor, after
        all others.

    Raises
    ------
    ParameterError
        When the file is absent, empty or not of its layout; names record and field.
    """
    if data != GENERATED:
        return read_questions(data, num_questions)
    if num_questions is None:
        num_questions = DEFAULT_NUM_GENERATED
    generated = _generate(num_questions, seed, num_documents)
    return [*generated, *_without_predecessors(generated)] if with_left_out else generated


def _generate(num_questions: int, seed: int, num_documents: int) -> list[JudgedQuestion]:
    if num_questions < 1:
        raise ParameterError(f"{num_questions} questions: expected at least 1")
    try:
        corpus = generate_corpus(
            seed, split="test", num_questions=num_questions, docs_per_question=num_documents
        )
    except ValueError as error:
        raise ParameterError(f"cannot generate this set: {error}") from error
    paragraphs = {
        document.document_id: tuple(map(normalise_text, document.paragraphs))
        for document in corpus.documents
    }
    return [
        JudgedQuestion(
            place=asked.question_id,
            type=str(asked.type),
            question=asked.question,
            answers=asked.answers,
            texts=tuple(normalise_text(chunk.text) for chunk in asked.chunks),
            before=tuple(paragraphs[c.document_id][: c.paragraph] for c in asked.chunks),
        )
        for asked in corpus.questions
    ]


def load_suite(
    sets: Sequence[str],
    *,
    seed: int = 2024,
    num_questions_per_set: int = 50,
    musique: str | None = None,
) -> list[JudgedQuestion]:
    """Generate sets of the real suite.

    Parameters
    ----------
    sets
        Names of `kvrag_corpus.real.SETS`, and ``musique``. The questions of ``biography:4`` have
        the type ``biography 4``.
    seed
        The same seed gives the same questions.
    num_questions_per_set
        Number of questions of each set; of ``musique`` at most as many as the file has.
    musique
        A file in MuSiQue layout: the questions of the set ``musique``, and the text in which
        ``needle`` and ``needles`` are hidden. Without it they are hidden in the handbook that
        ships with kvrag.

    Raises
    ------
    ParameterError
        When there is no set of a name, or the file is absent or not of its layout.
    """
    if num_questions_per_set < 1:
        raise ParameterError(f"{num_questions_per_set} questions of each set: expected at least 1")
    pages = handbook_pages()
    prose = [chunk for page in pages for chunk in cut(page)]
    from_file: list[JudgedQuestion] = []
    if musique is not None:
        from_file = read_questions(musique)
        prose = list(dict.fromkeys(text for question in from_file for text in question.texts))
    suite = []
    for name in sets:
        if name != MUSIQUE:
            suite += _generated(name, seed, num_questions_per_set, prose, pages)
        elif from_file:
            suite += [replace(q, type=MUSIQUE) for q in from_file[:num_questions_per_set]]
        else:
            raise ParameterError(f"set {MUSIQUE!r}: name the file that it is read from")
    return suite


def _generated(
    name: str, seed: int, num_questions: int, prose: Sequence[str], pages: Sequence[str]
) -> list[JudgedQuestion]:
    try:
        questions = generate_set(name, seed, num_questions, prose=prose, pages=pages)
    except ValueError as error:
        raise ParameterError(str(error)) from error
    kind = name.replace(":", " ")
    return [
        JudgedQuestion(
            place=f"{kind}, question {number}",
            type=kind,
            question=asked.question,
            answers=asked.answers,
            texts=tuple(map(normalise_text, asked.chunks)),
            is_summary=asked.is_summary,
            before=tuple(tuple(map(normalise_text, earlier)) for earlier in asked.before),
            choices=asked.choices,
        )
        for number, asked in enumerate(questions)
    ]


def _without_predecessors(questions: list[JudgedQuestion]) -> Iterator[JudgedQuestion]:
    """Yield carried-over questions without the one chunk that says who their subject is.

    What is left of the prompt does not tell whom the chunk with the answer is about.
    """
    for question in questions:
        if question.type != QuestionType.CARRIED_OVER:
            continue
        (name,) = [w.strip("?.,") for w in question.question.split()[1:] if w[0].isupper()]
        # "NAME the baker": other chunks that hold the name say only to whom somebody sells cloth.
        kept = [number for number, text in enumerate(question.texts) if f"{name} the " not in text]
        (answer_at,) = [
            number
            for number, passage in enumerate(question.passages)
            if passage.before and question.answers[0] in passage.text
        ]
        if len(kept) == len(question.texts) - 1 and answer_at in kept:
            yield replace(
                question,
                place=f"{question.place}, left out",
                type=LEFT_OUT,
                answers=(UNKNOWN_ANSWER,),
                texts=tuple(question.texts[number] for number in kept),
                before=tuple(question.before[number] for number in kept),
                document_answers=question.answers,
            )
