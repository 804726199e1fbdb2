"""`kvrag bench decode`: tokens a second against Transformers' generate."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag_bench.cli import options as b


def bench_decode(
    model: b.BenchModelOption = None,
    random_shape: b.ShapeOption = "qwen2.5-0.5b",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of 200 tokens in the prompt.")] = 10,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the answer.")] = 64,
    repeats: b.RepeatsOption = 3,
    device: o.DeviceOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Compare the speed of writing an answer with Transformers' generate."""
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.decode import DecodeOptions, run_decode_bench

    quiet_libraries()
    options = DecodeOptions(model, random_shape, chunks, tokens, repeats, device)
    with console.progress("measuring"):
        row = run_decode_bench(options)
    if as_json:
        console.print_json(row)
        return
    plain, ours = (f"{1e3 * one:.1f} ms" for one in (row.plain_seconds, row.kvrag_seconds))
    console.out().print(
        f"{row.model}, {row.num_prompt_tokens:,} tokens before, {row.num_threads} threads: "
        f"generate {plain} a token, kvrag {ours} a token, {row.speedup:.1f}x; "
        f"{1 / row.kvrag_seconds:.0f} tokens a second",
        markup=False,
    )
