"""`kvrag bench fronts`: what is reused of the requests of chat front ends."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag_bench.cli import options as b


def bench_fronts(
    model: b.NamedModelOption = "smollm2-135m",
    turns: Annotated[int, typer.Option(min=1, help="Turns of each conversation.")] = 10,
    replays: Annotated[int, typer.Option(min=1, help="Times that each is replayed.")] = 1,
    max_tokens: o.MaxTokensOption = 32,
    as_json: o.JsonOption = False,
) -> None:
    """Replay conversations as Open WebUI, LibreChat and AnythingLLM send them, each turn."""
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.serving.fronts import replay_fronts

    quiet_libraries()
    with console.progress("replaying") as say:
        found = replay_fronts(model, turns, replays, max_tokens, say)
    if as_json:
        console.print_json(found)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("front end")
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("reused, by turn (%)")
    table.add_column("by full prefill", justify="right", no_wrap=True)
    for (name, _), of_replay in groupby(found, lambda one: (one.front, one.replay)):
        rows = list(of_replay)
        sizes = [row.num_tokens for row in rows]
        table.add_row(
            name,
            f"{min(sizes)} to {max(sizes)}",
            ", ".join(f"{100 * row.num_cached / row.num_tokens:.0f}" for row in rows),
            str(sum(row.num_outpriced > 0 for row in rows)),
        )
    console.out().print(table)
