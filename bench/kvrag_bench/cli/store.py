"""`kvrag bench store`: what stores cost, hold and survive."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.errors import ParameterError
from kvrag_bench.cli import lists

_PARTS = ("reads", "readers", "million", "crash", "soak", "shared")


def bench_store(
    parts: Annotated[
        str,
        typer.Option(
            help="What to run, with commas: reads (warm reads over a plain copy of a mapping), "
            "readers (many threads at once), million (a catalog and store of small chunks), crash "
            "(processes killed at random moments), soak (many queries), shared (a shared "
            "index of small chunks)."
        ),
    ] = ",".join(_PARTS),
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Store of reads and readers, which keeps the bench's records, or URL of a shared "
            "index, where there must be none yet. Default: a folder.",
            show_default=False,
        ),
    ] = None,
    records: Annotated[int, typer.Option(min=1, help="Records that are read.")] = 40,
    layer_bytes: Annotated[
        int,
        typer.Option(min=64, help="Bytes of each of a record's 24 layers."),
    ] = 262_144,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Rounds of reads; the median counts."),
    ] = 15,
    threads: Annotated[int, typer.Option(min=1, help="Threads of readers.")] = 64,
    chunks: Annotated[int, typer.Option(min=2, help="Chunks of million and shared.")] = 1_000_000,
    kills: Annotated[int, typer.Option(min=3, help="Processes that crash kills.")] = 200,
    queries: Annotated[int, typer.Option(min=5, help="Queries of soak.")] = 10_000,
    seed: Annotated[
        int,
        typer.Option(help="Seed of the moments at which crash kills."),
    ] = 0,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to work. Default: a temporary folder."),
    ] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Read, look up, kill and soak stores; no figure needs a network."""
    chosen = lists.names(parts, "--parts")
    unknown = [part for part in chosen if part not in _PARTS]
    if unknown:
        raise ParameterError(f"--parts {unknown[0]!r}: expected {', '.join(_PARTS)}")
    if folder is not None and not folder.is_dir():
        raise ParameterError(f"--folder {str(folder)!r}: expected a folder that exists")
    from kvrag.cli.opening import quiet_libraries

    quiet_libraries()
    found: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="kvrag-", dir=folder) as scratch,
        console.progress("measuring") as tell,
    ):
        place = Path(scratch)
        url = store or f"file:{place / 'store'}"
        for part in chosen:
            tell(part)

            def say(text: str, part: str = part) -> None:
                tell(f"{part}: {text}")

            (place / part).mkdir()
            if part == "reads":
                from kvrag_bench.store.reads import measure_reads

                found[part] = measure_reads(url, place / part, records, layer_bytes, rounds)
            elif part == "readers":
                from kvrag_bench.store.reads import measure_readers

                found[part] = measure_readers(url, records, layer_bytes, threads, 20 * threads)
            elif part == "shared":
                from kvrag_bench.store.shared import measure_shared

                there = store or f"file://{place / part}/bucket"
                found[part] = measure_shared(place / part, there, chunks, say)
            else:
                found[part] = _without_store(part, place / part, chunks, kills, seed, queries, say)
    if as_json:
        console.print_json(found)
        return
    for part, rows in found.items():
        for row in rows if isinstance(rows, list) else [rows]:
            console.write(f"{part}\n")
            console.print_fields(console.plain(row))


def _without_store(
    part: str,
    folder: Path,
    chunks: int,
    kills: int,
    seed: int,
    queries: int,
    say: Callable[[str], None],
) -> Any:
    if part == "million":
        from kvrag_bench.store.million import measure_million

        return measure_million(folder, chunks, say)
    if part == "crash":
        from kvrag_bench.store.crash import measure_crashes

        return measure_crashes(folder, kills, seed, say)
    from kvrag_bench.store.soak import measure_soak

    return measure_soak(folder, queries, say)
