"""`kvrag bench gaps`: what one request may cost the others of `kvrag serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag_bench.cli import options as b


def bench_gaps(
    model: b.NamedModelOption = "kvrag-tiny",
    seconds: Annotated[
        float, typer.Option(parser=o.above_zero, help="Time after which a client leaves.")
    ] = 10.0,
    as_json: o.JsonOption = False,
) -> None:
    """Time the longest gap of a stream, and a question, beside requests of an attacker."""
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.serving.gaps import measure_gaps

    quiet_libraries()
    with console.progress("measuring") as say:
        rows = measure_gaps(model, seconds, say)
    if as_json:
        console.print_json(rows)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("sent", "answered"):
        table.add_column(name)
    for name in ("longest gap", "a question"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.sent,
            row.answered,
            console.format_seconds(row.longest_gap_seconds),
            console.format_seconds(row.question_seconds),
        )
    console.out().print(table)
