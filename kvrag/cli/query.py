"""`kvrag query` answers a question, `search` finds chunks, `explain` shows a prompt's parts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrag import arguments
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.answering import Shown, print_below
from kvrag.cli.command import given
from kvrag.cli.conversation import Asker
from kvrag.cli.opening import load_reranker, open_index, warm_up
from kvrag.cli.through import NoServerOption, ServerGoneError, connected
from kvrag.errors import DocumentError, ParameterError
from kvrag.fusion.policies import DEFAULT_POLICY

if TYPE_CHECKING:
    from kvrag.engine.answer import Part
    from kvrag.ingest.search import SearchHit


# They say how reused KV is repaired, and what full prefill says.
_NOT_PLAIN = ("verify", "policy", "ratio", "boundary_tokens", "links")


def query(
    context: typer.Context,
    question: Annotated[str, typer.Argument()],
    opening: o.Opening,
    searching: o.Searching,
    answering: o.Answering,
    sampled: o.Sampled,
    plain: Annotated[bool, o.setting("--plain")] = False,
    verify: Annotated[bool, typer.Option("--verify")] = False,
    no_server: NoServerOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Answer one question from the index, and show the sources and a report.

    Parameters
    ----------
    question
        The question.
    plain
        Answer by full prefill instead, for comparison.
    verify
        Then read the prompt in full, too, and say whether it says the same.
    """
    if not arguments.text(question, "the question").strip():
        raise ParameterError("the question is empty: give one in quotes")
    if plain and (useless := given(context, *_NOT_PLAIN)):
        raise ParameterError(
            f"--plain answers by full prefill: it has no use for {', '.join(useless)}; leave one "
            "or the other out"
        )
    show = Shown(quiet=as_json)
    options = sampled.values | {"reuse": not plain}
    outcome = None
    if not no_server:
        try:
            with ExitStack() as held:
                if there := connected(held, opening, searching, answering):
                    outcome = there.ask(question, show, options, verifies=verify)
        except ServerGoneError as error:
            if show.text.has_begun and not as_json:
                raise
            console.note(f"{error}; loading the model here")
    if outcome is None:
        with opening.open() as opened:
            asking = searching.asking()
            engine = answering.engine(opened)
            warm_up(opened)
            outcome = Asker(engine, asking).ask(question, show, options, verifies=verify)
    show.text.end()
    if as_json:
        console.print_json(outcome.to_dict())
    else:
        print_below(outcome)


_STYLES = {
    "kept": "cyan",
    "exact": "bold green",
    "reused": "green",
    "repaired": "yellow",
    "fresh": "",
}


