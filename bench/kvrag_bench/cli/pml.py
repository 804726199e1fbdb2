"""`kvrag bench pml`: prompts of modules against full prefill on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag_bench.cli import options as b


def bench_pml(
    model: b.BenchModelOption = None,
    random_shape: b.ShapeOption = "qwen2.5-0.5b",
    modules: Annotated[int, typer.Option(min=1, help="Modules that the prompt imports.")] = 6,
    module_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each module.")] = 500,
    text_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt's own text.")] = 30,
    policy: o.PolicyOption = "none",
    ratio: Annotated[
        float, typer.Option(help="Share that a policy which takes one recomputes.")
    ] = 0.15,
    batch: Annotated[
        int,
        typer.Option(min=1, help="Prompts answered together, for their peak memory."),
    ] = 8,
    repeats: b.RepeatsOption = 3,
    as_json: o.JsonOption = False,
) -> None:
    """Time prompt markup: encoding a schema over its full prefill, and the first token."""
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.pml import PMLBenchOptions, run_pml_bench

    quiet_libraries()
    options = PMLBenchOptions(
        model=model,
        shape=random_shape,
        num_modules=modules,
        module_tokens=module_tokens,
        text_tokens=text_tokens,
        policy=policy,
        ratio=ratio,
        batch=batch,
        repeats=repeats,
    )
    with console.progress("measuring") as say:
        row = run_pml_bench(options, on_progress=say)
    if as_json:
        console.print_json([row])
        return
    console.write(
        f"{row.model}, {row.num_modules} modules of {row.module_tokens} tokens and "
        f"{row.text_tokens} of text, policy {row.policy}\n"
        f"time to first token: plain {console.format_seconds(row.plain_ttft_seconds)}, modules "
        f"{console.format_seconds(row.ttft_seconds)}: {row.speedup:.1f}x; floor "
        f"{console.format_seconds(row.floor_seconds)}, {row.floor_ratio:.2f} times that\n"
        f"encoding: {row.encode_tokens_per_second:,.0f} tokens/s, full prefill "
        f"{row.prefill_tokens_per_second:,.0f} tokens/s: {row.encode_share:.0%}\n"
        f"peak memory: one prompt {console.format_bytes(row.single_peak_bytes)}, {row.batch} "
        f"together {console.format_bytes(row.batch_peak_bytes)}; KV of one "
        f"{console.format_bytes(row.kv_bytes)}\n"
    )
