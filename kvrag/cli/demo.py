"""`kvrag demo`: index some pages, ask about them, and compare with full prefill."""

from __future__ import annotations

import json
import shlex
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.answering import Outcome, PlainAnswer, answer, answer_plainly, as_turn, retrieve
from kvrag.cli.indexing import IngestBar
from kvrag.cli.opening import quiet_libraries, warm_up
from kvrag.cli.options import DEFAULT_INDEX
from kvrag.errors import DocumentError, ParameterError
from kvrag.regularfile import read_regular

if TYPE_CHECKING:
    from kvrag.chunk import Chunk
    from kvrag.engine.asking import Asking
    from kvrag.engine.engine import KVEngine
    from kvrag.ingest.index import Index
    from kvrag.ingest.report import IndexStats, IngestReport


_BAR_COLUMNS = 40
_INDENT = 3
_TOO_QUICK_SECONDS = 0.25


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


def summarise(rows: Sequence[DemoRow]) -> list[dict[str, Any]]:
    """Return right answers, median time to first token and work of both ways of answering."""
    found = []
    for way in ("full prefill", "kvrag"):
        answers = [row.plain if way == "full prefill" else row.kvrag.answer for row in rows]
        usages = [row.kvrag.answer.usage for row in rows]
        cached = [one.cached_tokens * (way == "kvrag") for one in usages]
        right = [row.asked.is_right(one.text) for row, one in zip(rows, answers, strict=True)]
        found.append(
            {
                "way": way,
                "num_right": right.count(True),
                "num_judged": len(right) - right.count(None),
                "median_ttft_seconds": statistics.median(one.ttft_seconds for one in answers),
                "num_tokens_computed": sum(one.prompt_tokens for one in usages) - sum(cached),
            }
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
        for way, seconds, color, said in (
            ("full prefill", row.plain.ttft_seconds, "red", _MARKS[plain_right]),
            ("kvrag", answer.ttft_seconds, "green", f"{_MARKS[right]} {faster}"),
        ):
            filled = max(1, round(_BAR_COLUMNS * seconds / longest))
            bar = f"[{color}]{'━' * filled}[/]{' ' * (_BAR_COLUMNS - filled)}"
            self._print(f"{way:<13} {bar} {console.format_seconds(seconds):>8} {said}", indent=True)
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
        summary: Sequence[Mapping[str, Any]],
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
                        one["way"],
                        f"{one['num_right']} of {one['num_judged']}",
                        console.format_seconds(one["median_ttft_seconds"]),
                        f"{one['num_tokens_computed']:,}",
                    )
                    for one in summary
                ),
            )
        if stats.bytes_per_token:
            size = console.format_bytes(stats.size_bytes)
            self._print(f"KV of all pages: {size} ({stats.codec})")
        else:
            self._print("no KV is stored: the model computes each prompt as a whole")
        parts = ", ".join(f"{part} {spent:.0f} s" for part, spent in seconds.items())
        self._print(f"time: {parts}; {sum(seconds.values()):.0f} s in all")
        if summary[0]["median_ttft_seconds"] < _TOO_QUICK_SECONDS:
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

    def _print(self, text: str, *, indent: bool = False) -> None:
        from rich.padding import Padding

        self._out.print(Padding(text, (0, 0, 0, _INDENT), expand=False) if indent else text)


_MARKS = {True: "[green]✓[/]", False: "[red]✗[/]", None: ""}


def _title(chunk: Chunk) -> str:
    """Return the heading that a page begins with, or the name of its file."""
    headings = chunk.metadata.get("headings")
    return str(headings[0]) if headings else Path(chunk.source).stem


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(console.harmless(" ".join(text.split())))


_CHECKOUT = Path(__file__).resolve().parent.parent.parent
_MODEL, _FALLBACK = "smollm2-135m", "kvrag-tiny"
_MAX_ANSWER_TOKENS = 32
_INSTRUCTION = "Answer from the text above in a few words."
_WARM_UP_TOKENS = 64


