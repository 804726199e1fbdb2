"""`kvrag verify`: read every record of an index and check it."""

from __future__ import annotations

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.failures import EXIT_FAILURE


def verify(index: o.IndexOption, as_json: o.JsonOption = False) -> None:
    """Check every stored record against its checksums; exit 1 when something is wrong."""
    from kvrag.cli.opening import open_index

    with open_index(index) as opened, console.working("reading every record"):
        report = opened.verify()
    if as_json:
        console.print_json(report)
    else:
        console.print_fields(console.plain(report))
    if not report.ok:
        raise typer.Exit(EXIT_FAILURE)
