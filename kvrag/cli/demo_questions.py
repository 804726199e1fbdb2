"""The questions of `kvrag demo`, and what each way of answering made of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.cli import console
from kvrag.errors import DocumentError, ParameterError
from kvrag.regularfile import read_regular

if TYPE_CHECKING:
    from kvrag.cli.answering import Outcome
    from kvrag.cli.plain import PlainAnswer


@dataclass(frozen=True)
class DemoQuestion:
    """A question and the answers that count as right; without any, no answer is judged."""

    question: str
    answers: tuple[str, ...]

    def is_right(self, text: str) -> bool | None:
        """Return whether `text` contains one of the right answers; None if there are none."""
        if not self.answers:
            return None
        return any(f" {_words(answer)} " in f" {_words(text)} " for answer in self.answers)


@dataclass(frozen=True)
class DemoRow:
    """One question answered by kvrag and by full prefill from the same prompt tokens."""

    asked: DemoQuestion
    kvrag: Outcome
    plain: PlainAnswer

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        right = self.asked.is_right(self.kvrag.answer.text)
        return {
            "question": self.asked.question,
            "expected": list(self.asked.answers),
            "plain": {**console.plain(self.plain), "right": self.asked.is_right(self.plain.text)},
            "kvrag": {**self.kvrag.to_dict(), "right": right},
        }


@dataclass(frozen=True)
class WaySummary:
    """One way of answering, over all questions."""

    way: str
    num_right: int
    num_judged: int
    median_ttft_seconds: float
    num_tokens_computed: int


def read_questions(path: Path) -> list[DemoQuestion]:
    """Read a JSON list of questions, such as a dataset in MuSiQue's layout.

    Raises
    ------
    DocumentError
        When the file is missing, not JSON, or not such a list.
    """
    try:
        rows = json.loads(read_regular(path))
        found = [
            DemoQuestion(str(row["question"]), tuple(map(str, row.get("answers", ()))))
            for row in rows
        ]
    except OSError as error:
        raise DocumentError(f"cannot read the questions at {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DocumentError(
            f"{path} is not a list of questions: expected JSON such as "
            '[{"question": "...", "answers": ["..."]}]'
        ) from error
    if not found:
        raise ParameterError(f"{path} contains no questions")
    return found


def summarise(rows: Sequence[DemoRow]) -> list[WaySummary]:
    """Return right answers, median time to first token and work of both ways of answering."""
    return [
        _summary(
            "full prefill",
            [row.asked.is_right(row.plain.text) for row in rows],
            [row.plain.ttft_seconds for row in rows],
            [row.plain.prompt_tokens for row in rows],
        ),
        _summary(
            "kvrag",
            [row.asked.is_right(row.kvrag.answer.text) for row in rows],
            [row.kvrag.answer.ttft_seconds for row in rows],
            [
                row.kvrag.answer.usage.prompt_tokens - row.kvrag.answer.usage.cached_tokens
                for row in rows
            ],
        ),
    ]


def _summary(
    way: str, right: Sequence[bool | None], seconds: Sequence[float], computed: Sequence[int]
) -> WaySummary:
    return WaySummary(
        way,
        num_right=sum(one is True for one in right),
        num_judged=sum(one is not None for one in right),
        median_ttft_seconds=statistics.median(seconds),
        num_tokens_computed=sum(computed),
    )


def _words(text: str) -> str:
    kept = "".join(c if c.isalnum() else " " for c in text.casefold())
    return " ".join(kept.split())
