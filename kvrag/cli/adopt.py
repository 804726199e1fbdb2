"""`kvrag adopt`: index the documents of another vector store as they were cut there."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrag.cli import options as o
from kvrag.cli.failures import EXIT_FAILURE
from kvrag.cli.indexing import EmbeddingOption, ModelOption, index_into


def adopt(
    vector_store: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:NAME",
            help="The store: an object of Python, or a function that returns it.",
        ),
    ],
    index: o.IndexOption = o.DEFAULT_INDEX,
    model: ModelOption = None,
    device: o.DeviceOption = None,
    store: o.StoreOption = None,
    embedding: EmbeddingOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be done.")
    ] = False,
    as_json: o.JsonOption = False,
) -> None:
    """Index the documents of another vector store as they were cut there.

    A chain over that store then reuses their KV, without any other change. Run it again
    after the store has changed; documents that have left it are removed with 'kvrag rm'.
    """
    from kvrag.cli.opening import load_object
    from kvrag.ingest.adopting import adopted

    report = index_into(
        index,
        adopted(load_object(vector_store, "MODULE:NAME")),
        {"embedding": embedding},
        model=model,
        device=device,
        store=store,
        dry_run=dry_run,
        as_json=as_json,
    )
    if not report.ok:
        raise typer.Exit(EXIT_FAILURE)
