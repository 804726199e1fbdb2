"""`kvrag stats`: show an index's contents and counters."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from kvrag.cli import console
from kvrag.cli import options as o

if TYPE_CHECKING:
    from kvrag.ingest.counting import KeptCounts
    from kvrag.store.metrics import Counts


def stats(
    index: o.IndexOption = o.DEFAULT_INDEX,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """Show what an index holds, and the counters of its use.

    The counters cover all processes: each process adds its counts every half minute and when it
    closes the index.
    """
    from kvrag.cli.opening import open_catalog
    from kvrag.ingest.counting import read_kept

    with open_catalog(index, store) as opened:
        values = console.plain(opened.stats())
        counted = read_kept(opened.path)
    if as_json:
        console.print_json({**values, "counted": None if counted is None else counted.to_dict()})
        return
    # Beside the number of vectors, which are in the catalog: searches make this file.
    values["vectors_file_bytes"] = values.pop("vectors_bytes")
    console.print_fields(values)
    if counted is not None:
        _print_counted(counted)


def _print_counted(counted: KeptCounts) -> None:
    from rich.table import Table
    from rich.text import Text

    since = datetime.fromtimestamp(counted.since).strftime("%Y-%m-%d %H:%M")
    console.write(f"\ncounted since {since}\n")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, shown in _rows(counted.counts):
        table.add_row(Text(console.harmless(label)), Text(console.harmless(shown)))
    console.out().print(table)


def _rows(counts: Counts) -> Iterator[tuple[str, str]]:
    """Yield a line for each counter, or for each tier of a store, with the values of its labels."""
    lines: dict[str, list[str]] = {}
    for (name, labels), value in sorted(counts.items()):
        values = dict(labels)
        if name.startswith("store_"):
            label = f"tier {values.get('tier')}, {values.get('store')}"
            what = name.removeprefix("store_").replace("_", " ")
            shown = f"{what} {_shown(name, value)}"
            if "reason" in values:
                shown = f"{shown} {values['reason']}"
        else:
            label = name.replace("_", " ")
            shown = " ".join([*values.values(), _shown(name, value)])
        lines.setdefault(label, []).append(shown)
    for label, parts in lines.items():
        yield label, ", ".join(parts)


def _shown(name: str, value: float) -> str:
    if name.endswith("seconds"):
        return console.format_seconds(value)
    if name.endswith("bytes"):
        return console.format_bytes(value)
    return f"{value:,.0f}"
