"""`kvrag bench throughput`: requests a minute of `kvrag serve` with and without reuse."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag_bench.cli import lists
from kvrag_bench.cli import options as b


def bench_throughput(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A name of 'kvrag models', or a folder.")
    ] = "smollm2-135m",
    ways: Annotated[
        str,
        typer.Option(
            help="What answers, with commas: kvrag (its defaults), kvrag none, full prefill (the "
            "same server without reuse), llama.cpp (its server; needs xllamacpp)."
        ),
    ] = "kvrag,kvrag none,full prefill",
    beside: Annotated[
        str | None,
        typer.Option(
            help="Another server of OpenAI's API that runs already and has the same model, such "
            "as 'vllm serve': its address, with /v1."
        ),
    ] = None,
    clients: Annotated[str, typer.Option(help="Clients at the same time, with commas.")] = "8,32",
    requests: Annotated[int, typer.Option(min=1, help="Requests of each round.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in which all ways take turns.")] = 2,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in a prompt.")] = 4,
    max_tokens: o.MaxTokensOption = 32,
    processor_time: b.ProcessorTimeOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Ask a server questions over the handbook that it was never asked, from many clients."""
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.serving.throughput import BESIDE, ThroughputOptions, measure_throughput

    quiet_libraries()
    counts = lists.numbers(clients, "--clients")
    options = ThroughputOptions(
        model,
        (*lists.names(ways, "--ways"), *([BESIDE] if beside else [])),
        counts,
        requests,
        rounds,
        chunks,
        max_tokens,
        beside=beside,
        processor_time=processor_time,
    )
    with console.progress("measuring") as say:
        rows = measure_throughput(options, say)
    if as_json:
        console.print_json(rows)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("way", no_wrap=True)
    for name in ("clients", "requests/min", "of full", "first token", "p95", "CPU", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("failed", justify="right")
    for row in rows:
        table.add_row(
            row.way,
            str(row.num_clients),
            f"{row.requests_per_minute:.1f}",
            "-" if row.of_full is None else f"{row.of_full:.2f}x",
            console.format_seconds(row.ttft_p50_seconds),
            console.format_seconds(row.ttft_p95_seconds),
            "-" if row.processor_ms is None else f"{row.processor_ms:.0f} ms",
            f"{row.megabytes[-1]:.0f} MB" if row.megabytes else "-",
            str(row.num_failed),
        )
    console.out().print(table)
    prompt, answer = rows[0].prompt_tokens, rows[0].answer_tokens
    console.out().print(
        f"{model}, {prompt:.0f} prompt and {answer:.0f} answer tokens in the mean; CPU: the "
        "server's processor time for each answer",
        style="dim",
        soft_wrap=True,
        markup=False,
    )
