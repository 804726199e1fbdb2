"""Counters of an index in use: of one process, and of all processes since the first.

A process counts in memory. Every half minute, if anything was counted, and when the index is
closed, it adds the new counts to a file next to the index in one transaction. A killed process
loses at most its last half minute of counts. Counting never raises an error: if the folder is
read-only, nothing is stored.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrag.fusion.report import FusionReport
from kvrag.sqlitefile import open_connection
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
# An answer does not wait long for a file that another process holds.
_WAIT_SECONDS = 0.2
# In seconds since 1970; a larger value is no valid time.
_LATEST = 1e11

METRICS: MetricsOf = {
    "prompts": ("Prompts fused.", ()),
    "tokens": ("Prompt tokens: kept, exact, reused, recomputed or fresh.", ("kind",)),
    "chunks": ("Chunks of prompts: loaded, computed by decision, or made.", ("outcome",)),
    "full_prefills": ("Prompts with known chunks, computed whole because that is faster.", ()),
    "hot_chunks": ("Chunks whose KV was in a card's memory, or page-locked.", ("memory",)),
    "hot_bytes": ("Bytes of KV taken from there.", ("memory",)),
    "host_decoded": ("Chunks that the host decoded for a card, which cannot.", ()),
    "damaged_rows": ("Rows of the catalog that were left out because they are damaged.", ()),
    "misses": ("Chunks found in prompts but computed because they were missing.", ("reason",)),
    "seconds": ("Seconds of answering by stage; hidden_load delays no answer.", ("stage",)),
    "stream_chunks": ("Chunks streamed, by the level that was chosen.", ("level",)),
    "stream_deadlines": ("Streamed prompts whose first token was in time, or late.", ("outcome",)),
}
"""The counters other than those of stores: name to description and labels."""


@dataclass(frozen=True)
class KeptCounts:
    """The counts of all processes.

    Attributes
    ----------
    since
        When the first process began to count, in seconds since 1970.
    counts
        The values by name and labels.
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
    """Counters of one opened index. Safe to use from several threads.

    Parameters
    ----------
    folder
        The index folder.
    store_counts
        Returns the counts of the index's store.
    """

    def __init__(self, folder: Path, store_counts: Callable[[], Sequence[StoreCounts]]) -> None:
        self._path = folder / FILE_NAME
        self._store_counts = store_counts
        self._lock = threading.Lock()
        self._counts: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        self._keeping = threading.Lock()
        self._kept: Counts = {}
        self._due = time.monotonic() + _SECONDS_BETWEEN
        self._process = os.getpid()

    def note(self, report: FusionReport) -> None:
        """Count a prompt, and its streaming if there was any."""
        found: Counts = {
            ("prompts", ()): 1,
            ("full_prefills", ()): int(report.num_outpriced > 0),
            ("host_decoded", ()): report.num_decoded_by_host,
        }

        def count(name: str, label: str, amounts: Mapping[str, float]) -> None:
            found.update({(name, ((label, one),)): amount for one, amount in amounts.items()})

        kinds = ("kept", "exact", "reused", "recomputed", "fresh")
        count("tokens", "kind", {kind: getattr(report, f"num_{kind}") for kind in kinds})
        num_computed = sum(one.is_computed for one in report.decisions)
        num_made = int(report.num_made > 0)  # only the first
        outcomes = {"loaded": report.num_chunks, "computed": num_computed, "made": num_made}
        count("chunks", "outcome", outcomes)
        count("hot_chunks", "memory", report.hot_chunks)
        count("hot_bytes", "memory", report.hot_bytes)
        count("misses", "reason", report.misses)
        count("seconds", "stage", {**report.seconds, "hidden_load": report.hidden_load_seconds})
        if report.stream is not None:
            count("stream_chunks", "level", report.stream.levels)
            count("stream_deadlines", "outcome", {"met" if report.stream.is_met else "late": 1})
        with self._lock:
            for what, amount in found.items():
                if amount:
                    self._counts[what] += amount
        if time.monotonic() >= self._due:
            self.keep()

    def note_damage(self) -> None:
        """Count a damaged row of the catalog that was left out."""
        with self._lock:
            self._counts["damaged_rows", ()] += 1

    def counts(self) -> Counts:
        """Return this process's counts of prompts; see `Store.counts` for its stores."""
        with self._lock:
            return dict(self._counts)

    def keep(self) -> None:
        """Add the counts since the last call to the file; nothing in a forked process."""
        if os.getpid() != self._process:  # which has no index (`OfProcess`)
            return
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


def read_kept(folder: Path) -> KeptCounts | None:
    """Return the counts of all processes; None if there is no valid file.

    Parameters
    ----------
    folder
        The index folder.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    # Only a process with write permission can roll back what a killed process left half done.
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
        # For old tables too: the process that created them may have been killed before this.
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
    connection: sqlite3.Connection = open_connection(
        uri, uri=True, isolation_level=None, timeout=_WAIT_SECONDS
    )
    return connection
