"""`kvrag bench session`: turns of a conversation, with earlier turns kept and without."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.fusion.policies import DEFAULT_POLICY
from kvrag_bench.cli import options as b


def bench_session(
    model: b.BenchModelOption = None,
    random_shape: b.ShapeOption = "qwen2.5-0.5b",
    policy: o.PolicyOption = DEFAULT_POLICY,
    turns: Annotated[int, typer.Option(min=2, help="Turns of the conversation.")] = 20,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of 200 tokens in the first turn.")] = 4,
    question_tokens: b.QuestionTokensOption = 30,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 32,
    repeats: b.RepeatsOption = 3,
    processor_time: b.ProcessorTimeOption = False,
    as_json: o.JsonOption = False,
) -> None:
    """Measure the turns of a conversation: time to first token, and what is kept."""
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.session import SessionOptions, run_session_bench

    quiet_libraries()
    options = SessionOptions(
        model,
        random_shape,
        policy,
        num_turns=turns,
        num_chunks=chunks,
        question_tokens=question_tokens,
        num_tokens=tokens,
        repeats=repeats,
        processor_time=processor_time,
    )
    with console.progress("measuring") as say:
        rows = run_session_bench(options, say)
    if as_json:
        console.print_json(rows)
        return
    for row in rows:
        console.out().print(
            f"turn {row.turn}: {row.num_tokens:,} tokens, {row.num_kept:,} of them kept; first "
            f"token after {1e3 * row.seconds:.0f} ms, {row.num_tokens - row.num_kept:,} tokens "
            f"alone {1e3 * row.alone_seconds:.0f} ms ({row.ratio:.2f}x), with earlier turns from "
            f"the store {1e3 * row.stored_seconds:.0f} ms, without kept turns "
            f"{1e3 * row.anew_seconds:.0f} ms; {row.kept_bytes / 1e6:.0f} MB kept",
            markup=False,
        )
