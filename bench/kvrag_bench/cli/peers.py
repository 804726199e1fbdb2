"""`kvrag bench peers`: kvrag and other tools, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.console import EXIT_FAILURE
from kvrag_bench.cli import lists

if TYPE_CHECKING:
    from kvrag_bench.peers.run import PeerRow


def bench_peers(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A name of 'kvrag models' with one GGUF file.")
    ] = "smollm2-135m",
    peers: Annotated[
        str | None,
        typer.Option(
            help="Tools, with commas, such as 'transformers,kvrag two_stage,llama.cpp'.",
            show_default="all that are installed",
        ),
    ] = None,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of the handbook in each prompt.")] = 8,
    sets: Annotated[
        int, typer.Option(min=1, help="Sets of chunks, each asked about three times.")
    ] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 24,
    seed: Annotated[int, typer.Option(help="Seed of the choice and order of chunks.")] = 0,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Also draw the rows.")
    ] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Compare kvrag with other tools: time to first token, speed, memory, agreement.

    Each tool gets a separate process and the same prompts over pages of the handbook: documents
    that are together for the first time, then in another order, then with another question. Tools
    that are not installed are left out.
    """
    import torch

    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.peers.options import PeersOptions
    from kvrag_bench.peers.run import run_peers_bench
    from kvrag_bench.peers.systems import PEERS
    from kvrag_bench.quality.picture import check_picture_path

    quiet_libraries()
    if picture is not None:
        check_picture_path(picture)
    names = tuple(PEERS) if peers is None else lists.names(peers, "--peers")
    options = PeersOptions(model, names, chunks, sets, tokens, seed)
    with console.progress("measuring") as say:
        rows = run_peers_bench(options, on_progress=say)
    has_failed = any(row.failure for row in rows)
    if picture is not None and not all(row.failure for row in rows):
        from kvrag_bench.peers.picture import draw_peers

        draw_peers(rows, picture)
    if as_json:
        console.print_json(rows)
        if has_failed:
            raise typer.Exit(EXIT_FAILURE)
        return
    _print_rows(rows)
    console.out().print(
        f"{model}, {chunks} chunks, {torch.get_num_threads()} threads; seconds to the first token, "
        "median, and how many times sooner than Transformers; agreement: share of the answer that "
        "equals the tool's own after full prefill",
        style="dim",
        soft_wrap=True,
        markup=False,
    )
    if has_failed:
        raise typer.Exit(EXIT_FAILURE)


def _print_rows(rows: Sequence[PeerRow]) -> None:
    from rich.table import Table

    from kvrag_bench.peers.workload import VISITS

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tool", no_wrap=True)
    for name in (*VISITS, "full prefill", "tokens/s", "memory", "agreement"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("set up as")
    for row in rows:
        if row.failure:
            table.add_row(row.name, *["-"] * 7, f"failed: {row.failure}")
            continue
        times = [
            f"{row.ttft_seconds[visit]:.2f} s"
            + ("" if row.speedup is None else f" {row.speedup[visit]:.1f}x")
            for visit in VISITS
        ]
        table.add_row(
            row.name,
            *times,
            f"{row.full_seconds:.2f} s",
            "-" if row.tokens_per_second is None else f"{row.tokens_per_second:.0f}",
            console.format_bytes(row.peak_bytes),
            f"{row.agreement:.0%}",
            f"{row.version}: {row.settings}",
        )
    console.out().print(table)
