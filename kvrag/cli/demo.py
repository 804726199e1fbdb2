"""`kvrag demo`: index a folder of text files, ask about it, and compare with plain prefill."""

from __future__ import annotations

import json
import statistics
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.errors import DocumentError, ParameterError
from kvrag.fusion.policies import DEFAULT_POLICY

if TYPE_CHECKING:
    from kvrag.cli.answering import Outcome, Settings
    from kvrag.cli.plain import PlainAnswer
    from kvrag.engine.engine import KVEngine
    from kvrag.ingest.index import Index

_CHECKOUT = Path(__file__).resolve().parent.parent.parent
_MAX_ANSWER_TOKENS = 24
_TOO_QUICK_SECONDS = 0.25
_NOTHING = "(an empty answer)"


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
    """One question answered three ways from the same prompt tokens."""

    asked: DemoQuestion
    plain: PlainAnswer
    kvrag: Outcome
    reuse: Outcome

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "question": self.asked.question,
            "expected": list(self.asked.answers),
            "plain": {**console.plain(self.plain), "right": self.asked.is_right(self.plain.text)},
            "kvrag": self._fused(self.kvrag),
            "none": self._fused(self.reuse),
        }

    def _fused(self, outcome: Outcome) -> dict[str, Any]:
        return {**outcome.to_dict(), "right": self.asked.is_right(outcome.answer.text)}


def demo(
    documents: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Text files to index.", show_default="the included ones"),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='JSON list of {"question": ..., "answers": [...]}.',
            show_default="the included ones",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Folder or hub name of a decoder.")
    ] = "kvrag-tiny",
    device: o.DeviceOption = None,
    top_k: o.TopKOption = 5,
    chunk_tokens: Annotated[
        int, typer.Option(help="Maximum length of a chunk, in tokens.", rich_help_panel=o.TUNING)
    ] = 64,
    ratio: o.RatioOption = None,
    num_questions: Annotated[
        int, typer.Option("--num-questions", "-n", min=1, help="Number of questions to ask.")
    ] = 8,
    repeats: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of runs for each answer; the median time is reported.",
            rich_help_panel=o.RESEARCH,
        ),
    ] = 3,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the index in this folder, for 'kvrag chat'."),
    ] = None,
    no_chat: o.NoChatOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Index a few documents, answer questions about them, and compare with plain prefill.

    Each question is answered three ways from the same tokens: by plain prefill, by kvrag, and
    by reusing KV without any repair (policy none).
    """
    from kvrag.cli.answering import Settings, make_engine
    from kvrag.cli.opening import quiet_libraries, warm_up
    from kvrag.ingest.index import Index

    folder = documents or _shipped("documents")
    asked = read_questions(questions or _shipped("questions.json"))[:num_questions]
    settings = Settings(
        top_k=top_k,
        max_tokens=_MAX_ANSWER_TOKENS,
        policy=DEFAULT_POLICY,
        ratio=ratio,
        use_chat_template=not no_chat,
    )
    quiet_libraries()
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvrag-demo-") as scratch:
        with console.working(f"indexing {console.short_path(str(folder))} with {model}"):
            index = Index.create(
                keep or Path(scratch) / "index",
                model=model,
                chunk_tokens=chunk_tokens,
                device=device,
            )
            ingested = index.add([folder])
        with index:
            engine = make_engine(index, settings)
            warm_up(index)
            if not as_json:
                _print_header(index, model, folder)
            answer_three_ways(index, engine, asked[0], settings)  # warm-up: pays the one-time costs
            for question in asked:
                row = median_of_rows(
                    [answer_three_ways(index, engine, question, settings) for _ in range(repeats)]
                )
                rows.append(row)
                if not as_json:
                    _print_row(row)
    summary = summarise(rows)
    if as_json:
        console.print_json(
            {"model": model, "ingest": ingested, "questions": rows, "summary": summary}
        )
        return
    _print_summary(summary)
    if keep is not None:
        console.note(f"the index is kept: kvrag chat --index {keep}")


def read_questions(path: Path) -> list[DemoQuestion]:
    """Read a JSON list of questions, such as a dataset in MuSiQue's layout.

    Raises
    ------
    DocumentError
        When the file is missing, not JSON, or not such a list.
    """
    try:
        rows = json.loads(path.read_text("utf-8"))
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


def answer_three_ways(
    index: Index, engine: KVEngine, asked: DemoQuestion, settings: Settings
) -> DemoRow:
    """Retrieve once, then answer with plain prefill, with kvrag and with unrepaired reuse."""
    from kvrag.cli.answering import answer, retrieve
    from kvrag.cli.plain import answer_plainly

    retrieved = retrieve(index, asked.question, settings)
    token_ids = engine.prompt_ids(retrieved.prompt, hints=retrieved.chunk_ids)
    plain = answer_plainly(index.model, token_ids, settings.max_tokens, retrieved.stop)
    unrepaired = replace(settings, policy="none", ratio=None)
    return DemoRow(
        asked=asked,
        plain=plain,
        kvrag=answer(engine, retrieved, settings),
        reuse=answer(engine, retrieved, unrepaired),
    )


def median_of_rows(rows: Sequence[DemoRow]) -> DemoRow:
    """Return the first of one question's rows, with the median times to first token."""
    first = rows[0]
    plain = statistics.median(row.plain.ttft_seconds for row in rows)
    fused = statistics.median(row.kvrag.answer.ttft_seconds for row in rows)
    reused = statistics.median(row.reuse.answer.ttft_seconds for row in rows)
    return DemoRow(
        asked=first.asked,
        plain=replace(first.plain, ttft_seconds=plain),
        kvrag=replace(first.kvrag, answer=replace(first.kvrag.answer, ttft_seconds=fused)),
        reuse=replace(first.reuse, answer=replace(first.reuse.answer, ttft_seconds=reused)),
    )


