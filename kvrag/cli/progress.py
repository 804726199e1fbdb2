"""The progress of `kvrag ingest` on stderr: an estimate, then tokens/s and time left."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvrag.cli import console

if TYPE_CHECKING:
    from kvrag.ingest.report import IngestProgress


class IngestBar:
    """A context manager; pass its `update` to `Index.add` as `on_progress`.

    Parameters
    ----------
    place
        The index's folder, for the free space on its disk.
    is_hidden
        Whether somebody else shows the progress.
    """

    def __init__(self, place: Path, *, is_hidden: bool = False) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._place = place
        stderr = console.err()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}% {task.fields[detail]}"),
            console=stderr,
            transient=True,
            disable=is_hidden or not stderr.is_terminal,
        )
        self._task = self._bar.add_task("reading", total=None, detail="")
        self._stage = ""
        self._lines = None if stderr.is_terminal else console.Lines()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, progress: IngestProgress) -> None:
        """Show the progress; show an estimate once, before anything is written."""
        if progress.stage == "read":
            done, total = progress.num_documents_done, progress.num_documents
            detail = f"{done:,} of {total:,} documents"
        elif progress.stage == "profile":
            self._show("fitting the codec", progress.doing, 0, None)
            return
        else:
            if self._stage != progress.stage and progress.num_tokens:
                self._say_estimate(progress)
            done, total = progress.num_tokens_done, progress.num_tokens
            detail = f"{done:,} of {total:,} tokens{_speed(progress)}"
            if not total:  # all KV is stored already
                done, total = progress.num_documents_done, progress.num_documents
                if not total:
                    return
                detail = f"{done:,} of {total:,} documents"
        self._stage = progress.stage
        description = "reading" if progress.stage == "read" else "computing"
        self._show(description, detail, done, max(total, 1))

    def update_first(self, num_done: int, num_chunks: int) -> None:
        """Show how many chunks have their record for a prompt's first place."""
        detail = f"{num_done:,} of {num_chunks:,} chunks"
        self._show("first places", detail, num_done, num_chunks)

    def _show(self, description: str, detail: str, done: int, total: int | None) -> None:
        if self._lines is not None:
            self._lines.update(f"{description}: {detail}")
        self._bar.update(
            self._task, description=description, completed=done, total=total, detail=detail
        )

    def _say_estimate(self, progress: IngestProgress) -> None:
        size = console.format_bytes(progress.size_bytes_estimate)
        free = console.format_bytes(shutil.disk_usage(self._place).free)
        self._bar.console.print(
            f"{progress.num_tokens:,} tokens to compute, about {size} of KV to write, {free} free",
            style="dim",
        )


def _speed(progress: IngestProgress) -> str:
    if progress.eta_seconds is None:
        return ""
    left = f", {console.format_seconds(progress.eta_seconds)} left" if progress.eta_seconds else ""
    return f", {progress.tokens_per_second:,.0f} tokens/s{left}"
