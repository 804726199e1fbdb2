"""Data sets in three layouts, read and checked whole before anything is computed.

MuSiQue layout: a JSON list of ``{question, answers, ctxs: [{title, text}]}``, each with an
optional ``type``. A context may have ``before``, a list of the chunks of its document before it,
and a question ``document_answers``, where the documents know what its contexts do not.
LongBench layout: a JSON line each of ``{input, context, answers, dataset}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrag.chunk import normalise_text
from kvrag.errors import ParameterError
from kvrag.tune.questions import JudgedQuestion
from kvrag_corpus import generate_corpus
from kvrag_corpus.grammar import UNKNOWN_ANSWER
from kvrag_corpus.questions import QuestionType

GENERATED = "generated"
DEFAULT_NUM_GENERATED = 1000

LEFT_OUT = "carried_over_left_out"
"""Type of the generated questions whose predecessor is in the document and not in the prompt."""

# The sets of LongBench whose answers are summaries.
_SUMMARIES = frozenset({"gov_report", "qmsum", "multi_news", "vcsum", "samsum"})
_PASSAGE = re.compile(r"^Passage \d+:\s*$", re.MULTILINE)
# About 500 tokens of English, the default length of a chunk.
_PIECE_CHARACTERS = 2000


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
        ``"generated"`` for the corpus generator's test split, or the path of a file: ``.jsonl``
        in LongBench layout, anything else in MuSiQue layout.
    num_questions
        The first so many; None takes all of a file, and 1,000 generated ones.
    seed, num_documents
        Of the generated set: its seed, and the chunks a question is given.
    with_left_out
        Ask carried-over questions of the generated set once more without their predecessor, behind
        all others.

    Raises
    ------
    ParameterError
        When the file is absent, empty or not of its layout; names record and field.
    """
    if num_questions is not None and num_questions < 1:
        raise ParameterError(f"{num_questions} questions: expected at least 1")
    if data == GENERATED:
        generated = _generate(num_questions or DEFAULT_NUM_GENERATED, seed, num_documents)
        return [*generated, *_without_predecessors(generated)] if with_left_out else generated
    path = Path(data).expanduser()
    if not path.is_file():
        raise ParameterError(
            f"no data set at {data!r}: expected 'generated', a JSON file in MuSiQue layout or a "
            "JSONL file in LongBench layout"
        )
    is_longbench = path.suffix == ".jsonl"
    read = _from_longbench if is_longbench else _from_musique
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{data}: cannot be read as UTF-8 text: {error}") from error
    records = _json_lines(text, data) if is_longbench else _json_list(text, data)
    # All of them are checked: a broken record is a broken file, asked for or not.
    questions = [read(_Record(value, place)) for place, value in records]
    if not questions:
        raise ParameterError(f"{data}: the data set is empty, it holds no question")
    return questions[:num_questions]


def _generate(num_questions: int, seed: int, num_documents: int) -> list[JudgedQuestion]:
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


def _json_list(text: str, data: str) -> Iterator[tuple[str, Any]]:
    values = _parsed(text, data)
    if not isinstance(values, list):
        raise ParameterError(f"{data}: expected a JSON list of records, found {_kind(values)}")
    return ((f"{data}, record {number}", value) for number, value in enumerate(values))


def _json_lines(text: str, data: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{data}, line {number}"
            yield place, _parsed(line, place)


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{place}: not JSON: {error}") from error


class _Record:
    """One JSON object, whose fields are asked for by name and checked."""

    def __init__(self, value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise ParameterError(f"{place}: expected an object, found {_kind(value)}")
        self._value = value
        self.place = place

    def text(self, field: str, default: str | None = None) -> str:
        """Return a string; one that must be there must say something."""
        value = self._get(field, lambda v: isinstance(v, str), "a string", default)
        if default is None and not value.strip():
            raise ParameterError(f"{self.place}: field {field!r} is empty")
        return str(value)

    def texts(self, field: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Return a list of strings, at least one unless there is a default."""
        if default is not None and self._value.get(field) in (None, []):
            return default
        value = self._get(
            field,
            lambda v: isinstance(v, list) and bool(v) and all(isinstance(item, str) for item in v),
            "a list of one string or more",
        )
        return tuple(value)

    def records(self, field: str) -> list[_Record]:
        """Return a list of objects, at least one."""
        value = self._get(field, lambda v: isinstance(v, list) and bool(v), "a list of objects")
        return [_Record(item, f"{self.place}, {field}[{i}]") for i, item in enumerate(value)]

    def _get(
        self, field: str, is_right: Callable[[Any], bool], expected: str, default: Any = None
    ) -> Any:
        value = self._value.get(field, default)
        if value is None:
            raise ParameterError(f"{self.place}: field {field!r} is missing: expected {expected}")
        if not is_right(value):
            raise ParameterError(
                f"{self.place}: field {field!r} is {_kind(value)}: expected {expected}"
            )
        return value


def _kind(value: Any) -> str:
    names = {list: "a list", dict: "an object", str: "a string", type(None): "null"}
    if value in ([], {}):
        return "empty"
    return names.get(type(value), f"a {type(value).__name__}")


def _from_musique(record: _Record) -> JudgedQuestion:
    texts = []
    before = []
    for context in record.records("ctxs"):
        title = context.text("title", default="").strip()
        text = normalise_text(context.text("text"))
        texts.append(normalise_text(f"{title}\n{text}") if title else text)
        before.append(tuple(map(normalise_text, context.texts("before", default=()))))
    return JudgedQuestion(
        place=record.place,
        type=record.text("type", default=""),
        question=record.text("question").strip(),
        answers=record.texts("answers"),
        texts=tuple(texts),
        before=tuple(before),
        document_answers=record.texts("document_answers", default=()),
    )


def _from_longbench(record: _Record) -> JudgedQuestion:
    name = record.text("dataset", default="")
    is_summary = name in _SUMMARIES
    # Summaries of LongBench ask nothing: their instruction is in the task's prompt.
    asked = record.text("input", default="" if is_summary else None).strip()
    return JudgedQuestion(
        place=record.place,
        type=name,
        question=asked or "What is a summary of the text above?",
        answers=record.texts("answers"),
        texts=_pieces(record.text("context")),
        is_summary=is_summary,
    )


def _pieces(context: str) -> tuple[str, ...]:
    """Cut a long context at its passages, or else into runs of whole paragraphs."""
    passages = [part for part in map(normalise_text, _PASSAGE.split(context)) if part]
    if len(passages) > 1:
        return tuple(passages)
    pieces: list[str] = []
    for paragraph in normalise_text(context).split("\n"):
        if pieces and len(pieces[-1]) + len(paragraph) < _PIECE_CHARACTERS:
            pieces[-1] += f"\n{paragraph}"
        else:
            pieces.append(paragraph)
    return tuple(piece for piece in map(normalise_text, pieces) if piece)
