"""What `kvrag demo` shows: each question with its sources, answer and two bars, then a table."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from kvrag.cli import console
from kvrag.cli.options import DEFAULT_INDEX
from kvrag.codec.names import RAW, expected_bytes_per_token
from kvrag.regularfile import open_regular

if TYPE_CHECKING:
    from kvrag.chunk import Chunk
    from kvrag.cli.demo_questions import DemoQuestion, DemoRow, WaySummary
    from kvrag.ingest.report import IndexStats

_BAR_COLUMNS = 40
_INDENT = 3
_TOO_QUICK_SECONDS = 0.25
_MOST_TITLE = 1000
_COMPRESSED = "transform:2"


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
        titles = dict.fromkeys(_title(chunk.source) for chunk in chunks)
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
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("")
        for name in ("right", "first token, median", "tokens computed"):
            table.add_column(name, justify="right")
        for one in summary:
            table.add_row(
                one.way,
                f"{one.num_right} of {one.num_judged}",
                console.format_seconds(one.median_ttft_seconds),
                f"{one.num_tokens_computed:,}",
            )
        self._out.print()
        self._out.print(table)
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


def _title(source: str) -> str:
    """Return the heading that a page begins with, or the name of its file."""
    path = Path(source)
    with contextlib.suppress(OSError, UnicodeError), open_regular(path) as page:
        first = page.readline(_MOST_TITLE).decode(errors="ignore")
        if first.startswith("# "):
            return first[2:].strip()
    return path.stem


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(console.harmless(" ".join(text.split())))
