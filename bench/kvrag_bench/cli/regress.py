"""`kvrag bench regress`: ratios of speed and quality against the last release's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console, lists
from kvrag.cli import options as o
from kvrag.cli.failures import EXIT_FAILURE
from kvrag.errors import ParameterError
from kvrag_bench.cli import options as b

if TYPE_CHECKING:
    from kvrag_bench.regress.compare import Change
    from kvrag_bench.regress.results import Entry, Results


def bench_regress(
    save: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION", help="Keep the results as this release's.", show_default=False
        ),
    ] = None,
    releases: Annotated[
        Path, typer.Option(metavar="DIR", help="Where results of releases are.")
    ] = Path("bench/releases"),
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Draw all releases into this folder, as SVG.", show_default=False
        ),
    ] = None,
    random_shape: b.ShapeOption = "smollm2-135m",
    models: Annotated[
        str, typer.Option(help="Models whose quality is measured, with commas.")
    ] = "kvrag-tiny,smollm2-135m",
    questions: Annotated[
        int, typer.Option(min=1, help="Questions to kvrag-tiny.", rich_help_panel=o.TUNING)
    ] = 100,
    rounds: Annotated[
        int, typer.Option(min=2, help="Timings of each ratio.", rich_help_panel=o.TUNING)
    ] = 6,
    as_json: o.JsonOption = False,
) -> None:
    """Measure ratios of speed and quality, and compare them with the last release's.

    The exit code is 1 if a figure is worse by more than noise.
    """
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.regress.compare import Verdict, compare
    from kvrag_bench.regress.options import RegressOptions
    from kvrag_bench.regress.results import (
        last_before,
        read_releases,
        release_path,
        write_results,
    )
    from kvrag_bench.regress.run import run_regress_bench

    quiet_libraries()
    # Whatever is wrong with the files is better known before minutes of measuring.
    path = None if save is None else release_path(releases, save)
    if out is not None and not out.is_dir():
        raise ParameterError(f"--out {out}: there is no such folder")
    before = last_before(read_releases(releases), None if path is None else path.stem)
    options = RegressOptions(
        shape=random_shape,
        models=lists.names(models, "--models"),
        num_questions=questions,
        rounds=rounds,
    )
    with console.progress("measuring") as say:
        now = run_regress_bench(options, say)
    if path is not None:
        now = replace(now, version=path.stem)
        write_results(now, path)
        console.note(f"results: {path}")
    if out is not None:
        from kvrag_bench.regress.picture import draw_releases

        for picture in draw_releases(read_releases(releases) or [now], out):
            console.note(f"picture: {picture}")
    changes = compare(before, now)
    if as_json:
        console.print_json([vars(change) for change in changes])
    else:
        _print_changes(changes, before, now)
    if any(change.verdict == Verdict.WORSE for change in changes):
        raise typer.Exit(EXIT_FAILURE)


def _print_changes(changes: Sequence[Change], before: Results | None, now: Results) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("figure", "unit", "then", "now", "change", ""):
        table.add_column(name, justify="right" if name in ("then", "now", "change") else "left")
    for change in changes:
        table.add_row(
            change.entry.name,
            change.entry.unit,
            _shown(change.before),
            _shown(change.now),
            "" if change.share is None else f"{change.share:+.1%}",
            "" if before is None else str(change.verdict),
            style={"worse": "red", "better": "green"}.get(change.verdict, ""),
        )
    out = console.out()
    out.print(table)
    out.print(
        "speed: the median of the rounds, and the least and the greatest; quality: the mean over "
        "questions or chunks",
        style="dim",
        markup=False,
    )
    for name, results in (("then", before), ("now", now)):
        if results is None:
            out.print("there is no earlier release to compare with", style="dim")
            continue
        libraries = ", ".join(
            f"{library} {version}" for library, version in results.libraries.items()
        )
        out.print(
            f"{name}: {results.version}, {results.processor}, {libraries}",
            style="dim",
            markup=False,
        )


def _shown(entry: Entry | None) -> str:
    if entry is None:
        return ""
    if not entry.is_timed:
        return f"{entry.value:.4g}"
    low, high = entry.interval
    return f"{entry.value:.3g} ({low:.3g} to {high:.3g})"
