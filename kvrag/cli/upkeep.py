"""What an index holds, and its upkeep: `ls`, `stats`, `gc`, `verify`, `recode` and `profile`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag import arguments
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.failures import EXIT_FAILURE
from kvrag.cli.opening import open_catalog, open_index

if TYPE_CHECKING:
    from kvrag.codec.profile import Profile
    from kvrag.ingest.report import GcReport, RecodeReport, VerifyReport
    from kvrag.store.metrics import Counts


def ls(
    index: o.IndexOption = o.DEFAULT_INDEX,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """List the documents with their chunks, tokens and bytes of KV."""
    with open_catalog(index, store) as opened:
        rows = opened.documents()
    if as_json:
        console.print_json(rows)
        return
    if not rows:
        folder = shlex.quote(str(index))
        console.note(f"the index is empty; fill it with: kvrag ingest PATH... --index {folder}")
        return
    console.print_table(
        {"document": "folded", "chunks": "number", "tokens": "number", "KV": "number"},
        (
            (
                console.shown_name(row.source),
                f"{row.num_chunks:,}",
                f"{row.num_tokens:,}",
                console.format_bytes(row.size_bytes),
            )
            for row in rows
        ),
    )


def stats(
    index: o.IndexOption = o.DEFAULT_INDEX,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """Show what an index holds, and the counters of its use.

    The counters cover all processes: each process adds its counts every half minute and when it
    closes the index.
    """
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
        since = datetime.fromtimestamp(counted.since).strftime("%Y-%m-%d %H:%M")
        console.write(f"\ncounted since {since}\n")
        console.print_pairs(_counters(counted.counts))


def _counters(counts: Counts) -> Iterator[tuple[str, str]]:
    """Yield a line for each counter, or for each tier of a store, with the values of its labels."""
    lines: dict[str, list[str]] = {}
    for (name, labels), value in sorted(counts.items()):
        values = dict(labels)
        if name.startswith("store_"):
            label = f"tier {values.get('tier')}, {values.get('store')}"
            what = name.removeprefix("store_").replace("_", " ")
            shown = f"{what} {_counted(name, value)}"
            if "reason" in values:
                shown = f"{shown} {values['reason']}"
        else:
            label = name.replace("_", " ")
            shown = " ".join([*values.values(), _counted(name, value)])
        lines.setdefault(label, []).append(shown)
    for label, parts in lines.items():
        yield label, ", ".join(parts)


def _counted(name: str, value: float) -> str:
    if name.endswith("seconds"):
        return console.format_seconds(value)
    if name.endswith("bytes"):
        return console.format_bytes(value)
    return f"{value:,.0f}"


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
        o.setting(
            min=0,
            metavar="HOURS",
            help="A shared index (--index URL) keeps what its newest version does not need for so "
            "long: other machines may lag that much.",
        ),
    ] = 24.0,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """Delete records that no chunk refers to, such as those of an interrupted run."""
    with open_catalog(index, store) as opened:
        report = opened.upkeep.gc(delete_shared=shared, grace_seconds=3600 * grace)
    console.show(report, as_json, _print_deleted)


def _print_deleted(report: GcReport) -> None:
    size = console.format_bytes(report.size_bytes)
    console.write(
        f"deleted: {console.count(report.num_records, 'record')} ({size}), "
        f"{console.count(report.num_profiles, 'codec profile')}, "
        f"{console.count(report.num_temporary_files, 'temporary file')}\n"
    )


def verify(
    index: o.IndexOption = o.DEFAULT_INDEX,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Compute missing and damaged records again, and read documents again if their "
            "rows in the catalog are damaged.",
        ),
    ] = False,
    embedding: o.EmbeddingOption = None,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """Check every stored record and every row of the catalog; exit 1 if there is a problem."""
    with (
        open_index(index, store=store, mend=repair, embedding=embedding) as opened,
        console.progress("reading every record") as say,
    ):

        def show(done: int, total: int) -> None:
            say(f"{done:,} of {total:,} records read")

        report = opened.upkeep.verify(repair=repair, on_progress=show)
    console.show(report, as_json, _print_verified)
    if not report.ok:
        raise typer.Exit(EXIT_FAILURE)


def _print_verified(report: VerifyReport) -> None:
    size = console.format_bytes(report.size_bytes)
    time = console.format_seconds(report.seconds)
    console.write(
        f"{report.num_chunks:,} chunks, {report.num_records:,} records ({size}) read in {time}\n"
    )
    for problem in report.problems:
        place = f"{console.shown_name(problem.source)}#{problem.ordinal}"
        console.stream(f"damaged: {place}: {problem.reason}\n")
    for text in report.store_problems:
        console.stream(f"store: {console.harmless(text)}\n")
    for text in report.catalog_problems:
        console.write(f"catalog: {console.one_line(text)}\n")
    for text in report.not_healed:
        console.write(f"lost: {console.one_line(text)}\n")
    if report.ok:
        repaired = f", {report.num_repaired:,} records computed again" if report.problems else ""
        mended = ", the catalog repaired" if report.catalog_problems else ""
        kept = ", the list of records repaired" if report.store_problems else ""
        console.write(f"sound{repaired}{mended}{kept}\n")
        if report.num_later:
            console.write(
                f"after a deletion, {console.count(report.num_later, 'record')} to be made again: "
                "by the next 'kvrag ingest', by 'kvrag serve' while nobody asks, or by 'kvrag "
                "verify --repair'\n"
            )
    elif report.is_healed:
        console.write("The catalog is repaired, but the lost entries are gone.\n")
    else:
        console.write(
            "No answer uses damaged data. A chunk whose KV is damaged is prefilled; a chunk whose "
            "rows are damaged may not be found until `kvrag verify --repair` repairs it.\n"
        )


def recode(
    codec: o.CodecOption,
    opening: o.Opening,
    profile: o.ProfileOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Rewrite all stored KV with another codec; the index keeps answering questions meanwhile.

    KV that is stored exactly (raw, raw-heads, lossless) is read from the store; the model
    computes KV that is stored with loss again. If a run is killed, the next one completes it.
    """
    from kvrag.ingest.profiles import read_profile

    given = None if profile is None else read_profile(profile)
    with (
        opening.open() as opened,
        console.progress("reading the index") as say,
    ):
        report = opened.upkeep.recode(
            codec,
            profile=given,
            on_progress=lambda done, total: say(f"{done:,} of {total:,} records"),
            on_profile=say,
        )
    console.show(report, as_json, _print_recoded)


