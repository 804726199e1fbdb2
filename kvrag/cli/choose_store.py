"""`kvrag choose-store`: choose the cheapest store that loads an index's KV fast enough."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.opening import open_index
from kvrag.errors import ParameterError

if TYPE_CHECKING:
    from kvrag.tune.stores import StoreChoice


def choose_store(
    stores: Annotated[
        str, typer.Option(metavar="URL|URL", help="Stores to choose from (quote the list).")
    ],
    index: o.IndexOption = o.DEFAULT_INDEX,
    prices: Annotated[
        Path | None,
        typer.Option(
            help="File of store prices. Default: prices.toml in the index; if it is missing, it is "
            "created with example prices.",
        ),
    ] = None,
    loss: Annotated[
        float,
        o.setting(min=0.0, max=1.0, help="Quality that may be lost, as a share, as for 'auto'."),
    ] = 0.01,
    reads: Annotated[
        float,
        o.setting(min=0.0, help="Number of reads of a chunk per month."),
    ] = 30.0,
    move: Annotated[
        bool, typer.Option("--move", help="Move the index's KV to the chosen store.")
    ] = False,
    model: o.ModelOption = None,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """Choose the cheapest store that loads KV no slower than the model recomputes tokens.

    It measures each store; if all are slower, it chooses the fastest. Run 'kvrag calibrate' first:
    it measures what recomputing costs.
    """
    from kvrag.ingest.config import write_atomically
    from kvrag.loading.price_list import EXAMPLES, FILE_NAME, read_prices
    from kvrag.store.registry import check_kind
    from kvrag.tune.stores import measure_and_choose

    urls = stores.split("|")
    if any(not url or url.startswith(("tiered:", "memory:")) for url in urls):
        raise ParameterError(
            "--stores: expected persistent stores with | between them, no tiers and no memory; "
            "memory may be a tier before the chosen store"
        )
    for url in urls:
        check_kind(url)
    with open_index(index, model=model, store=store) as opened:
        path = prices or opened.path / FILE_NAME
        if prices is None and not path.exists():
            write_atomically(path, EXAMPLES.encode())
            console.note(f"{path} contains example prices: replace them with yours")
        table = read_prices(path)
        moved = None
        with console.progress("measuring") as say:
            found = measure_and_choose(opened, urls, table, loss=loss, reads=reads, say=say)
            if move:
                moved = opened.upkeep.move(
                    urls[found.offers.index(found.chosen)],
                    on_progress=lambda done, total: say(f"{done:,} of {total:,} records"),
                )
    if as_json:
        console.print_json({**found.to_dict(), "moved": None if moved is None else moved.to_dict()})
        return
    _print(found)
    if moved is not None:
        size = console.format_bytes(moved.size_bytes)
        lost = f", {moved.num_lost:,} could not be read" if moved.num_lost else ""
        console.write(
            f"moved: {moved.num_records:,} records ({size}), {moved.num_present:,} already "
            f"there{lost}; run 'kvrag calibrate' to measure loading again\n"
        )


def _print(found: StoreChoice) -> None:
    console.print_table(
        {"store": "folded", "load a chunk": "number", "hidden": "number", "a month": "number"},
        (
            (
                one.store,
                console.format_seconds(one.load_seconds),
                f"{one.hidden_share:.0%}",
                f"{one.month:.3g}",
            )
            for one in found.offers
        ),
    )
    console.write(console.harmless(f"{found.chosen.store}: {found.reason}\n"))
