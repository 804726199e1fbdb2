"""`kvrag bench load`: loading stored KV beside computing what is not stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.errors import ParameterError
from kvrag.loading import LOAD_THREADS, MAX_LOAD_THREADS
from kvrag_bench.cli import lists
from kvrag_bench.cli import options as b

if TYPE_CHECKING:
    from kvrag_bench.load.controller import ControllerRow
    from kvrag_bench.load.pipelining import PipeliningRow

_PARTS = ("pipelining", "controller")


def bench_load(
    parts: Annotated[
        str,
        typer.Option(
            help="What to measure, with commas: pipelining (layers loaded in the background), "
            "controller (the share that auto takes, against the best)."
        ),
    ] = ",".join(_PARTS),
    model: b.BenchModelOption = None,
    random_shape: b.ShapeOption = "qwen2.5-0.5b",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in the prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each chunk.")] = 250,
    question_tokens: b.QuestionTokensOption = 30,
    codec: Annotated[str, typer.Option(help="How the chunks are stored.")] = "raw",
    speeds: Annotated[
        str, typer.Option(help="Speeds of the store in GB/s, with commas.")
    ] = "0.05,0.2,1,5",
    policy: Annotated[
        str | None,
        typer.Option(
            help="What is computed again. Default: deviation, of the controller boundary.",
            show_default=False,
        ),
    ] = None,
    ratios: Annotated[
        str | None,
        typer.Option(
            help="Shares that a policy which takes one recomputes, with commas. Default: "
            "0,0.05,0.15, of the controller 0,0.02,0.05,0.1,0.15,0.3.",
            show_default=False,
        ),
    ] = None,
    floor: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Least share that the controller may take."),
    ] = 0.02,
    threads: Annotated[
        int,
        typer.Option(min=1, max=MAX_LOAD_THREADS, help="Chunks read at the same time."),
    ] = LOAD_THREADS,
    repeats: b.RepeatsOption = 5,
    as_json: o.JsonOption = False,
) -> None:
    """Time the first token over a throttled store: hidden loading, and the share auto takes."""
    chosen = lists.names(parts, "--parts")
    unknown = [part for part in chosen if part not in _PARTS]
    if unknown:
        raise ParameterError(f"--parts {unknown[0]!r}: expected {', '.join(_PARTS)}")
    rates = lists.positive(speeds, "--speeds")
    given: dict[str, Any] = {}
    if ratios is not None:
        given["ratios"] = lists.shares(ratios, "--ratios")
    if policy is not None:
        given["policy"] = policy
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.load.controller import ControllerOptions, measure_controller
    from kvrag_bench.load.pipelining import PipeliningOptions, measure_pipelining
    from kvrag_bench.load.prompts import LoadPrompt

    quiet_libraries()
    prompt = LoadPrompt(model, random_shape, chunks, chunk_tokens, question_tokens, codec)
    found: dict[str, list[Any]] = {}
    with console.progress("measuring") as say:
        if "pipelining" in chosen:
            pipelining = PipeliningOptions(
                prompt, rates, load_threads=threads, repeats=repeats, **given
            )
            found["pipelining"] = list(measure_pipelining(pipelining, say))
        if "controller" in chosen:
            controller = ControllerOptions(prompt, rates, floor=floor, repeats=repeats, **given)
            found["controller"] = list(measure_controller(controller, say))
    if as_json:
        console.print_json(found)
        return
    if "pipelining" in found:
        _print_pipelining(found["pipelining"])
    if "controller" in found:
        _print_controller(found["controller"])


def _print_pipelining(rows: Sequence[PipeliningRow]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", no_wrap=True)
    for name in (
        "GB/s",
        "load",
        "recompute",
        "one by one",
        "pipelined",
        "hidden",
        "x longer",
        "x bound",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.policy if row.ratio is None else f"{row.policy} {row.ratio:.0%}",
            f"{row.gigabytes_per_second:g}",
            console.format_seconds(row.load_seconds),
            console.format_seconds(row.recompute_seconds),
            console.format_seconds(row.serial_seconds),
            console.format_seconds(row.pipelined_seconds),
            console.format_seconds(row.hidden_seconds),
            f"{row.over_longer:.2f}",
            f"{row.over_bound:.2f}",
        )
    console.out().print(table)
    console.out().print(
        "time to first token, medians; longer: of load and recompute; bound: 1.10 times that plus "
        "5 ms",
        style="dim",
        markup=False,
    )


def _print_controller(rows: Sequence[ControllerRow]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("auto", no_wrap=True)
    names = ("GB/s", "computed", "took", "expected", "load", "expected", "best", "took", "x best")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.policy} {row.ratio:.0%}",
            f"{row.gigabytes_per_second:g}",
            f"{row.num_computed}",
            console.format_seconds(row.seconds),
            console.format_seconds(row.expected_seconds),
            console.format_seconds(row.load_seconds),
            console.format_seconds(row.expected_load_seconds),
            f"{row.best_ratio:.0%}",
            console.format_seconds(row.best_seconds),
            f"{row.over_best:.2f}",
        )
    console.out().print(table)
