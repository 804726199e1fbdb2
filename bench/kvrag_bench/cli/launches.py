"""`kvrag bench launches`: what a prompt starts on a graphics card."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.codec.names import RAW
from kvrag.fusion.policies import DEFAULT_POLICY
from kvrag_bench.cli import lists
from kvrag_bench.cli import options as b


def bench_launches(
    shape: b.ShapeOption = "llama-3.1-8b",
    policy: Annotated[
        str, typer.Option(help="Policies to count, with commas.")
    ] = f"none,{DEFAULT_POLICY}",
    ratio: Annotated[
        float, typer.Option(help="Share that policies which take one recompute.")
    ] = 0.15,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in the prompt.")] = 10,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each chunk.")] = 500,
    question_tokens: b.QuestionTokensOption = 30,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts that wait at the same time.")] = 1,
    memory: b.MemoryOption = "none",
    codec: b.ChunkCodecOption = RAW,
    as_json: o.JsonOption = False,
) -> None:
    """Count what a prompt starts on a graphics card, and how often it waits; needs no card."""
    names = lists.names(policy, "--policy")
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.launches import count_launches

    quiet_libraries()
    rows = []
    with console.progress("counting") as say:
        for name in names:
            say(name)
            rows.append(
                count_launches(
                    shape,
                    name,
                    ratio=ratio,
                    num_chunks=chunks,
                    chunk_tokens=chunk_tokens,
                    question_tokens=question_tokens,
                    memory=memory,
                    codec=codec,
                    num_prompts=prompts,
                )
            )
    if as_json:
        console.print_json(rows)
        return
    for row in rows:
        phases = "; ".join(
            f"{phase} {number:,} kernels, {row.copies.get(phase, 0)} copies, "
            f"{row.waits.get(phase, 0)} waits"
            for phase, number in sorted(row.launches.items())
        )
        own = ", ".join(f"{name} {ms:.1f}" for name, ms in row.host_ms_by_phase.items())
        console.out().print(
            f"{row.num_prompts} x {row.policy}, {row.codec}, {row.num_tokens:,} tokens: "
            f"{row.launches_per_layer:.1f} kernels a "
            f"layer and prompt, {row.num_waits} waits of the prompt's thread, whose own time is "
            f"{row.host_ms:.1f} ms ({own}). {phases}",
            markup=False,
        )
