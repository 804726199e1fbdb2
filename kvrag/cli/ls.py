"""`kvrag ls`: list the documents of an index."""

from __future__ import annotations

import shlex

from kvrag.cli import console
from kvrag.cli import options as o


def ls(
    index: o.IndexOption = o.DEFAULT_INDEX,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """List the documents with their chunks, tokens and bytes of KV."""
    from rich.table import Table
    from rich.text import Text

    from kvrag.cli.opening import open_catalog

    with open_catalog(index, store) as opened:
        rows = opened.documents()
    if as_json:
        console.print_json(rows)
        return
    if not rows:
        folder = shlex.quote(str(index))
        console.note(f"the index is empty; fill it with: kvrag ingest PATH... --index {folder}")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("document", overflow="fold")
    for name in ("chunks", "tokens", "KV"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(console.shown_name(row.source)),
            f"{row.num_chunks:,}",
            f"{row.num_tokens:,}",
            console.format_bytes(row.size_bytes),
        )
    console.out().print(table)
