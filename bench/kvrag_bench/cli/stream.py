"""`kvrag bench stream`: contexts streamed over a link whose speed changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag_bench.cli import options as b

if TYPE_CHECKING:
    from kvrag_bench.stream.measure import StreamRows


def bench_stream(
    codec: Annotated[str, typer.Option(help="How the context is stored.")] = "stream:2",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of the context.")] = 10,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each, at least.")] = 170,
    ttft: Annotated[float, typer.Option(help="Target time to first token, in seconds.")] = 1.0,
    traces: Annotated[int, typer.Option(min=1, help="Random traces of 0.1 to 10 Gb/s.")] = 40,
    step: Annotated[
        float,
        typer.Option(help="Seconds for which a link keeps its speed."),
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the first trace and of the text.")] = 0,
    repeats: b.RepeatsOption = 5,
    time_scale: Annotated[float, typer.Option(help="Factor of all times over the paper's.")] = 2.0,
    as_json: o.JsonOption = False,
) -> None:
    """Count deadlines met over a shaped link: adaptive, at fixed levels, knowing the trace.

    The link and the machine are scaled to CacheGen's setting; sizes and errors are
    those of kvrag-tiny.
    """
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.stream.measure import StreamOptions, measure_streaming

    options = StreamOptions(
        codec, chunks, chunk_tokens, ttft, traces, step, seed, repeats, time_scale
    )
    quiet_libraries()
    with console.progress("measuring") as say:
        rows = measure_streaming(options, say)
    if as_json:
        console.print_json(rows)
        return
    _print(rows)


def _print(rows: StreamRows) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("way", no_wrap=True)
    for name in ("late", "mean TTFT", "SNR", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("chunks by level")
    for row in rows.ways:
        table.add_row(
            row.way,
            f"{row.violations:.0%}",
            console.format_seconds(row.mean_seconds),
            f"{row.decibels:.1f} dB",
            f"{row.relative_error:.1e}",
            ", ".join(f"{count} {level}" for level, count in row.levels.items()),
        )
    out = console.out()
    out.print(table)
    steady = rows.constant
    lines = (
        f"first token asked for within {rows.ttft:g} s; adaptive takes {rows.over_oracle:.2f} "
        f"times the oracle's time; fixed level of the same SNR: {rows.same_quality}, of the same "
        f"mean error: {rows.same_error}",
        f"at 3 Gb/s: adaptive {console.format_seconds(steady.adaptive_seconds)}, 8-bit "
        f"{console.format_seconds(steady.eight_bit_seconds)} "
        f"({steady.eight_bit_over_adaptive:.2f}x), text "
        f"{console.format_seconds(steady.text_seconds)} ({steady.text_over_adaptive:.2f}x)",
        f"{rows.num_tokens} tokens, {console.format_bytes(rows.eight_bit_bytes)} in 8 bits; link "
        f"1:{rows.link_scale:.0f}, computing slowed {rows.compute_factor:.1f} times, decoding "
        f"{rows.decoding_share:.1%} of prefill",
    )
    for line in lines:
        out.print(line, style="dim", markup=False, soft_wrap=True)
