"""`kvrag demo`: index some pages, ask about them, and compare with full prefill."""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.answering import Outcome, answer, answer_plainly, as_turn, retrieve
from kvrag.cli.demo_view import DemoQuestion, DemoRow, DemoView, read_questions, summarise
from kvrag.cli.opening import quiet_libraries, warm_up
from kvrag.cli.progress import IngestBar
from kvrag.errors import DocumentError, ParameterError

if TYPE_CHECKING:
    from kvrag.engine.asking import Asking
    from kvrag.engine.engine import KVEngine
    from kvrag.ingest.index import Index
    from kvrag.ingest.report import IngestReport

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
    "complaints.md",
    "computers.md",
    "fleet.md",
    "freight.md",
    "galley.md",
    "history.md",
    "lost-property.md",
    "people.md",
    "routes-and-timetable.md",
    "uniform.md",
    "welcome.md",
)
_HANDBOOK = _Material(
    "handbook", "handbook-questions.json", chunk_tokens=256, top_k=11, pages=_PAGES
)
# kvrag-tiny answers only questions like those it was trained on.
_NOTES = _Material("documents", "questions.json", chunk_tokens=64, top_k=5)


class _Stopwatch:
    """Seconds spent in each named part of the demo."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the block towards `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + spent


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
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Name, folder or hub name of a decoder.",
            show_default=f"{_MODEL} where it is installed, otherwise {_FALLBACK}",
        ),
    ] = None,
    index: o.IndexOption = o.DEFAULT_INDEX,
    device: o.DeviceOption = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            "-k",
            min=1,
            help="Number of chunks to retrieve.",
            show_default="as many as make about 2,000 tokens",
        ),
    ] = None,
    ratio: o.RatioOption = None,
    num_questions: Annotated[
        int,
        typer.Option(
            "--num-questions",
            "-n",
            min=1,
            help="Number of questions to ask. For more than 8, all pages are indexed.",
        ),
    ] = _NUM_QUESTIONS,
    no_chat: o.NoChatOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Index a few pages, answer questions about them, and compare with full prefill.

    Each question is answered twice from the same tokens: by kvrag and by full prefill. The index
    is kept for 'kvrag chat', and for the next demo.
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
    watch, view = _Stopwatch(), DemoView(quiet=as_json)
    rows = []
    with watch.part("loading"):
        opened = _open_or_create(index, chosen, material.chunk_tokens, device)
    with opened:
        with watch.part("indexing"):
            ingested = _ingest(opened, folder, pages)
        engine = KVEngine(
            opened,
            ratio=ratio,
            max_tokens=_MAX_ANSWER_TOKENS,
            max_batch=1,
            # The warm-up asks the first question, whose KV would be kept.
            session_bytes=0,
        )
        with watch.part("loading"):
            warm_up(opened)
        with watch.part("indexing"):
            _make_first(opened, asked, asking)
        with watch.part("loading"):
            _warm_up(engine, asked[0], asking)
        stats = opened.stats()
        view.begin(stats, folder, chosen)
        for number, question in enumerate(asked, start=1):
            rows.append(_answer(engine, number, question, asking, watch, view))
            view.compare(rows[-1])
    summary = summarise(rows)
    view.end(summary, stats, watch.seconds, index)
    if as_json:
        console.print_json(
            {
                "model": chosen,
                "index": stats,
                "ingest": ingested,
                "questions": rows,
                "summary": summary,
                "seconds": watch.seconds,
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
    watch: _Stopwatch,
    view: DemoView,
) -> DemoRow:
    """Retrieve once, then answer with kvrag and with full prefill."""
    with watch.part("kvrag"):
        index = engine.index
        request, seconds = retrieve(index, [as_turn(asked.question)], asking)
        show = view.ask(number, asked, index.catalog.chunks(request.hints))
        outcome = Outcome(asked.question, answer(engine, request, show), seconds)
        show.end()
    token_ids = engine.prompt_ids(request.prompt, hints=request.hints)
    with watch.part("full prefill"), view.waiting(len(token_ids)):
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