def summarise(rows: Sequence[DemoRow]) -> list[dict[str, Any]]:
    """Return, for each way of answering, the right answers and the median time to first token."""
    ways = {
        "plain prefill": [(r.asked.is_right(r.plain.text), r.plain.ttft_seconds) for r in rows],
        "kvrag": [
            (r.asked.is_right(r.kvrag.answer.text), r.kvrag.answer.ttft_seconds) for r in rows
        ],
        "reuse without repair": [
            (r.asked.is_right(r.reuse.answer.text), r.reuse.answer.ttft_seconds) for r in rows
        ],
    }
    return [
        {
            "way": way,
            "num_right": sum(right is True for right, _ in results),
            "num_judged": sum(right is not None for right, _ in results),
            "median_ttft_seconds": statistics.median(seconds for _, seconds in results),
        }
        for way, results in ways.items()
    ]


def _shipped(name: str) -> Path:
    """Return a demo file, from the checkout or from the shared data of an installation."""
    for folder in (_CHECKOUT / "examples", Path(sysconfig.get_path("data")) / "share" / "kvrag"):
        if (folder / name).exists():
            return folder / name
    raise DocumentError(
        f"the demo's {name} is not installed; give --documents DIR and --questions FILE"
    )


def _words(text: str) -> str:
    kept = "".join(c if c.isalnum() else " " for c in text.casefold())
    return " ".join(kept.split())


def _print_header(index: Index, model: str, folder: Path) -> None:
    stats = index.stats()
    console.out().print(
        f"{stats.num_documents} documents of {console.short_path(str(folder))}: "
        f"{stats.num_chunks} chunks, {stats.num_tokens:,} tokens, "
        f"{console.format_bytes(stats.size_bytes)} of KV by {model}",
        markup=False,
        soft_wrap=True,
    )


def _print_row(row: DemoRow) -> None:
    from kvrag.cli.answering import print_below

    out = console.out()
    out.print(f"\n[bold]{_escape(row.asked.question)}[/]")
    out.print(_judged(row.asked, row.kvrag.answer.text))
    print_below(row.kvrag)
    speedup = row.plain.ttft_seconds / row.kvrag.answer.ttft_seconds
    out.print(
        f"  plain prefill: first token {console.format_seconds(row.plain.ttft_seconds)}, "
        f"{speedup:.1f}x kvrag's; says: {_escape(row.plain.text) or _NOTHING}",
        style="dim",
        soft_wrap=True,
    )
    reused = row.reuse.answer.text.strip()
    if reused != row.kvrag.answer.text.strip():
        mark = _mark(row.asked.is_right(reused)) or "  "
        said = _escape(reused) or _NOTHING
        out.print(f"{mark}reuse without repair would have said: {said}", soft_wrap=True)


def _print_summary(summary: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("right", justify="right")
    table.add_column("first token, median", justify="right")
    for line in summary:
        table.add_row(
            line["way"],
            f"{line['num_right']} of {line['num_judged']}",
            console.format_seconds(line["median_ttft_seconds"]),
        )
    out = console.out()
    out.print()
    out.print(table)
    if summary[0]["median_ttft_seconds"] < _TOO_QUICK_SECONDS:
        out.print(
            "A model this small prefills a prompt this short almost instantly; "
            "`kvrag bench ttft` measures a larger model.",
            style="dim",
            soft_wrap=True,
        )


def _judged(asked: DemoQuestion, text: str) -> str:
    """Return the answer after its mark, and the expected answer if it is wrong."""
    right = asked.is_right(text)
    said = _escape(text) or f"[dim]{_NOTHING}[/]"
    expected = "" if right is not False else f" [dim](right: {_escape(asked.answers[0])})[/]"
    return f"{_mark(right)}{said}{expected}"


def _mark(right: bool | None) -> str:
    return {True: "[green]✓[/] ", False: "[red]✗[/] ", None: ""}[right]


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(console.harmless(" ".join(text.split())))
