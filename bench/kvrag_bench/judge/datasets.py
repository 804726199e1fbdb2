"""Data sets in two layouts, read and checked completely before anything is computed.

MuSiQue layout: a JSON list of ``{question, answers, ctxs: [{title, text}]}``, each with an
optional ``type``. A context may have ``before``, a list of the earlier chunks of its document. A
question may have ``document_answers``, for documents that know what its contexts do not.
LongBench layout: one JSON line ``{input, context, answers, dataset}`` for each question.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from kvrag import arguments
from kvrag.chunk import normalise_text
from kvrag.errors import ParameterError
from kvrag.regularfile import read_regular
from kvrag_bench.judge.questions import JudgedQuestion

# The sets of LongBench whose answers are summaries.
_SUMMARIES = frozenset({"gov_report", "qmsum", "multi_news", "vcsum", "samsum"})
_PASSAGE = re.compile(r"^Passage \d+:\s*$", re.MULTILINE)
# About 500 tokens of English, the default length of a chunk.
_PIECE_CHARACTERS = 2000
_MAX_BYTES = 4 << 30


def read_questions(data: str, num_questions: int | None = None) -> list[JudgedQuestion]:
    """Read a data set.

    Parameters
    ----------
    data
        The path of a file: ``.jsonl`` in LongBench layout, anything else in MuSiQue layout.
    num_questions
        Read only this many from the start; None reads all.

    Raises
    ------
    ParameterError
        When the file is missing, empty or of another layout; names record and field.
    """
    if num_questions is not None and num_questions < 1:
        raise ParameterError(f"{num_questions} questions: expected at least 1")
    path = arguments.path(data, "data")
    if not path.is_file():
        raise ParameterError(
            f"no data set at {arguments.shown(data)}: expected a JSON file in MuSiQue layout, a "
            "JSONL file in LongBench layout or, where pages can be asked about, a folder of them"
        )
    is_longbench = path.suffix == ".jsonl"
    read = _from_longbench if is_longbench else _from_musique
    try:
        text = read_regular(path, _MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{data}: cannot be read as UTF-8 text: {error}") from error
    records = _json_lines(text, data) if is_longbench else _json_list(text, data)
    # Every record is checked, requested or not: a broken record is a broken file.
    questions = [read(_Record(value, place)) for place, value in records]
    if not questions:
        raise ParameterError(f"{data}: the data set is empty, it holds no question")
    return questions[:num_questions]


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
    """One JSON object with checked access to its fields by name."""

    def __init__(self, value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise ParameterError(f"{place}: expected an object, found {_kind(value)}")
        self._value = value
        self.place = place

    def text(self, field: str, default: str | None = None) -> str:
        """Return a string; without a default it must not be blank."""
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
    # LongBench's summary records ask nothing: the task's prompt holds their instruction.
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
    """Split a long context at its passages, or otherwise into runs of whole paragraphs."""
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
