"""`kvrag bench attention`: rates of attention of scattered rows, in the kernel and in PyTorch."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.errors import ParameterError
from kvrag_bench.cli import lists
from kvrag_bench.cli import options as b


def bench_attention(
    heads: Annotated[
        str, typer.Option(help="Query heads, key heads, and channels of a head, with commas.")
    ] = "9,3,64",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 6000,
    ratio: Annotated[
        float, typer.Option(help="Share of the tokens that attend, at random places.")
    ] = 0.15,
    dtype: Annotated[str, typer.Option(help="Element type: float32 or bfloat16.")] = "float32",
    repeats: b.RepeatsOption = 5,
    as_json: o.JsonOption = False,
) -> None:
    """Compare the attention of scattered rows with PyTorch's, and with its dense prefill."""
    sizes = lists.numbers(heads, "--heads")
    if len(sizes) != 3:
        raise ParameterError(f"--heads: expected three numbers, as in 9,3,64, found {heads}")
    import torch

    from kvrag.native import ATTENTION_TYPES, instruction_set
    from kvrag_bench.attention import AttentionOptions, run_attention_bench

    types = {str(one).removeprefix("torch."): one for one in ATTENTION_TYPES}
    if dtype not in types:
        raise ParameterError(f"--dtype: expected {' or '.join(types)}, found {dtype}")
    num_heads, kv_heads, head_dim = sizes
    options = AttentionOptions(num_heads, kv_heads, head_dim, tokens, ratio, types[dtype], repeats)
    with console.progress("measuring"):
        rows = list(run_attention_bench(options))
    if as_json:
        console.print_json(rows)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("attention")
    table.add_column("GFLOP/s", justify="right")
    for row in rows:
        table.add_row(row.way, f"{row.gflops:.1f}")
    console.out().print(table)
    console.out().print(
        f"{dtype}, {tokens:,} tokens, {ratio:.0%} of them attend, {instruction_set()}, "
        f"{torch.get_num_threads()} threads; useful operations in a second of CPU time, median",
        style="dim",
        markup=False,
    )
