"""`kvrag search`: show the chunks found for a question, without answering it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrag import arguments
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.opening import load_reranker, open_catalog, open_index
from kvrag.errors import ParameterError

if TYPE_CHECKING:
    from kvrag.ingest.search import SearchHit

_SNIPPET_CHARACTERS = 100


def search(
    question: Annotated[str, typer.Argument(help="The question.")],
    index: o.IndexOption = o.DEFAULT_INDEX,
    top_k: o.TopKOption = o.DEFAULT_TOP_K,
    sparse: Annotated[
        bool,
        typer.Option("--sparse", help="Search by words (BM25) alone; loads no model."),
    ] = False,
    dense: Annotated[
        bool, typer.Option("--dense", help="Search by meaning (vectors) alone.")
    ] = False,
    filter: o.FilterOption = None,
    rerank: o.RerankOption = None,
    embedding: o.EmbeddingOption = None,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """Show the chunks that would be retrieved for a question, best first.

    By default, chunks are ranked by meaning and by words, and the two rankings are fused.
    """
    if not arguments.text(question, "the question").strip():
        raise ParameterError("the question is empty: give one in quotes")
    chosen = [name for name, is_set in (("--sparse", sparse), ("--dense", dense)) if is_set]
    if len(chosen) + (rerank is not None) > 1:
        given = " and ".join([*chosen, *(["--rerank"] if rerank is not None else [])])
        raise ParameterError(f"{given} exclude each other: leave all but one out")
    with (
        open_catalog(index, store)
        if sparse
        else open_index(index, store=store, embedding=embedding) as opened
    ):
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
