"""The progress of `kvrag ingest`: an estimate, then tokens/s and time left."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvrag.cli import console

if TYPE_CHECKING:
    from kvrag.ingest.report import IngestProgress


class IngestBar:
    """Says how far an ingestion is; its `update` is an `on_progress` of `Index.add`.

    Parameters
    ----------
    place
        The index's folder, for the free space on its disk.
    say
        Shows it, as `kvrag.cli.console.progress` does.
    """

    def __init__(self, place: Path, say: console.Say) -> None:
        self._place = place
        self._say = say
        self._stage = ""

    def update(self, progress: IngestProgress) -> None:
        """Show the progress; show an estimate once, before anything is written."""
        if progress.stage == "profile":
            self._say(f"fitting the codec: {progress.doing}")
            return
        what = "reading" if progress.stage == "read" else "computing"
        done, total, noun = progress.num_documents_done, progress.num_documents, "documents"
        speed = ""
        if progress.stage != "read":
            if self._stage != progress.stage and progress.num_tokens:
                self._say_estimate(progress)
            if progress.num_tokens:  # otherwise all KV is stored already
                done, total, noun = progress.num_tokens_done, progress.num_tokens, "tokens"
                speed = _speed(progress)
            elif not total:
                return
        self._stage = progress.stage
        self._say(f"{what}: {done:,} of {total:,} {noun}{speed}", done / max(total, 1))

    def update_first(self, num_done: int, num_chunks: int) -> None:
        """Show how many chunks have their record for a prompt's first place."""
        self._say(f"first places: {num_done:,} of {num_chunks:,} chunks", num_done / num_chunks)

    def _say_estimate(self, progress: IngestProgress) -> None:
        size = console.format_bytes(progress.size_bytes_estimate)
        free = console.format_bytes(shutil.disk_usage(self._place).free)
        # By `print`, which rich's bar lets through above itself.
        print(
            f"{progress.num_tokens:,} tokens to compute, about {size} of KV to write, {free} free",
            file=sys.stderr,
        )


def _speed(progress: IngestProgress) -> str:
    if progress.eta_seconds is None:
        return ""
    left = f", {console.format_seconds(progress.eta_seconds)} left" if progress.eta_seconds else ""
    return f", {progress.tokens_per_second:,.0f} tokens/s{left}"