def _print_recoded(report: RecodeReport) -> None:
    before = console.format_bytes(report.size_bytes_before)
    after = console.format_bytes(report.size_bytes)
    computed = f", {report.num_computed:,} of them computed again" if report.num_computed else ""
    console.write(
        f"{report.num_recoded:,} of {report.num_records:,} records written as {report.codec} in "
        f"{console.format_seconds(report.seconds)}{computed}\n{before} before, {after} now\n"
    )


def profile(
    opening: o.Opening,
    codec: Annotated[
        str,
        typer.Option(help="Codec to fit: packed, transform, transform:BITS, cachegen or lossless."),
    ] = "transform",
    tokens: Annotated[
        int, o.setting(min=256, help="Tokens in the sample, taken evenly from the index.")
    ] = 16_384,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write the profile to this file, for other indexes of the model."),
    ] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Fit a codec's bases and probability tables, and save them in the index.

    The index keeps its codec and its KV. To use the profile, run 'kvrag recode --profile', or
    'kvrag ingest --profile' for a new index of the same model.
    """
    with (
        opening.open() as opened,
        console.progress("reading the index") as say,
    ):
        fitted = opened.upkeep.fit_profile(codec, num_tokens=tokens, on_progress=say)
    if out is not None:
        from kvrag.ingest.config import write_atomically

        write_atomically(arguments.resolved_path(out, "--out"), fitted.content)
    if as_json:
        console.print_json(_profile_fields(fitted))
    else:
        _print_profile(fitted)


def _profile_fields(fitted: Profile) -> dict[str, object]:
    return {
        "hash": fitted.hash,
        "num_tokens": fitted.num_tokens,
        "size_bytes": len(fitted.content),
        "levels": [
            {
                "level": level.name,
                "bits_per_element": level.bits,
                "bits_by_plane": [plane.bits for plane in level.planes],
                "relative_error": level.relative_error,
            }
            for level in fitted.levels
        ],
    }


def _print_profile(fitted: Profile) -> None:
    console.print_table(
        {"level": "text", "bits per element": "number", "relative error": "number"},
        ((one.name, f"{one.bits:.3f}", f"{one.relative_error:.2g}") for one in fitted.levels),
    )
    size = console.format_bytes(len(fitted.content))
    console.write(f"{fitted.num_tokens:,} tokens, {size}, profile {fitted.hash}\n")
