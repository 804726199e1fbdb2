"""`kvrag bench batch`: answers written together, against one after the other."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag_bench.cli import lists
from kvrag_bench.cli import options as b


def bench_batch(
    model: b.BenchModelOption = None,
    random_shape: b.ShapeOption = "qwen2.5-0.5b",
    policies: Annotated[str, typer.Option(help="Policies, separated by commas.")] = (
        "none,two_stage"
    ),
    prompts: Annotated[
        str, typer.Option(help="Prompts answered together; several numbers, with commas.")
    ] = "8",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of 200 tokens in a prompt.")] = 10,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    repeats: b.RepeatsOption = 3,
    processor_time: b.ProcessorTimeOption = False,
    device: o.DeviceOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Compare prompts answered together with the same prompts one after the other."""
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.batch import BatchOptions, run_batch_bench
    from kvrag_bench.setting import measured

    quiet_libraries()
    options = BatchOptions(
        model,
        random_shape,
        device,
        lists.names(policies, "--policies"),
        num_prompts=lists.numbers(prompts, "--prompts"),
        num_chunks=chunks,
        num_tokens=tokens,
        repeats=repeats,
        processor_time=processor_time,
    )
    with console.progress("measuring"):
        rows = measured(run_batch_bench(options))
    if as_json:
        console.print_json(rows)
        return
    for row in rows:
        gaps = ""
        if row.median_gap is not None:
            gaps = f"; gaps {1e3 * row.median_gap:.0f} ms, at most {row.gap_ratio:.1f} times that"
        console.out().print(
            f"{row.model}, {row.policy}, {row.num_prompts} prompts of {row.num_prompt_tokens:,} "
            f"tokens, {row.num_threads} threads: one after the other {row.alone_seconds:.1f} s, "
            f"together {row.together_seconds:.1f} s, {row.speedup:.2f}x ({row.cost:.2f} times one "
            f"prompt's){gaps}; {row.same:.0%} of the answers the same",
            markup=False,
        )
