"""What an index holds, and its upkeep: `ls`, `rm`, `stats`, `gc`, `verify`, `recode`, `profile`."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag import arguments
from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.console import EXIT_FAILURE, fail
from kvrag.cli.opening import open_index
from kvrag.errors import ParameterError

if TYPE_CHECKING:
    from kvrag.codec.profile import Profile
    from kvrag.ingest.report import GcReport, RecodeReport, VerifyReport
    from kvrag.ingest.schema import DocumentRow
    from kvrag.store.metrics import Counts


def ls(
    index: o.IndexOption = o.DEFAULT_INDEX,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """List the documents with their chunks, tokens and bytes of KV."""
    with open_index(index, store=store) as opened:
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

    with open_index(index, store=store) as opened:
        values = console.plain(opened.stats())
        counted = read_kept(opened.path)
    if as_json:
        console.print_json({**values, "counted": None if counted is None else counted.to_dict()})
        return
    # Beside the number of vectors, which are in the catalog: searches make this file.
    values["vectors_file_bytes"] = values.pop("vectors_bytes")
    if not values["bytes_per_token"]:
        values["bytes_per_token"] = "no KV is stored: the model computes each prompt as a whole"
        del values["stored_bytes_per_token"]
    values["writer"] = values["writer"] or "none"
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
        what, shown = console.field(name, value if value % 1 else round(value))
        if name.startswith("store_"):
            label = f"tier {values.get('tier')}, {values.get('store')}"
            words = [what.removeprefix("store "), shown, values.get("reason", "")]
        else:
            label, words = name.replace("_", " "), [*values.values(), shown]
        lines.setdefault(label, []).append(" ".join(words).rstrip())
    for label, parts in lines.items():
        yield label, ", ".join(parts)


def gc(
    index: o.IndexOption = o.DEFAULT_INDEX,
    shared: Annotated[bool, typer.Option("--shared")] = False,
    grace: Annotated[float, o.setting(min=0, metavar="HOURS")] = 24.0,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """Delete records that no chunk refers to, such as those of an interrupted run.

    Parameters
    ----------
    shared
        In a store outside the index's folder, also delete everything that this index does not need,
        including the records of other indexes.
    grace
        A shared index (--index URL) keeps what its newest version does not need for so long: other
        machines may lag that much.
    """
    with open_index(index, store=store) as opened:
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
    repair: Annotated[bool, typer.Option("--repair")] = False,
    embedding: o.EmbeddingOption = None,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """Check every stored record and every row of the catalog; exit 1 if there is a problem.

    Parameters
    ----------
    repair
        Compute missing and damaged records again, and read documents again if their rows in the
        catalog are damaged.
    """
    with (
        open_index(index, store=store, mend=repair, embedding=embedding) as opened,
        console.progress("reading every record") as say,
    ):
        report = opened.upkeep.verify(repair=repair, on_progress=console.records(say))
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
        mended = {
            f", {report.num_repaired:,} records computed again": report.problems,
            ", the catalog repaired": report.catalog_problems,
            ", the list of records repaired": report.store_problems,
        }
        console.write("".join(["sound", *(text for text, of in mended.items() if of), "\n"]))
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
    codec: Annotated[str, typer.Option()],
    opening: o.Opening,
    profile: o.ProfileOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Rewrite all stored KV with another codec; the index keeps answering questions meanwhile.

    KV that is stored exactly (raw, raw-heads, lossless) is read from the store; the model
    computes KV that is stored with loss again. If a run is killed, the next one completes it.

    Parameters
    ----------
    codec
        How KV is stored: raw, raw-heads, lossless, packed, cachegen:1 to cachegen:4, transform:BITS
        or stream:BITS, where BITS is any number of bits per element.
    """
    from kvrag.ingest.profiles import read_profile

    given = None if profile is None else read_profile(profile)
    with opening.open() as opened, console.progress("reading the index") as say:
        report = opened.upkeep.recode(
            codec,
            profile=given,
            on_progress=console.records(say),
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
    codec: Annotated[str, typer.Option()] = "transform",
    tokens: Annotated[int | None, o.setting(min=256)] = None,
    out: Annotated[Path | None, typer.Option()] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Fit a codec's bases and probability tables, and save them in the index.

    The index keeps its codec and its KV. To use the profile, run 'kvrag recode --profile', or
    'kvrag ingest --profile' for a new index of the same model.

    Parameters
    ----------
    codec
        Codec to fit: packed, transform, transform:BITS, cachegen or lossless.
    tokens
        Tokens in the sample, taken evenly from the index. Default: what suits the codec (packed
        4,096, others 16,384).
    out
        Also write the profile to this file, for other indexes of the model.
    """
    with opening.open() as opened, console.progress("reading the index") as say:
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


def rm(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE")],
    index: o.IndexOption = o.DEFAULT_INDEX,
    dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
    store: o.StoreSetting = None,
    as_json: o.JsonOption = False,
) -> None:
    """Remove documents from the index; exit 1 if a SOURCE matches none.

    The files themselves stay, so a later 'kvrag ingest' of their folder adds them again. The next
    'kvrag gc' deletes their stored KV.

    Parameters
    ----------
    sources
        Documents as 'kvrag ls' shows them, files, folders, or patterns such as 'notes/*.md' or
        'notes/**/*.md' (quote them; * stays in one folder, ** does not).
    dry_run
        Show what would be removed; remove nothing.
    """
    if any(not one.strip() for one in sources):
        # An empty path would mean the working directory, with everything in it.
        raise ParameterError("SOURCE is empty: give a document, file, folder or pattern")
    with open_index(index, store=store) as opened:
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
        alike = arguments.suggestion(_alike(one, [row.source for row in rows]))
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
    shown = sorted(map(console.short_path, sources), reverse=True)
    by_end = {one.rpartition("/")[2]: one for one in shown}  # a source may be any text
    ends = arguments.alike(name.rstrip("/").rpartition("/")[2], by_end)
    return [by_end[one] for one in ends] or arguments.alike(name, shown)


def _print(rows: Sequence[DocumentRow], num_chunks: int, index: Path, dry_run: bool) -> None:
    for row in rows:
        console.write(f"{console.shown_name(row.source)}\n")
    what = "would remove" if dry_run else "removed"
    documents = console.count(len(rows), "document")
    console.write(f"{what} {documents}, {console.count(num_chunks, 'chunk')}\n")
    if not dry_run:
        console.note(f"to free their KV: kvrag gc --index {shlex.quote(str(index))}")
