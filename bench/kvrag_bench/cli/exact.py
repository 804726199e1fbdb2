"""`kvrag bench exact`: fusion against plain Transformers, where both must give the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.console import EXIT_FAILURE, fail
from kvrag_bench.cli import lists

if TYPE_CHECKING:
    from kvrag_bench.exact import ExactRow


def bench_exact(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A name of 'kvrag models', a folder or hub name.")
    ] = "smollm2-135m",
    tokens: Annotated[
        str, typer.Option(help="Tokens of the prompt; several, with commas, make several prompts.")
    ] = "500,2000,8000",
    data: Annotated[
        Path, typer.Option(metavar="PATH", help="A text file, or a folder of text files.")
    ] = Path("examples/handbook"),
    policies: Annotated[
        str, typer.Option(help="Policies that recompute everything, with commas.")
    ] = "deviation,two_stage",
    dtypes: Annotated[
        str, typer.Option(help="Element types, with commas; the first is the others' reference.")
    ] = "float32,bfloat16",
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens in the answer.")] = 32,
    as_json: o.JsonOption = False,
) -> None:
    """Compare logits and answers with plain Transformers where both must be the same.

    Where everything is recomputed, and where chunks were encoded after the same text as in the
    prompt, logits in float32 must not differ by more than 1e-4 of their standard deviation, and the
    answers must be equal; otherwise the exit code is 1.
    """
    lengths = lists.numbers(tokens, "--tokens")
    policy_names = lists.names(policies, "--policies")
    types = lists.names(dtypes, "--dtypes")
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.exact import ExactOptions, run_exact_bench

    quiet_libraries()
    options = ExactOptions(
        model=model,
        data=data,
        num_tokens=lengths,
        policies=policy_names,
        dtypes=types,
        answer_tokens=answer_tokens,
    )
    with console.progress("measuring") as say:
        rows = list(run_exact_bench(options, on_progress=say))
    if as_json:
        console.print_json(rows)
    else:
        _print_rows(rows)
    for row in rows:
        if not row.is_right:
            fail(
                f"{row.way}, {row.num_tokens:,} tokens: logits differ by {row.by_deviation:.1e} "
                f"standard deviations (at most {row.bound:.0e} expected), and {row.num_equal} of "
                f"{row.num_answer} answer tokens are equal"
            )
    if not all(row.is_right for row in rows):
        raise typer.Exit(EXIT_FAILURE)


def _print_rows(rows: Sequence[ExactRow]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("type", "tokens", "compared", "with"):
        table.add_column(name, justify="right" if name == "tokens" else "left")
    for name in ("exact", "reused", "again", "/ std", "/ range", "answer"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.dtype,
            f"{row.num_tokens:,}",
            row.way,
            row.reference,
            f"{row.num_exact:,}",
            f"{row.num_reused:,}",
            f"{row.num_recomputed:,}",
            f"{row.by_deviation:.1e}",
            f"{row.by_range:.1e}",
            f"{row.num_equal} of {row.num_answer}",
            style="" if row.is_right else "red",
        )
    out = console.out()
    out.print(table)
    out.print(
        f"{rows[0].model}; exact, reused, again: tokens of chunks that needed no repair, that kept "
        "their stored KV, that were computed again; largest difference of a logit along the answer "
        "over their standard deviation and range; answer: tokens before the first that differs",
        style="dim",
        markup=False,
    )
