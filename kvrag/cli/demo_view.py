"""The questions of `kvrag demo`, what each way of answering made of them, and how that is shown."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.cli import console
from kvrag.cli.answering import Outcome, PlainAnswer
from kvrag.cli.options import DEFAULT_INDEX
from kvrag.codec.names import RAW, expected_bytes_per_token
from kvrag.errors import DocumentError, ParameterError
from kvrag.regularfile import read_regular

if TYPE_CHECKING:
    from kvrag.chunk import Chunk
    from kvrag.ingest.report import IndexStats

_BAR_COLUMNS = 40
_INDENT = 3
_TOO_QUICK_SECONDS = 0.25
_COMPRESSED = "transform:2"


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
    told: dict[str, list[tuple[str, float, int]]] = {"full prefill": [], "kvrag": []}
    for row in rows:
        plain, answer = row.plain, row.kvrag.answer
        computed = answer.usage.prompt_tokens - answer.usage.cached_tokens
        told["full prefill"].append((plain.text, plain.ttft_seconds, plain.prompt_tokens))
        told["kvrag"].append((answer.text, answer.ttft_seconds, computed))
    found = []
    for way, answers in told.items():
        texts, seconds, computed_tokens = zip(*answers, strict=True)
        right = [row.asked.is_right(text) for row, text in zip(rows, texts, strict=True)]
        num_judged = sum(one is not None for one in right)
        found.append(
            WaySummary(
                way, right.count(True), num_judged, statistics.median(seconds), sum(computed_tokens)
            )
        )
    return found


def _words(text: str) -> str:
    kept = "".join(c if c.isalnum() else " " for c in text.casefold())
    return " ".join(kept.split())


class DemoView:
    """Prints the demo as it runs.

    Parameters
    ----------
    quiet
        Print nothing, because stdout gets one JSON document.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._out = console.out()
        self._out.quiet = quiet
        self._quiet = quiet

    def begin(self, stats: IndexStats, folder: Path, model: str) -> None:
        """Say what is asked about."""
        self._print(
            f"{model} over {console.count(stats.num_documents, 'document')} of "
            f"{_escape(console.short_path(str(folder)))}: "
            f"{console.count(stats.num_chunks, 'chunk')}, {stats.num_tokens:,} tokens"
        )

    def ask(self, number: int, asked: DemoQuestion, chunks: Sequence[Chunk]) -> console.AnswerText:
        """Show a question and the titles of what was found; return what shows the answer."""
        titles = dict.fromkeys(_title(chunk) for chunk in chunks)
        self._print(f"\n[bold]{number}. {_escape(asked.question)}[/]")
        self._print(f"[dim]{_escape(' · '.join(titles))}[/]", indent=True)
        if not self._quiet:
            console.write(" " * _INDENT)
        return console.AnswerText(quiet=self._quiet)

    def waiting(self, num_tokens: int) -> AbstractContextManager[None]:
        """Show that full prefill is at work while the block runs."""
        if self._quiet:
            return nullcontext()
        return console.working(f"full prefill reads all {num_tokens:,} tokens")

    def compare(self, row: DemoRow) -> None:
        """Show both times to the first token on one scale, and what kvrag computed."""
        answer, report = row.kvrag.answer, row.kvrag.answer.report
        plain_right, right = row.asked.is_right(row.plain.text), row.asked.is_right(answer.text)
        longest = max(row.plain.ttft_seconds, answer.ttft_seconds)
        faster = f"{row.plain.ttft_seconds / answer.ttft_seconds:.1f}x"
        self._bar("full prefill", row.plain.ttft_seconds, longest, "red", _mark(plain_right))
        self._bar("kvrag", answer.ttft_seconds, longest, "green", f"{_mark(right)} {faster}")
        self._print(
            f"[dim]{report.num_tokens:,} tokens: {report.num_cached:,} reused, "
            f"{report.num_recomputed:,} repaired, {report.num_fresh:,} fresh[/]",
            indent=True,
        )
        if row.plain.text.split() != answer.text.split():
            self._print(f"[dim]full prefill says: {_escape(row.plain.text)}[/]", indent=True)
        if right is False:
            self._print(f"[dim]right: {_escape(row.asked.answers[0])}[/]", indent=True)

    def end(
        self,
        summary: Sequence[WaySummary],
        stats: IndexStats,
        seconds: Mapping[str, float],
        index: Path,
    ) -> None:
        """Show the table, where the time went, and what to type next."""
        if not self._quiet:
            names = ("right", "first token, median", "tokens computed")
            console.write("\n")
            console.print_table(
                {"": "text", **dict.fromkeys(names, "number")},
                (
                    (
                        one.way,
                        f"{one.num_right} of {one.num_judged}",
                        console.format_seconds(one.median_ttft_seconds),
                        f"{one.num_tokens_computed:,}",
                    )
                    for one in summary
                ),
            )
        self._print(_stored(stats))
        parts = ", ".join(f"{part} {spent:.0f} s" for part, spent in seconds.items())
        self._print(f"time: {parts}; {sum(seconds.values()):.0f} s in all")
        if summary[0].median_ttft_seconds < _TOO_QUICK_SECONDS:
            self._print(
                "[dim]A model this small prefills a prompt this short almost instantly; "
                "`kvrag bench ttft` measures a larger model.[/]"
            )
        where = "" if index == DEFAULT_INDEX else f" --index {_escape(shlex.quote(str(index)))}"
        self._out.print(
            f"\nThe index is kept. Ask it yourself: [bold]kvrag chat{where}[/]\n"
            f"or in a browser: [bold]kvrag serve{where}[/], then open http://127.0.0.1:8000",
            soft_wrap=True,
        )

    def _bar(self, way: str, seconds: float, longest: float, color: str, said: str) -> None:
        filled = max(1, round(_BAR_COLUMNS * seconds / longest))
        bar = f"[{color}]{'━' * filled}[/]{' ' * (_BAR_COLUMNS - filled)}"
        self._print(f"{way:<13} {bar} {console.format_seconds(seconds):>8} {said}", indent=True)

    def _print(self, text: str, *, indent: bool = False) -> None:
        from rich.padding import Padding

        self._out.print(Padding(text, (0, 0, 0, _INDENT), expand=False) if indent else text)


def _stored(stats: IndexStats) -> str:
    if stats.codec != RAW:
        return f"KV of all pages: {console.format_bytes(stats.size_bytes)} ({stats.codec})"
    element_bytes = 4 if stats.dtype == "float32" else 2
    fewer = stats.num_tokens * expected_bytes_per_token(
        _COMPRESSED, stats.bytes_per_token, element_bytes
    )
    # One record for each chunk: those for first places come on top, with any codec.
    raw = console.format_bytes(stats.num_tokens * stats.bytes_per_token)
    return (
        f"KV of all pages: {raw} raw, about {console.format_bytes(fewer)} "
        f"with --codec {_COMPRESSED}"
    )


def _mark(right: bool | None) -> str:
    return {True: "[green]✓[/]", False: "[red]✗[/]", None: ""}[right]


def _title(chunk: Chunk) -> str:
    """Return the heading that a page begins with, or the name of its file."""
    headings = chunk.metadata.get("headings")
    return str(headings[0]) if headings else Path(chunk.source).stem


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(console.harmless(" ".join(text.split())))
