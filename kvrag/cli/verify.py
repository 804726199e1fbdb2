"""`kvrag verify`: read and check every record of an index and every row of its catalog."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.failures import EXIT_FAILURE

if TYPE_CHECKING:
    from kvrag.ingest.report import VerifyReport


def verify(
    index: o.IndexOption = o.DEFAULT_INDEX,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Compute missing and damaged records again, and read documents again if their "
            "rows in the catalog are damaged.",
        ),
    ] = False,
    embedding: o.EmbeddingOption = None,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """Check every stored record and every row of the catalog; exit 1 if there is a problem."""
    from kvrag.cli.opening import open_index

    with (
        open_index(index, store=store, mend=repair, embedding=embedding) as opened,
        console.progress("reading every record") as say,
    ):

        def show(done: int, total: int) -> None:
            say(f"{done:,} of {total:,} records read")

        report = opened.upkeep.verify(repair=repair, on_progress=show)
    if as_json:
        console.print_json(report)
    else:
        _print_report(report)
    if not report.ok:
        raise typer.Exit(EXIT_FAILURE)


def _print_report(report: VerifyReport) -> None:
    size = console.format_bytes(report.size_bytes)
    time = console.format_seconds(report.seconds)
    console.write(
        f"{report.num_chunks:,} chunks, {report.num_records:,} records ({size}) read in {time}\n"
    )
    for problem in report.problems:
        place = f"{console.shown_name(problem.source)}#{problem.ordinal}"
        console.stream(f"damaged: {place}: {problem.reason}\n")
    for text in report.store_problems:
        console.stream(f"store: {console.harmless(text)}\n")
    for text in report.catalog_problems:
        console.write(f"catalog: {console.one_line(text)}\n")
    for text in report.not_healed:
        console.write(f"lost: {console.one_line(text)}\n")
    if report.ok:
        repaired = f", {report.num_repaired:,} records computed again" if report.problems else ""
        mended = ", the catalog repaired" if report.catalog_problems else ""
        kept = ", the list of records repaired" if report.store_problems else ""
        console.write(f"sound{repaired}{mended}{kept}\n")
    elif report.is_healed:
        console.write("The catalog is repaired, but the lost entries are gone.\n")
    else:
        console.write(
            "No answer uses damaged data. A chunk whose KV is damaged is prefilled; a chunk whose "
            "rows are damaged may not be found until `kvrag verify --repair` repairs it.\n"
        )
