"""`kvrag bench eviction`: a decode step over what eviction leaves, against the full cache's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag_bench.cli import lists
from kvrag_bench.cli import options as b

if TYPE_CHECKING:
    from kvrag_bench.eviction import EvictionBenchRow


def bench_eviction(
    model: b.BenchModelOption = None,
    random_shape: b.ShapeOption = "qwen2.5-0.5b",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in the prompt.")] = 4096,
    eviction: Annotated[
        str, typer.Option(help="Policies, with commas; parameters follow colons.")
    ] = "corm,streaming,h2o,snapkv",
    steps: Annotated[
        int,
        typer.Option(min=1, help="Tokens decoded; the median counts."),
    ] = 32,
    sharpness: Annotated[
        float,
        typer.Option(
            help="Without --model: factor of the queries, so that random weights attend "
            "to some keys more than to others."
        ),
    ] = 1.0,
    as_json: o.JsonOption = False,
) -> None:
    """Measure the keys and memory that eviction keeps, and a decode step over the full cache's."""
    names = lists.names(eviction, "--eviction")
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.eviction import EvictionBenchOptions, run_eviction_bench

    quiet_libraries()
    options = EvictionBenchOptions(
        model=model,
        shape=random_shape,
        num_tokens=tokens,
        evictions=names,
        num_steps=steps,
        sharpness=sharpness,
    )
    with console.progress("measuring") as say:
        rows = run_eviction_bench(options, on_progress=say)
    if as_json:
        console.print_json(rows)
    else:
        _print_rows(rows)


def _print_rows(rows: list[EvictionBenchRow]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("eviction", no_wrap=True)
    for name in ("kept", "at the end", "step", "x full", "attention", "x full", "resident", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    first = rows[0]
    table.add_row(
        "full cache",
        "100%",
        "100%",
        console.format_seconds(first.full_step_seconds),
        "",
        console.format_seconds(first.full_attention_seconds),
        "",
        console.format_bytes(first.full_resident_bytes),
        "",
        style="dim",
    )
    for row in rows:
        table.add_row(
            row.eviction,
            f"{row.prompt_share:.0%}",
            f"{row.kept_share:.0%}",
            console.format_seconds(row.step_seconds),
            f"{row.step_ratio:.2f}",
            console.format_seconds(row.attention_seconds),
            f"{row.attention_ratio:.2f}",
            console.format_bytes(row.resident_bytes),
            console.format_bytes(row.peak_bytes),
        )
    out = console.out()
    out.print(table)
    out.print(
        f"{first.model}, a prompt of {first.num_tokens:,} tokens; kept: keys behind the prompt, "
        "mean over layers and heads; step: one token through the model, median; attention: of it, "
        "all layers' attention with the cache's own work; resident: memory of the cache, and its "
        "peak while the prompt was pruned",
        style="dim",
        markup=False,
    )
