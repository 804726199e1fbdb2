"""Counts outlive the process, add up over processes, and never fail anybody."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from kvrag.fusion.report import FusionReport
from kvrag.ingest import counting
from kvrag.ingest.counting import FILE_NAME, IndexCounters, read_kept
from kvrag.loading.cost import ChunkDecision
from kvrag.loading.stream_plan import StreamedChunk, StreamReport
from kvrag.store.memory import MemoryStore
from kvrag_testing.records import key_number, record_of, stored


def report(**fields: object) -> FusionReport:
    values: dict[str, object] = {
        "policy": "none",
        "num_tokens": 100,
        "num_exact": 10,
        "num_reused": 60,
        "num_recomputed": 5,
        "num_fresh": 25,
        "num_chunks": 2,
        "bytes_loaded": 1000,
        "seconds": {"load": 0.5, "compute": 0.25},
        "rows_by_layer": (30, 30),
    }
    return FusionReport(**{**values, **fields})  # type: ignore[arg-type]


def value(folder: Path, name: str, **labels: str) -> float | None:
    return read_kept(folder).counts.get((name, tuple(labels.items())))


def test_counts_add_up_over_processes(tmp_path: Path) -> None:
    store = MemoryStore()
    assert read_kept(tmp_path) is None
    for number in (1, 2):
        counters = IndexCounters(tmp_path, store.counts)
        counters.note(report(misses={"KV not in the store": 3}))
        store.put(key_number(number), record_of(key_number(number)))
        assert stored(store, key_number(number)) is not None
        counters.keep()
        counters.keep()  # nothing is new
        store = MemoryStore()
    assert value(tmp_path, "prompts") == 2
    assert value(tmp_path, "tokens", kind="reused") == 120
    assert value(tmp_path, "chunks", outcome="loaded") == 4
    assert value(tmp_path, "chunks", outcome="computed") is None
    assert value(tmp_path, "misses", reason="KV not in the store") == 6
    assert value(tmp_path, "seconds", stage="load") == pytest.approx(1.0)
    assert value(tmp_path, "store_hits", tier="0", store="memory") == 2
    assert value(tmp_path, "store_read_bytes", tier="0", store="memory") == 2000
    seconds = value(tmp_path, "store_seconds", tier="0", store="memory")
    assert seconds > 0


def test_decisions_and_streams(tmp_path: Path) -> None:
    counters = IndexCounters(tmp_path, tuple)
    decision = ChunkDecision("a", 1, 50, True, 2.0, 1.0)
    counters.note(report(decisions=(decision,)))
    chunks = tuple(StreamedChunk(str(n), n, 3, 10, 0.0, 0.0, None) for n in (0, 3, 3))
    counters.note(report(stream=StreamReport(1.0, 0.5, chunks)))
    counters.note(report(stream=StreamReport(1.0, 1.5, chunks[:1])))
    found = counters.counts()
    assert found["chunks", (("outcome", "computed"),)] == 1
    assert found["stream_chunks", (("level", "text"),)] == 2
    assert found["stream_chunks", (("level", "3/3"),)] == 2
    assert found["stream_deadlines", (("outcome", "met"),)] == 1
    assert found["stream_deadlines", (("outcome", "late"),)] == 1
    assert {name for name, _ in found} <= counting.METRICS.keys()


def test_counts_are_kept_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = IndexCounters(tmp_path, tuple)
    counters.note(report())
    assert read_kept(tmp_path) is None
    monkeypatch.setattr(counters, "_due", 0.0)
    counters.note(report())
    assert value(tmp_path, "prompts") == 2
    counters.note(report())
    assert value(tmp_path, "prompts") == 2
    counters.keep()
    assert value(tmp_path, "prompts") == 3


WRITE_AND_DIE = """
import sys
from pathlib import Path
from kvrag.ingest.counting import IndexCounters
counters = IndexCounters(Path(sys.argv[1]), tuple)
print("ready", flush=True)
while True:
    counters._counts["prompts", ()] += 1
    counters.keep()
"""


def test_a_kill_leaves_a_file_that_counts_on(tmp_path: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WRITE_AND_DIE, str(tmp_path)], stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    for child in children:
        with child.stdout:
            child.stdout.readline()
    while read_kept(tmp_path) is None:
        pass
    for child in children:
        child.kill()
        child.wait()
    before = value(tmp_path, "prompts")
    counters = IndexCounters(tmp_path, tuple)
    counters.note(report())
    counters.keep()
    assert value(tmp_path, "prompts") == before + 1


@pytest.mark.parametrize("content", [b"", b"not a database" * 100])
def test_a_file_of_something_else_fails_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    counters = IndexCounters(tmp_path, tuple)
    counters.note(report())
    counters.keep()
    assert counters.counts()["prompts", ()] == 1
    if content:
        assert read_kept(tmp_path) is None
    else:
        assert value(tmp_path, "prompts") == 1


@pytest.mark.parametrize(
    ("damage", "values"),
    [
        *(
            ("INSERT INTO counters VALUES ('x', ?, ?)", values)
            for values in (("[" * 100_000, 1.0), ("null", 1.0), ("[[1]]", 1.0), ("[]", "word"))
        ),
        ("INSERT INTO counters VALUES ('x', '[]', ?)", (9e999,)),
        *(("UPDATE about SET since = ?", (since,)) for since in (-1.0, 1e300, "today")),
        ("PRAGMA user_version = 99", ()),
        ("DELETE FROM about", ()),
    ],
)
def test_a_file_that_is_not_as_it_was_written(
    tmp_path: Path, damage: str, values: tuple[object, ...]
) -> None:
    counters = IndexCounters(tmp_path, tuple)
    counters.note(report())
    counters.keep()
    connection = sqlite3.connect(tmp_path / FILE_NAME)
    connection.execute(damage, values)
    connection.commit()
    connection.close()
    counters.note(report())
    counters.keep()
    if damage == "DELETE FROM about":  # as a process left it that was killed while it made it
        assert value(tmp_path, "prompts") == 2
    elif "user_version" in damage:  # of a newer kvrag: it is left alone
        assert value(tmp_path, "prompts") == 1
    else:
        assert read_kept(tmp_path) is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_adds_no_counts(tmp_path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from kvrag.ingest.counting import IndexCounters
from tests.ingest.test_counting import report
counters = IndexCounters(Path({str(tmp_path)!r}), tuple)
counters.note(report())
if not (child := os.fork()):
    counters.note(report())
    counters.keep()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
counters.keep()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert value(tmp_path, "prompts") == 1
