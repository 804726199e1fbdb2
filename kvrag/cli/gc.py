"""`kvrag gc`: delete what no chunk needs any more."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o


def gc(
    index: o.IndexOption = o.DEFAULT_INDEX,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared",
            help="In a store outside the index's folder, also delete everything that this index "
            "does not need, including the records of other indexes.",
        ),
    ] = False,
    grace: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="HOURS",
            help="A shared index (--index URL) keeps what its newest version does not need for so "
            "long: other machines may lag that much.",
            hidden=True,
        ),
    ] = 24.0,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """Delete records that no chunk refers to, such as those of an interrupted run."""
    from kvrag.cli.opening import open_catalog

    with open_catalog(index, store) as opened:
        report = opened.upkeep.gc(delete_shared=shared, grace_seconds=3600 * grace)
    if as_json:
        console.print_json(report)
    else:
        size = console.format_bytes(report.size_bytes)
        console.write(
            f"deleted: {console.count(report.num_records, 'record')} ({size}), "
            f"{console.count(report.num_profiles, 'codec profile')}, "
            f"{console.count(report.num_temporary_files, 'temporary file')}\n"
        )
