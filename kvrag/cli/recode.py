"""`kvrag recode`: write an index's KV again with another codec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrag.cli import console
from kvrag.cli import options as o

if TYPE_CHECKING:
    from kvrag.ingest.report import RecodeReport


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
    if as_json:
        console.print_json(report)
    else:
        _print_report(report)


def _print_report(report: RecodeReport) -> None:
    before = console.format_bytes(report.size_bytes_before)
    after = console.format_bytes(report.size_bytes)
    computed = f", {report.num_computed:,} of them computed again" if report.num_computed else ""
    console.write(
        f"{report.num_recoded:,} of {report.num_records:,} records written as {report.codec} in "
        f"{console.format_seconds(report.seconds)}{computed}\n{before} before, {after} now\n"
    )
