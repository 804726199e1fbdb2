"""`kvrag bench vllm`: fused prompts served by vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.errors import ParameterError
from kvrag_bench.cli import lists
from kvrag_bench.cli import options as b

if TYPE_CHECKING:
    from kvrag_bench.serving.served import Served, ServingOptions

_PARTS = ("speed", "shuffled", "steady", "stall")


def bench_vllm(
    parts: Annotated[
        str,
        typer.Option(
            help="What to measure, with commas: speed (time to first token against vLLM's own "
            "prefill), shuffled (documents in random order, against prefix caching), steady (many "
            "queries), stall (an answer being decoded while a prompt is fused)."
        ),
    ] = ",".join(_PARTS),
    random_shape: b.ShapeOption = "100m",
    context_tokens: Annotated[
        str, typer.Option(help="Tokens of the chunks in a prompt of speed, with commas.")
    ] = "2000,4000",
    repeats: b.RepeatsOption = 3,
    shuffled_queries: Annotated[int, typer.Option(min=2, help="Queries of shuffled.")] = 100,
    steady_queries: Annotated[int, typer.Option(min=400, help="Queries of steady.")] = 1000,
    document_tokens: Annotated[
        int,
        typer.Option(min=1, help="Tokens of each document of shuffled and steady."),
    ] = 250,
    workers: Annotated[
        int,
        typer.Option(min=1, help="Processes that share the model's heads (tensor parallelism)."),
    ] = 1,
    as_json: o.JsonOption = False,
) -> None:
    """Time fused prompts in vLLM, against its own prefill and prefix caching (random weights)."""
    chosen = lists.names(parts, "--parts")
    unknown = [part for part in chosen if part not in _PARTS]
    if unknown:
        raise ParameterError(f"--parts {unknown[0]!r}: expected {', '.join(_PARTS)}")
    lengths = lists.numbers(context_tokens, "--context-tokens")
    from kvrag.cli.opening import quiet_libraries
    from kvrag.llms.vllm.settings import require_tested
    from kvrag_bench.serving.served import ServingOptions, serving

    require_tested()
    quiet_libraries()
    options = ServingOptions(
        shape=random_shape,
        context_tokens=lengths,
        repeats=repeats,
        shuffled_queries=shuffled_queries,
        steady_queries=steady_queries,
        document_tokens=document_tokens,
        workers=workers,
    )
    found: dict[str, Any] = {}
    with console.progress("measuring") as say, serving(options, say) as served:
        for part in chosen:
            found[part] = _measure(part, served, options, say)
            if not as_json:
                _print(part, found[part])
    if as_json:
        console.print_json(found)


def _measure(
    part: str, served: Served, options: ServingOptions, say: Callable[[str], None]
) -> list[Any]:
    if part == "speed":
        from kvrag_bench.serving.speed import measure_speed

        return list(measure_speed(served, options, say))
    if part == "shuffled":
        from kvrag_bench.serving.shuffled import measure_shuffled

        return list(measure_shuffled(served, options, say))
    if part == "steady":
        from kvrag_bench.serving.steady import measure_steady

        return [measure_steady(served, options, say)]
    from kvrag_bench.serving.stall import measure_stall

    return list(measure_stall(served, options, say))


def _print(part: str, rows: Sequence[Any]) -> None:
    from rich.table import Table

    seconds = console.format_seconds
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns: tuple[str, ...]
    cells: list[tuple[str, ...]]
    if part == "speed":
        columns = ("policy", "tokens", "vLLM", "kvrag", "of it fusing", "speed-up", "of CPU time")
        cells = [
            (
                row.policy,
                str(row.context_tokens),
                seconds(row.plain_seconds),
                seconds(row.seconds),
                seconds(row.fuse_seconds),
                f"{row.speedup:.1f}x",
                "" if row.cpu_speedup is None else f"{row.cpu_speedup:.1f}x",
            )
            for row in rows
        ]
    elif part == "shuffled":
        columns = ("way", "mean first token", "not computed", "over prefix caching")
        cells = [
            (row.way, seconds(row.mean_seconds), f"{row.hit_rate:.1%}", f"{row.speedup:.1f}x")
            for row in rows
        ]
    elif part == "steady":
        columns = ("queries", "hits", "first 100", "last 100", "drift", "memory", "growth")
        cells = [
            (
                str(row.num_queries),
                f"{row.hit_rate:.1%}",
                seconds(row.first_seconds),
                seconds(row.last_seconds),
                f"{row.drift:+.1%}",
                f"{row.resident_bytes / 1e9:.2f} GB",
                f"{row.growth:+.1%}",
            )
            for row in rows
        ]
    else:
        columns = ("prompt", "first token", "step", "longest step", "times")
        cells = [
            (
                row.way,
                seconds(row.seconds),
                seconds(row.step_seconds),
                seconds(row.longest_seconds),
                f"{row.over_step:.1f}",
            )
            for row in rows
        ]
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    for row_cells in cells:
        table.add_row(*row_cells)
    console.out().print(f"{part}", style="bold")
    console.out().print(table)
