"""`kvrag bench load`: loading stored KV beside computing what is not stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console, lists
from kvrag.cli import options as o
from kvrag.fusion.loader import LOAD_THREADS, MAX_LOAD_THREADS

if TYPE_CHECKING:
    from kvrag.bench.load.pipelining import PipeliningRow


def bench_load(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Folder, hub name or 'kvrag-tiny'.", show_default=False),
    ] = None,
    random_shape: Annotated[
        str, typer.Option(help="Without --model: random weights in the shape of this model.")
    ] = "qwen2.5-0.5b",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in the prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each chunk.")] = 250,
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the question.")] = 30,
    codec: Annotated[str, typer.Option(help="How the chunks are stored.")] = "raw",
    speeds: Annotated[
        str, typer.Option(help="Speeds of the store in GB/s, with commas.")
    ] = "0.05,0.2,1,5",
    policy: Annotated[str, typer.Option(help="What is computed again.")] = "deviation",
    ratios: Annotated[
        str, typer.Option(help="Shares that a policy which takes one recomputes, with commas.")
    ] = "0,0.05,0.15",
    threads: Annotated[
        int, typer.Option(min=1, max=MAX_LOAD_THREADS, help="Chunks read at the same time.")
    ] = LOAD_THREADS,
    repeats: Annotated[int, typer.Option(min=1, help="Runs; the median counts.")] = 5,
    as_json: o.JsonOption = False,
) -> None:
    """Time to first token with layers loaded in the background, over a throttled store."""
    rates = lists.positive(speeds, "--speeds")
    shares = lists.shares(ratios, "--ratios")
    from kvrag.bench.load.pipelining import PipeliningOptions, measure_pipelining
    from kvrag.bench.load.prompts import LoadPrompt
    from kvrag.cli.opening import quiet_libraries

    quiet_libraries()
    options = PipeliningOptions(
        prompt=LoadPrompt(model, random_shape, chunks, chunk_tokens, question_tokens, codec),
        gigabytes_per_second=rates,
        policy=policy,
        ratios=shares,
        load_threads=threads,
        repeats=repeats,
    )
    with console.err().status("measuring") as status:
        rows = list(measure_pipelining(options, status.update))
    if as_json:
        console.print_json(rows)
    else:
        _print_rows(rows)


def _print_rows(rows: Sequence[PipeliningRow]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", no_wrap=True)
    for name in (
        "GB/s",
        "load",
        "recompute",
        "one by one",
        "pipelined",
        "hidden",
        "x longer",
        "x bound",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.policy if row.ratio is None else f"{row.policy} {row.ratio:.0%}",
            f"{row.gigabytes_per_second:g}",
            console.format_seconds(row.load_seconds),
            console.format_seconds(row.recompute_seconds),
            console.format_seconds(row.serial_seconds),
            console.format_seconds(row.pipelined_seconds),
            console.format_seconds(row.hidden_seconds),
            f"{row.over_longer:.2f}",
            f"{row.over_bound:.2f}",
        )
    console.out().print(table)
    console.out().print(
        "time to first token, medians; longer: of load and recompute; bound: 1.10 times that plus "
        "5 ms",
        style="dim",
        markup=False,
    )
