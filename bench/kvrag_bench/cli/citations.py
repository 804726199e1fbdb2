"""`kvrag bench citations`: how often a sentence names the passage that it rests on."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag_bench.cli import options as b


def bench_citations(
    model: b.NamedModelOption = "smollm2-135m",
    sets: Annotated[
        str, typer.Option(help="Sets of readable questions, separated by commas; all: the usual.")
    ] = "all",
    questions: Annotated[int, typer.Option(min=1, help="Questions of each set.")] = 20,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 48,
    seed: Annotated[int, typer.Option(help="Where the questions come from.")] = 2024,
    as_json: o.JsonOption = False,
) -> None:
    """Ask questions whose passages are known, and count whether citations name them."""
    from kvrag.cli.opening import quiet_libraries
    from kvrag.models.kv_model import KVModel
    from kvrag_bench.citations import SETS, run_citations_bench

    quiet_libraries()
    chosen = SETS if sets == "all" else tuple(name.strip() for name in sets.split(","))
    rows = []
    for row in run_citations_bench(KVModel.load(model), chosen, questions, tokens, seed):
        rows.append(row)
        if not as_json:
            console.out().print(
                f"{row.set}, {row.num_chunks:.0f} passages: of {row.num_sentences} sentences with "
                f"the right answer {row.num_cited} cite, {row.num_right} the right passage first; "
                f"{row.num_others} wrong ones besides",
                markup=False,
            )
    if as_json:
        console.print_json(rows)
