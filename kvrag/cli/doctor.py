"""`kvrag doctor`: check this machine and an index, and explain how to fix problems."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.failures import EXIT_FAILURE

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}


def doctor(
    index: o.OtherIndexOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Model to check: folder, hub name or 'kvrag-tiny'. Default: the index's model.",
            show_default=False,
        ),
    ] = None,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """Check versions, processor, disk, index and model; exit 1 if there is a problem."""
    from rich.table import Table
    from rich.text import Text

    from kvrag.cli.checkup import check_all

    with console.working("checking"):
        findings = check_all(index, model, store)
    failed = any(finding.status == "problem" for finding in findings)
    if as_json:
        console.print_json({"ok": not failed, "findings": findings})
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for finding in findings:
            style = _STYLES[finding.status]
            detail = finding.detail
            if finding.remedy:
                detail += f"\n-> {finding.remedy}"
            table.add_row(Text(finding.status, style), finding.name, Text(detail))
        console.out().print(table)
    if failed:
        raise typer.Exit(EXIT_FAILURE)
