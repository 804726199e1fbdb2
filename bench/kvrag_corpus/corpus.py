"""A corpus: document files and the questions asked about them, written and read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrag_corpus.questions import QuestionType

DOCUMENTS_FOLDER = "documents"
QUESTIONS_FILE = "questions.json"


@dataclass(frozen=True)
class SourceDocument:
    """One text file; its paragraphs, separated by a blank line, are its chunks."""

    document_id: str
    paragraphs: tuple[str, ...]

    @property
    def text(self) -> str:
        """The content of the file."""
        return "\n\n".join(self.paragraphs) + "\n"


@dataclass(frozen=True)
class ContextChunk:
    """One retrieved chunk: where it is from and what it says."""

    document_id: str
    paragraph: int
    text: str


@dataclass(frozen=True)
class CorpusQuestion:
    """A question with the chunks to give to the model, in the order of the prompt.

    Attributes
    ----------
    question_id
        Unique in the corpus.
    type
        What the question needs.
    question
        The question.
    answers
        Accepted answers, the bare one first: word for word in one of the chunks, or
        ``"unknown"``. For two hops the last one names the person in between first.
    chunks
        The retrieved chunks; some only distract.
    supporting
        Which of `chunks` the answer follows from.
    """

    question_id: str
    type: QuestionType
    question: str
    answers: tuple[str, ...]
    chunks: tuple[ContextChunk, ...]
    supporting: tuple[int, ...]


@dataclass(frozen=True)
class Corpus:
    """Documents and questions about them."""

    documents: tuple[SourceDocument, ...]
    questions: tuple[CorpusQuestion, ...]

    def write(self, folder: Path | str) -> None:
        """Write ``documents/*.txt`` and ``questions.json`` (MuSiQue layout) into `folder`."""
        root = Path(folder)
        documents = root / DOCUMENTS_FOLDER
        documents.mkdir(parents=True, exist_ok=True)
        for document in self.documents:
            (documents / f"{document.document_id}.txt").write_text(document.text, "utf-8")
        rows = [_to_row(question) for question in self.questions]
        (root / QUESTIONS_FILE).write_text(json.dumps(rows, indent=1) + "\n", "utf-8")

    @classmethod
    def read(cls, folder: Path | str) -> Corpus:
        """Read what `write` wrote.

        Raises
        ------
        FileNotFoundError
            When `folder` holds no ``questions.json``.
        ValueError
            When a row of it lacks a field.
        """
        root = Path(folder)
        rows = json.loads((root / QUESTIONS_FILE).read_text("utf-8"))
        documents = tuple(
            SourceDocument(path.stem, tuple(path.read_text("utf-8").strip().split("\n\n")))
            for path in sorted((root / DOCUMENTS_FOLDER).glob("*.txt"))
        )
        return cls(documents, tuple(_from_row(row, number) for number, row in enumerate(rows)))


def _to_row(question: CorpusQuestion) -> dict[str, Any]:
    return {
        "id": question.question_id,
        "type": str(question.type),
        "question": question.question,
        "answers": list(question.answers),
        "ctxs": [
            {
                "title": "",
                "text": chunk.text,
                "document": chunk.document_id,
                "paragraph": chunk.paragraph,
                "supporting": index in question.supporting,
            }
            for index, chunk in enumerate(question.chunks)
        ],
    }


def _from_row(row: dict[str, Any], number: int) -> CorpusQuestion:
    try:
        return CorpusQuestion(
            question_id=row["id"],
            type=QuestionType(row["type"]),
            question=row["question"],
            answers=(row["answers"][0], *row["answers"][1:]),
            chunks=tuple(
                ContextChunk(ctx["document"], ctx["paragraph"], ctx["text"]) for ctx in row["ctxs"]
            ),
            supporting=tuple(i for i, ctx in enumerate(row["ctxs"]) if ctx["supporting"]),
        )
    except (KeyError, IndexError) as error:
        raise ValueError(f"question {number} of {QUESTIONS_FILE} lacks {error}") from error
