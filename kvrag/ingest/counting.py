"""What is counted while an index is used: by a process, and by all of them since the first.

A process counts in memory. Every half minute in which something is counted, and when the index is
closed, it adds what is new to a file beside the index, in one transaction. A process that is killed
loses the last half minute of its counts, and nothing else. Counting never fails anybody: where the
folder cannot be written, nothing is kept.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrag.fusion.report import FusionReport
from kvrag.store.metrics import Counts, Labels, MetricsOf, StoreCounts, labelled

FILE_NAME = "counters.sqlite"

_APPLICATION_ID = 0x6B76434E  # "kvCN"
_SCHEMA_VERSION = 1
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS counters (
    name TEXT NOT NULL,
    labels TEXT NOT NULL,
    value REAL NOT NULL,
    PRIMARY KEY (name, labels)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS about (since REAL NOT NULL);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_SCHEMA_VERSION};
COMMIT;
"""
_SECONDS_BETWEEN = 30.0
# A file that another process holds is not worth an answer's time.
_WAIT_SECONDS = 0.2
# In seconds since 1970; what is later is no time.
_LATEST = 1e11

METRICS: MetricsOf = {
    "prompts": ("Prompts fused.", ()),
    "tokens": ("Prompt tokens: exact, reused, recomputed or fresh.", ("kind",)),
    "chunks": ("Stored chunks of prompts, loaded or computed by decision.", ("outcome",)),
    "damaged_rows": ("Rows of the catalog that were left out because they are damaged.", ()),
    "misses": ("Chunks found in prompts and computed because they could not be had.", ("reason",)),
    "seconds": ("Seconds of answering by stage; hidden_load is waited for by nobody.", ("stage",)),
    "stream_chunks": ("Chunks streamed, by the level that was chosen.", ("level",)),
    "stream_deadlines": ("Streamed prompts whose first token came in time, or late.", ("outcome",)),
}
"""What is counted besides stores: name to what it is, and its labels."""


@dataclass(frozen=True)
class KeptCounts:
    """What all processes have counted.

    Attributes
    ----------
    since
        When the first of them began, in seconds since 1970.
    counts
        Name and labels to value.
    """

    since: float
    counts: Counts

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "since": self.since,
            "counters": [
                {"name": name, "labels": dict(labels), "value": value}
                for (name, labels), value in sorted(self.counts.items())
            ],
        }


class IndexCounters:
    """Counts of one opened index. Safe to use from several threads.

    Parameters
    ----------
    folder
        The index's.
    store_counts
        Tells what the index's store has counted.
    """

    def __init__(self, folder: Path, store_counts: Callable[[], Sequence[StoreCounts]]) -> None:
        self._path = folder / FILE_NAME
        self._store_counts = store_counts
        self._lock = threading.Lock()
        self._counts: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        self._keeping = threading.Lock()
        self._kept: Counts = {}
        self._due = time.monotonic() + _SECONDS_BETWEEN
        self._at_fork: Counts = {}
        _living.add(self)

    def before_fork(self) -> None:
        """Remember what this process has counted: that stays its own."""
        self._at_fork = self._now()

    def in_child(self) -> None:
        """Count from here on, in a process that was forked."""
        self._kept = self._at_fork
        # Another thread of the parent may have held them.
        self._lock, self._keeping = threading.Lock(), threading.Lock()

    def note(self, report: FusionReport) -> None:
        """Count a prompt, with the streaming in it if there was any."""
        found: Counts = {("prompts", ()): 1}
        for kind in ("exact", "reused", "recomputed", "fresh"):
            found["tokens", (("kind", kind),)] = getattr(report, f"num_{kind}")
        found["chunks", (("outcome", "loaded"),)] = report.num_chunks
        num_computed = sum(one.is_computed for one in report.decisions)
        found["chunks", (("outcome", "computed"),)] = num_computed
        for reason, count in report.misses.items():
            found["misses", (("reason", reason),)] = count
        seconds = {**report.seconds, "hidden_load": report.hidden_load_seconds}
        for stage, took in seconds.items():
            found["seconds", (("stage", stage),)] = took
        if report.stream is not None:
            for level, count in report.stream.levels.items():
                found["stream_chunks", (("level", level),)] = count
            outcome = "met" if report.stream.is_met else "late"
            found["stream_deadlines", (("outcome", outcome),)] = 1
        with self._lock:
            for what, amount in found.items():
                if amount:
                    self._counts[what] += amount
        if time.monotonic() >= self._due:
            self.keep()

    def note_damage(self) -> None:
        """Count a row of the catalog that was left out."""
        with self._lock:
            self._counts["damaged_rows", ()] += 1

    def counts(self) -> Counts:
        """Return what this process has counted of prompts; for its stores see `Store.counts`."""
        with self._lock:
            return dict(self._counts)

    def keep(self) -> None:
        """Add to the file what is new since the last time."""
        with self._keeping:
            self._due = time.monotonic() + _SECONDS_BETWEEN
            now = self._now()
            new = {what: count - self._kept.get(what, 0.0) for what, count in now.items()}
            new = {what: count for what, count in new.items() if count > 0}
            if not new or not self._path.parent.is_dir():
                return
            with contextlib.suppress(sqlite3.Error, OSError):
                _add(self._path, new)
                self._kept = now

    def _now(self) -> Counts:
        return self.counts() | labelled(self._store_counts())


_living: weakref.WeakSet[IndexCounters] = weakref.WeakSet()


def _before_fork() -> None:
    for counters in list(_living):
        counters.before_fork()


def _in_child() -> None:
    for counters in list(_living):
        counters.in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)


def read_kept(folder: Path) -> KeptCounts | None:
    """Return what all processes have counted of an index; None where there is no file, or another.

    Parameters
    ----------
    folder
        The index's.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    # What a killed process has left half done can only be undone by who may write.
    for mode in ("rw", "ro"):
        with contextlib.suppress(sqlite3.Error, TypeError, ValueError, RecursionError):
            return _read(f"{path.absolute().as_uri()}?mode={mode}")
    return None


def _read(uri: str) -> KeptCounts:
    with contextlib.closing(_connect(uri)) as connection:
        (since,) = connection.execute("SELECT since FROM about").fetchone()
        rows = connection.execute("SELECT name, labels, value FROM counters").fetchall()
    counts = {
        (name, tuple((str(k), str(v)) for k, v in json.loads(labels))): float(value)
        for name, labels, value in rows
    }
    if not 0 <= since < _LATEST or not all(map(math.isfinite, counts.values())):
        raise ValueError("no time of beginning, or no counts")
    return KeptCounts(float(since), counts)


def _add(path: Path, new: Counts) -> None:
    with contextlib.closing(_connect(path.absolute().as_uri())) as connection:
        connection.execute("PRAGMA synchronous = NORMAL")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            connection.executescript(_SCHEMA)
        elif version != _SCHEMA_VERSION:
            return
        connection.execute("BEGIN IMMEDIATE")
        # Not only with new tables: who made them may have been killed before.
        connection.execute(
            "INSERT INTO about SELECT ? WHERE NOT EXISTS (SELECT 1 FROM about)", (time.time(),)
        )
        connection.executemany(
            "INSERT INTO counters VALUES (?, ?, ?) "
            "ON CONFLICT DO UPDATE SET value = value + excluded.value",
            [(name, json.dumps(labels), count) for (name, labels), count in new.items()],
        )
        connection.execute("COMMIT")


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_WAIT_SECONDS)
