"""`kvrag bench regress`: ratios of speed and quality against the last release's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.console import EXIT_FAILURE

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
    as_json: o.JsonOption = False,
) -> None:
    """Measure ratios of speed and quality, and compare them with the last release's.

    The exit code is 1 if a figure is worse by more than noise. Timings are compared only with those
    of the same processor.
    """
    from kvrag.cli.opening import quiet_libraries
    from kvrag_bench.regress.compare import Verdict, compare
    from kvrag_bench.regress.quality import rate_entries, smollm2_entries, tiny_entries
    from kvrag_bench.regress.results import (
        last_before,
        read_releases,
        release_path,
        results_here,
        write_results,
    )
    from kvrag_bench.regress.speed import SpeedOptions, speed_entries

    quiet_libraries()
    # Whatever is wrong with the files is better known before minutes of measuring.
    path = None if save is None else release_path(releases, save)
    before = last_before(read_releases(releases), save)
    with console.progress("measuring") as say:
        now = results_here(
            [
                *speed_entries(SpeedOptions(), say),
                *rate_entries(say),
                *tiny_entries(say),
                *smollm2_entries(say),
            ]
        )
    if path is not None:
        now = replace(now, version=path.stem)
        write_results(now, path)
        console.note(f"results: {path}")
    changes = compare(before, now)
    if as_json:
        console.print_json(changes)
    else:
        _print_changes(changes, before, now)
    if any(change.verdict == Verdict.WORSE for change in changes):
        raise typer.Exit(EXIT_FAILURE)


def _print_changes(changes: Sequence[Change], before: Results | None, now: Results) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("figure (less is better)", "unit"):
        table.add_column(name)
    for name in ("then", "now", "change"):
        table.add_column(name, justify="right")
    table.add_column("")
    for change in changes:
        entry = change.now or change.before
        assert entry is not None
        table.add_row(
            entry.name,
            entry.unit,
            _shown(change.before),
            _shown(change.now),
            "" if change.share is None else f"{change.share:+.1%}",
            "" if before is None else str(change.verdict),
            style={"worse": "red", "better": "green"}.get(change.verdict, ""),
        )
    console.out().print(table)
    console.write(
        "\nspeed: median of the rounds, the least and the greatest; quality: mean over questions "
        "or chunks, and its 95 % interval\n"
    )
    for name, results in (("then", before), ("now", now)):
        if results is None:
            console.write("there is no earlier release to compare with\n")
            continue
        libraries = ", ".join(f"{library} {one}" for library, one in results.libraries.items())
        console.write(f"{name}: {results.version}, {results.processor}, {libraries}\n")


def _shown(entry: Entry | None) -> str:
    if entry is None:
        return ""
    low, high = entry.interval
    return f"{entry.value:.3g} ({low:.3g} to {high:.3g})"