def explain(
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    opening: o.Opening,
    policy: o.PolicyOption = DEFAULT_POLICY,
    ratio: o.RatioOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Show which tokens of a prompt are reused, repaired and computed, and why.

    The prompt is fused, but not answered.

    Parameters
    ----------
    file
        A text file with the whole prompt.
    """
    prompt = _read(file)
    with opening.open() as opened:
        from kvrag.engine.engine import KVEngine
        from kvrag.engine.prompt_reader import PromptReader, prompt_parts
        from kvrag.engine.request import Request

        engine = KVEngine(opened, links="off")
        laid_out = PromptReader(opened).lay_out(Request(prompt))
        with console.working("loading the model"):
            fused = engine.fuse(prompt, policy=policy, ratio=ratio)
        parts = prompt_parts(laid_out, fused)
        report = fused.report
    if as_json:
        console.print_json({"parts": parts, "report": report})
        return
    _print_parts(parts)
    console.out().print(f"\n{report.one_line()}", style="dim", markup=False)


def _read(file: Path) -> str:
    from kvrag.regularfile import read_regular

    try:
        return read_regular(file).decode("utf-8")
    except OSError as error:
        raise DocumentError(f"cannot read {file}: {error}; give a text file") from error
    except UnicodeDecodeError as error:
        raise DocumentError(f"{file} is not UTF-8 text: {error}; give a text file") from error


def _print_parts(parts: Sequence[Part]) -> None:
    from rich.text import Text

    text = Text()
    for part in parts:
        text.append(console.harmless(part.text), style=_STYLES[part.state])
    out = console.out()
    out.print(text)
    out.print()
    numbers: Counter[tuple[str, str]] = Counter()
    for part in parts:
        numbers[part.state, part.why] += part.end - part.start
    for (state, why), number in sorted(numbers.items(), key=lambda one: -one[1]):
        line = f"{number:>7,} tokens {state:<9} {console.one_line(why)}"
        out.print(Text(line, style=_STYLES[state]))


_SNIPPET_CHARACTERS = 100


def search(
    question: Annotated[str, typer.Argument()],
    index: o.IndexOption = o.DEFAULT_INDEX,
    top_k: o.TopKOption = o.DEFAULT_TOP_K,
    sparse: Annotated[bool, typer.Option("--sparse")] = False,
    dense: Annotated[bool, typer.Option("--dense")] = False,
    filter: o.FilterOption = None,
    rerank: o.RerankOption = None,
    embedding: o.EmbeddingOption = None,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """Show the chunks that would be retrieved for a question, best first.

    By default, chunks are ranked by meaning and by words, and the two rankings are fused.

    Parameters
    ----------
    question
        The question.
    sparse
        Search by words (BM25) alone; loads no model.
    dense
        Search by meaning (vectors) alone.
    """
    if not arguments.text(question, "the question").strip():
        raise ParameterError("the question is empty: give one in quotes")
    chosen = [name for name, is_set in (("--sparse", sparse), ("--dense", dense)) if is_set]
    if len(chosen) + (rerank is not None) > 1:
        given = " and ".join([*chosen, *(["--rerank"] if rerank is not None else [])])
        raise ParameterError(f"{given} exclude each other: leave all but one out")
    given_embedding = None if sparse else embedding
    with open_index(index, store=store, embedding=given_embedding) as opened:
        reranker = None
        if not sparse:
            with console.working("loading the embedding"):
                _ = opened.embedding
                reranker = load_reranker(rerank)
        started = time.perf_counter()
        if sparse:
            hits = opened.search_words(question, top_k, filter=filter)
        elif dense:
            hits = opened.search_dense(question, top_k, filter=filter)
        else:
            hits = opened.search(question, top_k, filter=filter, reranker=reranker)
        seconds = time.perf_counter() - started
    if as_json:
        console.print_json(
            {
                "question": question,
                "mode": chosen[0].lstrip("-") if chosen else "hybrid",
                "seconds": seconds,
                "hits": [_plain(rank, hit) for rank, hit in enumerate(hits, start=1)],
            }
        )
    elif hits:
        _print(hits)
    else:
        console.note("nothing was found")


def _plain(rank: int, hit: SearchHit) -> dict[str, Any]:
    chunk = hit.chunk
    return {
        "rank": rank,
        "score": hit.score,
        "source": chunk.source,
        "ordinal": chunk.ordinal,
        "page": chunk.metadata.get("page"),
        "heading": chunk.metadata.get("heading"),
        "headings": chunk.metadata.get("headings"),
        "chunk_id": chunk.chunk_id,
        "text": chunk.text,
        "metadata": dict(chunk.metadata),
    }


def _print(hits: Sequence[SearchHit]) -> None:
    console.print_table(
        {"": "number", "score": "number", "chunk": "folded", "begins": "begins"},
        (
            (
                str(rank),
                f"{hit.score:.3g}",
                console.one_line(_place(hit)),
                " ".join(hit.chunk.text.split())[:_SNIPPET_CHARACTERS],
            )
            for rank, hit in enumerate(hits, start=1)
        ),
    )


def _place(hit: SearchHit) -> str:
    chunk = hit.chunk
    place = f"{console.shown_name(chunk.source)}#{chunk.ordinal}"
    if "page" in chunk.metadata:
        place += f" p.{chunk.metadata['page']}"
    headings = chunk.metadata.get("headings") or chunk.metadata.get("heading")
    if isinstance(headings, list):
        headings = " > ".join(map(str, headings))
    return f"{place} {headings}" if headings else place
