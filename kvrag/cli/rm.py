"""`kvrag rm`: documents out of an index."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli import console, names
from kvrag.cli import options as o
from kvrag.cli.failures import EXIT_FAILURE, fail

if TYPE_CHECKING:
    from kvrag.ingest.rows import DocumentRow


def rm(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Documents as 'kvrag ls' shows them, files, folders, or patterns such as "
            "'notes/*.md' (quote them).",
        ),
    ],
    index: o.IndexOption,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed, remove nothing.")
    ] = False,
    as_json: o.JsonOption = False,
) -> None:
    """Remove documents from the index; exit 1 when a SOURCE matches none.

    The files themselves stay: a later 'kvrag ingest' of their folder brings them back. The stored
    KV goes with the next 'kvrag gc'.
    """
    from kvrag.cli.opening import open_catalog

    with open_catalog(index) as opened:
        rows = {row.source: row for row in opened.documents()}
        found: dict[str, DocumentRow] = {}
        unmatched = []
        for one in sources:
            matching = matching_sources(one, rows)
            found.update((source, rows[source]) for source in matching)
            if not matching:
                unmatched.append(one)
        num_chunks = sum(row.num_chunks for row in found.values())
        if found and not dry_run:
            num_chunks = opened.delete(sources=list(found))
    for one in unmatched:
        known = {console.short_path(source) for source in rows} | {
            os.path.basename(source)  # noqa: PTH119  (a source may be any text)
            for source in rows
        }
        fail(f"{one}: no document of the index has this name{names.like(one, sorted(known))}")
    if as_json:
        console.print_json(
            {
                "removed": list(found.values()),
                "num_chunks": num_chunks,
                "unmatched": unmatched,
                "dry_run": dry_run,
            }
        )
    elif found:
        _print(list(found.values()), num_chunks, dry_run)
    if unmatched:
        raise typer.Exit(EXIT_FAILURE)


def matching_sources(pattern: str, sources: Iterable[str]) -> list[str]:
    """Return the sources that a name, file, folder or pattern means.

    A name is taken as it stands before it is taken for a pattern, and relative ones are also
    looked for in the working directory. A file means all documents that were read from it.
    """
    known = list(sources)
    # Not resolved, but normalised: what a user sees in `kvrag ls` is relative to where they are.
    spellings = dict.fromkeys((pattern, os.path.abspath(pattern), os.path.realpath(pattern)))  # noqa: PTH100
    for name in spellings:
        stem = name.rstrip("/")
        found = [one for one in known if one == name or one.startswith((f"{stem}#", f"{stem}/"))]
        if stem and found:
            return found
    return [
        one for one in known if any(fnmatch.fnmatchcase(one, spelling) for spelling in spellings)
    ]


def _print(rows: Sequence[DocumentRow], num_chunks: int, dry_run: bool) -> None:
    for row in rows:
        console.write(f"{console.harmless(console.short_path(row.source))}\n")
    what = "would remove" if dry_run else "removed"
    console.write(f"{what} {len(rows):,} documents, {num_chunks:,} chunks\n")
    if not dry_run:
        console.note("their KV is freed by: kvrag gc --index DIR")