@dataclass(frozen=True)
class _Material:
    """What is asked about, and how it is cut: prompts get `top_k` chunks.

    The first `_NUM_QUESTIONS` are asked about `pages` alone, so that the first answer comes soon.
    """

    documents: str
    questions: str
    chunk_tokens: int
    top_k: int
    pages: tuple[str, ...] = ()


_NUM_QUESTIONS = 8
_PAGES = (
    *("complaints.md", "computers.md", "fleet.md", "freight.md", "galley.md", "history.md"),
    *("lost-property.md", "people.md", "routes-and-timetable.md", "uniform.md", "welcome.md"),
)
_HANDBOOK = _Material(
    "handbook", "handbook-questions.json", chunk_tokens=256, top_k=11, pages=_PAGES
)
# kvrag-tiny answers only questions like those it was trained on.
_NOTES = _Material("documents", "questions.json", chunk_tokens=64, top_k=5)


@contextmanager
def _counted(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Count the time of the block towards a part of the demo."""
    started = time.perf_counter()
    yield
    seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - started


def demo(
    documents: Annotated[
        Path | None, typer.Option(metavar="DIR", show_default="the included ones")
    ] = None,
    questions: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default="the included ones")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", show_default=f"{_MODEL} where it is installed, otherwise {_FALLBACK}"
        ),
    ] = None,
    index: o.IndexOption = o.DEFAULT_INDEX,
    device: o.DeviceOption = None,
    top_k: Annotated[
        int | None, typer.Option("-k", min=1, show_default="as many as make about 2,000 tokens")
    ] = None,
    ratio: o.RatioOption = None,
    num_questions: Annotated[int, typer.Option("--num-questions", "-n", min=1)] = _NUM_QUESTIONS,
    no_chat: o.NoChatOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Index a few pages, answer questions about them, and compare with full prefill.

    Each question is answered twice from the same tokens: by kvrag and by full prefill. The index
    is kept for 'kvrag chat', and for the next demo.

    Parameters
    ----------
    documents
        Text files to index.
    questions
        JSON list of {"question": ..., "answers": [...]}.
    model
        Name, folder or hub name of a decoder.
    top_k
        Number of chunks to retrieve.
    num_questions
        Number of questions to ask. For more than 8, all pages are indexed.
    """
    from kvrag.engine.asking import Asking
    from kvrag.engine.engine import KVEngine

    chosen = model or _best_model()
    material = _NOTES if chosen == _FALLBACK else _HANDBOOK
    folder = documents or _shipped(material.documents)
    pages = [folder]
    if documents is None and questions is None and num_questions <= _NUM_QUESTIONS:
        pages = [folder / page for page in material.pages] or pages
    asked = read_questions(questions or _shipped(material.questions))[:num_questions]
    asking = Asking(
        top_k or material.top_k, instruction=_INSTRUCTION, use_chat_template=not no_chat
    )
    quiet_libraries()
    seconds: dict[str, float] = {}
    spent, view = partial(_counted, seconds), DemoView(quiet=as_json)
    rows = []
    with spent("loading"):
        opened = _open_or_create(index, chosen, material.chunk_tokens, device)
    with opened:
        with spent("indexing"):
            ingested = _ingest(opened, folder, pages)
        engine = KVEngine(
            opened,
            ratio=ratio,
            max_tokens=_MAX_ANSWER_TOKENS,
            max_batch=1,
            # The warm-up asks the first question, whose KV would be kept.
            session_bytes=0,
        )
        with spent("loading"):
            warm_up(opened)
        with spent("indexing"):
            _make_first(opened, asked, asking)
        with spent("loading"):
            _warm_up(engine, asked[0], asking)
        stats = opened.stats()
        view.begin(stats, folder, chosen)
        for number, question in enumerate(asked, start=1):
            rows.append(_answer(engine, number, question, asking, spent, view))
            view.compare(rows[-1])
    summary = summarise(rows)
    view.end(summary, stats, seconds, index)
    if as_json:
        console.print_json(
            {
                "model": chosen,
                "index": stats,
                "ingest": ingested,
                "questions": rows,
                "summary": summary,
                "seconds": seconds,
            }
        )


def _best_model() -> str:
    """Return the real model where its package or its conversion is there, otherwise the toy."""
    from kvrag.weights.cache import converted_models
    from kvrag.weights.named import named_model

    named = named_model(_MODEL)
    if named is not None and named.is_installed:
        return _MODEL
    for made in converted_models():
        if made.name == _MODEL:
            return str(made.folder)
    console.note(
        f"{_MODEL} is not installed, so {_FALLBACK} answers, a toy that knows made-up notes only; "
        f"for the real one: kvrag models pull {_MODEL}"
    )
    return _FALLBACK


def _open_or_create(path: Path, model: str, chunk_tokens: int, device: str | None) -> Index:
    from kvrag.errors import IndexNotFoundError
    from kvrag.ingest.index import Index

    with console.working(f"loading {model}"):
        try:
            return Index.open(path, model=model, device=device)
        except IndexNotFoundError:
            return Index.create(path, model=model, chunk_tokens=chunk_tokens, device=device)


def _ingest(index: Index, folder: Path, pages: Sequence[Path]) -> IngestReport:
    """Add pages of a folder; what is indexed already costs nothing.

    Raises
    ------
    ParameterError
        When the index has other documents as well.
    """
    inside = str(folder.resolve())
    others = [row.source for row in index.documents() if not row.source.startswith(inside)]
    if others:
        raise ParameterError(
            f"{console.short_path(str(index.path))} has other documents, such as "
            f"{console.short_path(others[0])}; give the demo another folder with --index"
        )
    with console.progress("reading") as say:
        return index.add(pages, on_progress=IngestBar(index.path, say).update)


def _make_first(index: Index, asked: Sequence[DemoQuestion], asking: Asking) -> None:
    """Store the chunks that prompts begin with as a first place has them.

    The first run is then as fast as all later ones.
    """
    from kvrag.engine.asking import reading_order

    found = [
        reading_order(
            index.catalog.chunks(retrieve(index, [as_turn(one.question)], asking)[0].hints)
        )
        for one in asked
    ]
    firsts = {chunks[0].chunk_id for chunks in found if chunks}
    with console.progress("first places") as say:
        bar = IngestBar(index.path, say)
        for number, chunk_id in enumerate(firsts, start=1):
            index.on_demand.make(chunk_id, check=lambda: None)
            bar.update_first(number, len(firsts))


def _warm_up(engine: KVEngine, asked: DemoQuestion, asking: Asking) -> None:
    """Pay what only the first answer of a process pays."""
    index = engine.index
    request, _ = retrieve(index, [as_turn(asked.question)], asking)
    token_ids = engine.prompt_ids(request.prompt, hints=request.hints)
    answer_plainly(index.model, token_ids[:_WARM_UP_TOKENS], 1)
    answer(engine, replace(request, max_tokens=1))


def _answer(
    engine: KVEngine,
    number: int,
    asked: DemoQuestion,
    asking: Asking,
    spent: Callable[[str], AbstractContextManager[None]],
    view: DemoView,
) -> DemoRow:
    """Retrieve once, then answer with kvrag and with full prefill."""
    with spent("kvrag"):
        index = engine.index
        request, seconds = retrieve(index, [as_turn(asked.question)], asking)
        show = view.ask(number, asked, index.catalog.chunks(request.hints))
        outcome = Outcome(asked.question, answer(engine, request, show), seconds)
        show.end()
    token_ids = engine.prompt_ids(request.prompt, hints=request.hints)
    with spent("full prefill"), view.waiting(len(token_ids)):
        plain = answer_plainly(index.model, token_ids, _MAX_ANSWER_TOKENS, request.stop)
    return DemoRow(asked, outcome, plain)


def _shipped(name: str) -> Path:
    """Return a demo file, from the checkout or from the shared data of an installation."""
    for folder in (_CHECKOUT / "examples", Path(sysconfig.get_path("data")) / "share" / "kvrag"):
        if (folder / name).exists():
            return folder / name
    raise DocumentError(
        f"the demo's {name} is not installed; give --documents DIR and --questions FILE"
    )
