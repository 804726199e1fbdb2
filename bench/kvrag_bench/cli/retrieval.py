"""`kvrag bench retrieval`: recall of dense, sparse, hybrid and reranked search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag_bench.cli import lists

if TYPE_CHECKING:
    from kvrag_bench.retrieval import RetrievalRow


def bench_retrieval(
    data: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Sets, with commas: 'readable' (200 questions over the handbook and generated "
            "lives), files of questions with their texts, such as MuSiQue's, or folders of pages, "
            "whose headings and first sentences are asked for.",
        ),
    ] = "readable",
    questions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Only the first questions of each file, with their texts. Default: all.",
            show_default=False,
        ),
    ] = None,
    chunk_tokens: Annotated[
        str, typer.Option(help="Lengths of chunks in tokens, with commas.")
    ] = "128,256,512",
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="Model whose tokenizer cuts the chunks."),
    ] = "smollm2-135m",
    embedding: Annotated[str, typer.Option(help="Embedding: a name, folder or hub name.")] = (
        "minilm"
    ),
    rerank: o.RerankOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Search for the chunks that hold the answers of questions.

    Recall at 4 and 10 is the share of questions with a chunk among the first 4 or 10 that comes
    from the question's own documents and contains an answer. MRR is the mean reciprocal rank of
    the first of these. The last column is the share of chunks found among the first 4 by
    their last 15 words.
    """
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.retrieval import RetrievalOptions, run_retrieval_bench

    quiet_libraries()
    options = RetrievalOptions(
        data=lists.names(data, "--data"),
        num_questions=questions,
        model=model,
        embedding=embedding,
        chunk_tokens=lists.numbers(chunk_tokens, "--chunk-tokens"),
        rerank=rerank,
    )
    with console.progress("indexing") as say:
        rows = list(run_retrieval_bench(options, on_progress=say))
    if as_json:
        console.print_json(rows)
    else:
        _print_rows(rows)


def _print_rows(rows: Sequence[RetrievalRow]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("set", "chunk", "search", "recall@4", "recall@10", "MRR", "last words"):
        table.add_column(name, justify="left" if name in ("set", "search") else "right")
    for row in rows:
        table.add_row(
            f"{row.data} ({row.num_questions})",
            f"{row.chunk_tokens}",
            row.way,
            f"{row.recall_4:.3f}",
            f"{row.recall_10:.3f}",
            f"{row.mrr:.3f}",
            f"{row.tails:.2f}",
        )
    console.out().print(table)
