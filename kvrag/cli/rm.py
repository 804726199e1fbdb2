"""`kvrag rm`: remove documents from an index."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag import similar
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.failures import EXIT_FAILURE, fail
from kvrag.cli.opening import open_catalog
from kvrag.errors import ParameterError

if TYPE_CHECKING:
    from kvrag.ingest.rows import DocumentRow


def rm(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Documents as 'kvrag ls' shows them, files, folders, or patterns such as "
            "'notes/*.md' or 'notes/**/*.md' (quote them; * stays in one folder, ** does not).",
        ),
    ],
    index: o.IndexOption = o.DEFAULT_INDEX,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed; remove nothing.")
    ] = False,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """Remove documents from the index; exit 1 if a SOURCE matches none.

    The files themselves stay, so a later 'kvrag ingest' of their folder adds them again. The next
    'kvrag gc' deletes their stored KV.
    """
    if any(not one.strip() for one in sources):
        # An empty path would mean the working directory, with everything in it.
        raise ParameterError("SOURCE is empty: give a document, file, folder or pattern")
    with open_catalog(index, store) as opened:
        rows = opened.documents()
        num_damaged = opened.catalog.num_noted
        found: dict[str, DocumentRow] = {}
        unmatched = []
        for one in sources:
            matching = matching_documents(one, rows)
            found.update((row.source, row) for row in matching)
            if not matching:
                unmatched.append(one)
        num_chunks = sum(row.num_chunks for row in found.values())
        if found and not dry_run:
            num_chunks = opened.delete(sources=list(found))
    for one in unmatched:
        if os.path.abspath(one).strip("/") == "":  # noqa: PTH100  (it is compared as text)
            fail(f"{one}: the root folder would mean every file; for that, write the pattern '/**'")
            continue
        alike = similar.suggestion(_alike(one, [row.source for row in rows]))
        fail(f"{one}: no document of the index has this name{alike}")
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
        _print(list(found.values()), num_chunks, index, dry_run)
    if num_damaged:
        fail(
            f"{console.count(num_damaged, 'damaged row')} of the index could not be compared, and "
            "may belong to such documents: run 'kvrag verify --repair', then this command again"
        )
    if unmatched or num_damaged:
        raise typer.Exit(EXIT_FAILURE)


def matching_documents(pattern: str, known: Sequence[DocumentRow]) -> list[DocumentRow]:
    """Return the documents that a name, file, folder or pattern matches.

    A name is matched literally before it is matched as a pattern, and a relative name is also
    looked up in the working directory. A file, or a pattern that matches it, means all documents
    that were read from it. In a pattern ``*``, ``?`` and ``[...]`` stay within one folder; ``**``
    matches any number of folders. Wildcards in the name of the working directory are none.

    Raises
    ------
    ParameterError
        For ``..`` after a wildcard: it would cancel the wildcard.
    """
    if not pattern.strip():
        return []
    head, tail, raw = _split(pattern)
    if ".." in tail and all(one.source != pattern for one in known):
        raise ParameterError(
            f"{pattern}: expected no '..' after a wildcard, since nobody can say which folder it "
            "means; name that folder"
        )
    # Normalised without resolving links: `kvrag ls` shows paths relative to the working directory.
    spellings = dict.fromkeys((pattern, os.path.abspath(pattern), os.path.realpath(pattern)))  # noqa: PTH100
    for name in spellings:
        stem = name.rstrip("/")
        found = [
            one
            for one in known
            if one.source == name or one.whole == stem or one.source.startswith(f"{stem}/")
        ]
        if stem and found:
            return found
    if not tail:
        return []
    folders = dict.fromkeys((os.path.abspath(head), os.path.realpath(head)))  # noqa: PTH100
    patterns = [raw, *("/".join([glob.escape(one).rstrip("/"), *tail]) for one in folders)]
    return [
        one
        for one in known
        if any(
            # A relative pattern matches only below the working directory, even with **.
            name.startswith("/") == each.startswith("/")
            and _matches(name.split("/"), each.split("/"))
            for each in patterns
            for name in {one.source, one.whole}
        )
    ]


def _split(pattern: str) -> tuple[str, list[str], str]:
    """Return the folder before the first wildcard, the parts from there on, and both together."""
    parts = pattern.split("/")
    literal = list(itertools.takewhile(lambda part: not set("*?[") & set(part), parts))
    tail = [part for part in parts[len(literal) :] if part not in ("", ".")]
    head = "/".join(["", *literal] if literal == [""] else literal) or "."
    return head, tail, "/".join([*literal, *tail])


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[skip:], pattern[1:]) for skip in range(len(parts) + 1))
    return (
        bool(parts)
        and fnmatch.fnmatchcase(parts[0], pattern[0])
        and _matches(parts[1:], pattern[1:])
    )


def _alike(name: str, sources: Iterable[str]) -> list[str]:
    """Return documents' names similar to one that was not found, as `kvrag rm` accepts them."""
    shown = sorted(map(console.short_path, sources))
    ends = {one: os.path.basename(one) for one in shown}  # noqa: PTH119  (a source may be any text)
    end = os.path.basename(name.rstrip("/"))  # noqa: PTH119
    by_end = [
        one
        for alike in similar.alike(end, sorted(set(ends.values())))
        for one in shown
        if ends[one] == alike
    ]
    return list(dict.fromkeys([*by_end, *similar.alike(name, shown)]))


def _print(rows: Sequence[DocumentRow], num_chunks: int, index: Path, dry_run: bool) -> None:
    for row in rows:
        console.write(f"{console.shown_name(row.source)}\n")
    what = "would remove" if dry_run else "removed"
    documents = console.count(len(rows), "document")
    console.write(f"{what} {documents}, {console.count(num_chunks, 'chunk')}\n")
    if not dry_run:
        console.note(f"to free their KV: kvrag gc --index {shlex.quote(str(index))}")
