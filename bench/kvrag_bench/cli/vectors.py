"""`kvrag bench vectors`: the graph of very many vectors against comparing all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o

if TYPE_CHECKING:
    from kvrag_bench.vectors import VectorBenchResult


def bench_vectors(
    count: Annotated[int, typer.Option(min=1, help="How many vectors.")] = 200_000,
    dim: Annotated[int, typer.Option(min=2, help="Their length.")] = 384,
    questions: Annotated[int, typer.Option(min=1, help="Searches of each kind.")] = 200,
    graph: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Keep the graph in this file while it is made; the next run continues.",
            show_default=False,
        ),
    ] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Search generated vectors by a graph, as an index above 50,000 vectors does.

    The vectors belong to 1,000 clusters; questions are near some of them. Recall is the share of
    the 10 nearest, by comparing all, that the graph finds. Rows with fewer vectors have a filter.
    """
    from kvrag_bench.vectors import VectorBenchOptions, run_vector_bench

    options = VectorBenchOptions(count, dim, questions, graph=graph)
    with console.progress("generating vectors") as say:
        result = run_vector_bench(options, on_progress=say)
    if as_json:
        console.print_json(result)
    else:
        _print(result)


def _print(result: VectorBenchResult) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("search", "among", "recall@10", "ms", "95 %", "ms, comparing all"):
        table.add_column(name, justify="left" if name == "search" else "right")
    for row in result.rows:
        table.add_row(
            row.way,
            f"{row.num_wanted:,}",
            f"{row.recall:.3f}",
            f"{row.milliseconds:.2f}",
            f"{row.slow_milliseconds:.2f}",
            f"{row.flat_milliseconds:.1f}",
        )
    console.out().print(table)
    made = (
        ""
        if result.build_seconds != result.build_seconds
        else f" made in {result.build_seconds:.0f} s,"
    )
    console.write(
        f"\n{result.num_vectors:,} vectors of {result.dim}:{made} "
        f"{console.format_bytes(result.memory_bytes)} of memory; {result.add_milliseconds:.2f} ms "
        f"for a vector that joins, {result.remove_milliseconds:.3f} ms for one that leaves\n"
    )
