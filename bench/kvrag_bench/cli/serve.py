"""`kvrag bench serve`: many streams of `kvrag serve` at once."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag_bench.cli import options as b


def bench_serve(
    model: b.NamedModelOption = "kvrag-tiny",
    clients: Annotated[int, typer.Option(min=1, help="Streams at the same time.")] = 64,
    seconds: Annotated[
        float, typer.Option(parser=o.above_zero, help="Time in which streams begin.")
    ] = 120.0,
    streams: Annotated[
        int, typer.Option(min=1, help="Answers that the server generates at the same time.")
    ] = 8,
    prompts: Annotated[int, typer.Option(min=1, help="Different prompts.")] = 100,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in a prompt.")] = 5,
    max_tokens: o.MaxTokensOption = 32,
    as_json: o.JsonOption = False,
) -> None:
    """Count lost and mixed-up streams, and time their first tokens, one at a time and many."""
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.serving.streams import StreamsOptions, measure_streams

    quiet_libraries()
    options = StreamsOptions(model, clients, seconds, streams, prompts, chunks, max_tokens)
    with console.progress("measuring") as say:
        rows = measure_streams(options, say)
    if as_json:
        console.print_json(rows)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ("streams at a time", "answers", "lost", "mixed up", "first token", "p95")
    for name in (*columns, "whole", "p95", "pieces/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            *map(str, (row.num_clients, row.num_streams, row.num_lost, row.num_mixed)),
            console.format_seconds(row.ttft_p50_seconds),
            console.format_seconds(row.ttft_p95_seconds),
            console.format_seconds(row.total_p50_seconds),
            console.format_seconds(row.total_p95_seconds),
            f"{row.pieces_per_second:.0f}",
        )
    console.out().print(table)
