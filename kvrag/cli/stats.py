"""`kvrag stats`: what an index holds, in numbers."""

from __future__ import annotations

from kvrag.cli import console
from kvrag.cli import options as o


def stats(index: o.IndexOption, as_json: o.JsonOption = False) -> None:
    """Show the numbers of an index: documents, chunks, tokens, bytes, model and codec."""
    from kvrag.cli.opening import open_index

    with open_index(index) as opened:
        values = console.plain(opened.stats())
    if as_json:
        console.print_json(values)
    else:
        console.print_fields(values)
