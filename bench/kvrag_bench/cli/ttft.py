"""`kvrag bench`: kvrag against full prefill on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.codec.names import RAW
from kvrag.errors import ParameterError
from kvrag.fusion.policies import DEFAULT_POLICY
from kvrag_bench.cli import lists
from kvrag_bench.cli import options as b

if TYPE_CHECKING:
    from kvrag_bench.ttft import TTFTRow


def bench_ttft(
    model: b.BenchModelOption = None,
    random_shape: b.ShapeOption = "qwen2.5-0.5b",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in the prompt.")] = 10,
    chunk_tokens: Annotated[
        str, typer.Option(help="Tokens of each chunk; several, with commas, make several rows.")
    ] = "100,250,500",
    policies: Annotated[
        str, typer.Option(help="Policies to time, with commas.")
    ] = f"none,{DEFAULT_POLICY}",
    ratio: Annotated[
        float, typer.Option(help="Share that policies which take one recompute.")
    ] = 0.15,
    context: Annotated[
        str | None,
        typer.Option(
            help="Contexts to encode chunks after, with commas. Default: as 'kvrag ingest'."
        ),
    ] = None,
    question_tokens: b.QuestionTokensOption = 30,
    repeats: b.RepeatsOption = 3,
    compute: o.ComputeOption = None,
    device: o.DeviceOption = None,
    never_slower: Annotated[
        bool, typer.Option(help="Compute prompts as a whole where prices say that it is faster.")
    ] = False,
    codec: b.ChunkCodecOption = RAW,
    memory: b.MemoryOption = "none",
    as_json: o.JsonOption = False,
) -> None:
    """Compare time to first token with full prefill, and with the floor this machine allows."""
    lengths = lists.numbers(chunk_tokens, "--chunk-tokens")
    names = lists.names(policies, "--policies")
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.setting import measured
    from kvrag_bench.ttft import TTFTOptions, run_ttft_bench

    quiet_libraries()
    options = TTFTOptions(
        model=model,
        shape=random_shape,
        num_chunks=chunks,
        chunk_tokens=lengths,
        policies=names,
        ratio=ratio,
        question_tokens=question_tokens,
        repeats=repeats,
        contexts=(None,) if context is None else lists.names(context, "--context"),
        compute=compute,
        device=device,
        never_slower=never_slower,
        codec=codec,
        memory=memory,
    )
    with console.progress("measuring") as say:
        rows = measured(run_ttft_bench(options, on_progress=say))
    if as_json:
        console.print_json(rows)
    else:
        _print_rows(rows)


def bench_ingest(
    model: b.BenchModelOption = None,
    random_shape: b.ShapeOption = "qwen2.5-0.5b",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks indexed.")] = 12,
    chunk_tokens: Annotated[
        str, typer.Option(help="Tokens of the chunks, in turn, with commas.")
    ] = "100,250,500",
    batch_sizes: Annotated[
        str,
        typer.Option(help="Batch sizes of full prefill; the best counts."),
    ] = "1,2,4,8",
    context: Annotated[
        str,
        typer.Option(help="Contexts to encode chunks after, with commas (see 'kvrag ingest')."),
    ] = "none",
    repeats: b.RepeatsOption = 3,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Compare two actors of Ray with one process of two threads instead: a long run "
            "less a short one, with chunks of the first length.",
        ),
    ] = False,
    as_json: o.JsonOption = False,
) -> None:
    """Compare indexing throughput with the model's own batched prefill."""
    lengths = lists.numbers(chunk_tokens, "--chunk-tokens")
    if ray:
        _bench_ray(model, chunks, lengths[0], as_json)
        return
    sizes = lists.numbers(batch_sizes, "--batch-sizes")
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.ingest import IngestOptions, run_ingest_bench

    quiet_libraries()
    options = IngestOptions(
        model=model,
        shape=random_shape,
        num_chunks=chunks,
        chunk_tokens=lengths,
        batch_sizes=sizes,
        repeats=repeats,
        contexts=lists.names(context, "--context"),
    )
    with console.progress("measuring") as say:
        rows = run_ingest_bench(options, on_progress=say)
    if as_json:
        console.print_json(rows)
        return
    for row in rows:
        console.out().print(
            f"{row.model}, context {row.context}: {row.ingest_tokens_per_second:,.0f} tokens/s "
            f"indexed, {row.prefill_tokens_per_second:,.0f} tokens/s full prefill in batches of "
            f"{row.prefill_batch_size}: {row.share:.0%}; {row.bytes_per_token:,.0f} bytes a token",
            markup=False,
        )


def _bench_ray(model: str | None, chunks: int, chunk_tokens: int, as_json: bool) -> None:
    from kvrag.cli.opening import quiet_libraries
    from kvrag.plugins import require
    from kvrag_bench.ray_ingest import run_ray_bench

    if model is None:
        raise ParameterError("--ray needs --model: workers load it by its name")
    require("ray", "ray")
    quiet_libraries()
    with console.progress("measuring") as say:
        row = run_ray_bench(model, chunks, chunk_tokens, say)
    if as_json:
        console.print_json(row)
        return
    console.out().print(
        f"{row.model}, {row.num_tokens:,} tokens: {row.here_cpu:.2f} ms of processor time a token "
        f"in one process of two threads; with Ray {row.workers_cpu:.2f} ms in workers and "
        f"{row.rest_cpu:.2f} ms in driver and daemons ({row.overhead:+.1%}); "
        f"wall time {row.here_wall:.2f} and {row.ray_wall:.2f} ms",
        markup=False,
    )


def _print_rows(rows: Sequence[TTFTRow]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", no_wrap=True)
    table.add_column("encoded after", no_wrap=True)
    for name in (
        "prompt",
        "plain",
        "of text",
        "prefill",
        "kvrag",
        "speedup",
        "floor",
        "x floor",
        "choice",
        "work",
        "peak",
        "KV",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        policy = row.policy if row.ratio is None else f"{row.policy} {row.ratio:.0%}"
        policy += ", computed as a whole" if row.outpriced_tokens else ""
        table.add_row(
            policy,
            "nothing" if row.context == "none" else row.context,
            f"{row.context_tokens:,} tokens",
            console.format_seconds(row.plain_ttft_seconds),
            console.format_seconds(row.plain_text_seconds),
            f"{row.prefill_speedup:.2f}x, {row.prefill_rate:.0%}",
            console.format_seconds(row.ttft_seconds),
            f"{row.speedup:.1f}x",
            console.format_seconds(row.floor_seconds),
            f"{row.floor_ratio:.2f}",
            f"{row.select_share:.1%}",
            f"{row.work_ratio:.2f}",
            console.format_bytes(row.peak_bytes),
            console.format_bytes(row.kv_bytes),
        )
    out = console.out()
    out.print(table)
    if rows:
        out.print(
            f"{rows[0].model}, {rows[0].num_chunks} chunks, computing in {rows[0].compute}; time "
            "to first token, median; plain: from the prompt's ids; of text: from its text; "
            "speedup: median of rounds in which all ran in turn; prefill: plain over "
            "kvrag's own without reuse, and the rate of the latter over that of its "
            "matrices alone; choice: share of it spent on choosing; work: multiplications over "
            "those that chosen and fresh tokens need",
            style="dim",
            markup=False,
        )
