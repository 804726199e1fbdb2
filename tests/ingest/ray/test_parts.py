"""The parts of an ingestion on Ray that need no cluster."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="kvrag[ray] is not installed")

from kvrag.chunk import Chunk, Document
from kvrag.errors import (
    ClusterError,
    DocumentError,
    ParameterError,
    StoreError,
    StoreUnreachableError,
)
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.index import Index
from kvrag.ingest.plan import Plan, PlannedDocument
from kvrag.ingest.ray import RayOptions, RayRunner
from kvrag.ingest.ray import packets as p
from kvrag.ingest.ray.driver import connected
from kvrag.ingest.report import IngestReport
from kvrag.ingest.schema import FileState
from kvrag.ingest.stages import Run
from kvrag.store.file import FileStore
from kvrag.store.registry import open_store
from tests.ingest.ray.conftest import content
from tests.ingest.ray.here import computed, here, job_of, table, tiny_index
from tests.ingest.test_similar import WORDS, page


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Tasks keep a parser for the next one, which here is another test."""
    yield
    p.forget()


STATE = FileState("/a.txt", "d" * 40, 3, 4, 5, 6)


def part(name: str, lengths: list[int], **fields: Any) -> PlannedDocument:
    tokens = [tuple(range(length)) for length in lengths]
    contexts = ((1, 2, 3), ())
    chunks = [
        Chunk(f"{name}-{n}", "x" * len(ids), ids, ids, name, n, {"page": n}, contexts)
        for n, ids in enumerate(tokens)
    ]
    counts = {"num_chunks": len(chunks), "num_tokens": sum(lengths), "num_control_strings": 2}
    of_file = {"is_last_of_file": True, "is_known": True}
    return PlannedDocument(
        name, "e" * 40, {"n": 1}, STATE, chunks=chunks, **counts, **of_file, **fields
    )


def test_a_document_without_all_its_chunks_is_refused() -> None:
    first, second = part("a", [10, 10, 10]), part("b", [5])
    lost, last = replace(first, chunks=first.chunks[:2]), replace(first, chunks=[])
    found = [(one.source, one.reason) for one in p.assemble([lost, second, part("c", []), last])]
    assert found == [
        ("a", "a: 1 of its 3 chunks did not arrive"),
        ("b", ""),
        ("c", ""),
        ("a", "a: 3 of its 3 chunks did not arrive"),
    ]


@pytest.mark.parametrize("dry_run", [True, False])
def test_chunks_that_planning_has_no_room_for_are_cut_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dry_run: bool
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "long.txt").write_text("The keeper of the light wrote a book about ships. " * 100)
    rows = [{"text": f"Row {number} is about ships."} for number in range(30)]
    (docs / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = [docs, Document("object", "An old clock. " * 50)]
    with tiny_index(tmp_path / "one") as one, tiny_index(tmp_path / "many") as many:
        expected = one.add(given, dry_run=dry_run)
        monkeypatch.setattr("kvrag.ingest.plan._MAX_KEPT_TOKENS", 200)
        found = many.add(given, dry_run=dry_run, runner=here)
        for name in ("added", "failed", "num_chunks", "num_tokens", "num_records"):
            assert getattr(found, name) == getattr(expected, name), name
        assert len(found.added) == 32
        assert content(many) == content(one)
        assert bool(content(one)["chunks"]) is not dry_run


def test_chunks_are_encoded_after_their_nearest_wherever_these_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [page(subject, number) for number in range(6) for subject in WORDS]
    long = page("mill", 9, f". {' '.join(page('mill', one).text for one in range(20, 40))}")
    bad = page("ferry", 9)
    prefill = Encoders.prefill

    def failing(self: Encoders, chunk: Chunk, *more: Any) -> object:
        if chunk.source == bad.source and chunk.text:  # a single token has none
            raise DocumentError("it cannot be computed")
        return prefill(self, chunk, *more)

    monkeypatch.setattr(Encoders, "prefill", failing)
    monkeypatch.setattr("kvrag.ingest.companions.COMPARED_TOKENS", 200)  # several windows
    with (
        tiny_index(tmp_path / "one", context="similar:48") as one,
        tiny_index(tmp_path / "many", context="similar:48") as many,
    ):

        def add(*documents: Document) -> IngestReport:
            expected, found = one.add(documents), many.add(documents, runner=here)
            for name in ("added", "changed", "failed", "num_chunks", "num_records", "size_bytes"):
                assert getattr(found, name) == getattr(expected, name), name
            assert content(many) == content(one)
            return found

        report = add(*given, long, bad)
        assert [each.source for each in report.failed] == [bad.source]
        assert report.failed[0].reason == f"{bad.source}: it cannot be computed"
        assert report.num_context_tokens > 0
        ids = [each for row in many.documents() for each in many.catalog.chunk_ids_of(row.source)]
        assert all(chunk.contexts[0] for chunk in many.get_chunks(ids))
        # What others were encoded after changes, and goes.
        assert add(replace(given[0], text=bad.text), given[1]).num_records > 1
        for index in (one, many):
            index.delete(sources=[given[2].source])
        assert add().num_records
        assert many.upkeep.verify().ok


def test_a_chunk_that_ends_its_process_several_times_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = p.Attempts()
    with tiny_index(tmp_path) as index:
        index.add([Document("model", "loaded")])
        job = job_of(index)
        rows = table([p.document_row(index.catalog.documents, Document("d", "One. Two."))])
        (planned,) = p.plan_rows(rows, job)

        class Killed(BaseException):
            pass

        for _ in range(1 + p.MAX_ENDS):
            encoder = p.Encoder(job, attempts)

            def die(_: Chunk) -> Any:
                raise Killed

            monkeypatch.setattr(encoder, "_prefill", die)
            with pytest.raises(Killed):
                encoder(planned)
        (packet,) = p.unpack(p.Encoder(job, attempts)(planned))
        assert f"ended {p.MAX_ENDS} times" in packet.plan.documents[0].reason
        assert packet.outcome.num_records == 0


def test_rows_of_a_dataset_become_documents_or_reasons(tmp_path: Path) -> None:
    rows = [
        {"text": "One.", "source": "s", "year": 2020},
        {"source": "bad"},
        {"path": "s3://b/x.md", "bytes": b"# Two"},
        {"path": "s3://b/x.zip", "bytes": b"?"},
        {"path": "/rows.parquet", "bytes": b"?", "text": "Two.", "id": "has text"},
        {"year": 2021},
    ]
    names = ("text", "source", "path", "bytes", "year", "id")
    with tiny_index(tmp_path) as index:
        blank = dict.fromkeys(names)
        (made,) = p.plan_rows(table([{**blank, **row} for row in rows]), job_of(index))
        (packet,) = p.unpack(made)
    assert [one.source for one in packet.plan.documents] == ["s", "s3://b/x.md", "has text"]
    assert packet.plan.documents[0].metadata["year"] == 2020
    nameless = f"a row with the columns {', '.join(names)}"
    assert [one.source for one in packet.plan.failed] == ["bad", "s3://b/x.zip", nameless]
    assert "expected an object with its text" in packet.plan.failed[0].reason


@pytest.mark.parametrize("unit", ["ns", "us", "s"])
def test_times_of_parquet_are_written_in_one_form(tmp_path: Path, unit: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    there = datetime(2024, 3, 1, 13, tzinfo=timezone(timedelta(hours=2)))
    columns = pa.table(
        {
            "text": ["A fox."],
            "at": pa.array([datetime(2024, 3, 1, 12, 30)], pa.timestamp(unit)),
            "there": pa.array([there], pa.timestamp(unit, "+02:00")),
            "on": pa.array([date(2024, 3, 1)]),
            "never": pa.array([None], pa.timestamp(unit)),
        }
    )
    pq.write_table(columns, tmp_path / "rows.parquet")
    with tiny_index(tmp_path) as index:
        (made,) = p.plan_rows(pq.read_table(tmp_path / "rows.parquet"), job_of(index))
        (packet,) = p.unpack(made)
    (document,) = packet.plan.documents
    assert document.metadata == {
        "at": "2024-03-01T12:30:00",
        "there": "2024-03-01T11:00:00+00:00",
        "on": "2024-03-01",
        "never": None,
    }


@pytest.mark.parametrize("is_one_block", [True, False])
def test_the_first_row_with_a_source_is_used(tmp_path: Path, is_one_block: bool) -> None:
    first, second = ({"id": "x", "text": f"The {name}."} for name in ("first", "second"))
    with tiny_index(tmp_path) as index:

        def add(*rows: dict[str, Any]) -> IngestReport:
            return index.add((), runner=lambda run: rows_here(run, list(rows), is_one_block))

        def text() -> str:
            (row,) = content(index)["chunks"]
            return str(row[4])

        report = add(second, first)
        assert report.added == ("x",)
        assert ["earlier row" in one.reason for one in report.failed] == [True]
        assert text() == "The second."
        for rows, kind, indexed in (
            ((first, second), "changed", "The first."),
            ((first, second), "unchanged", "The first."),
            ((second, first), "changed", "The second."),
        ):
            report = add(*rows)
            found = {name: getattr(report, name) for name in ("added", "changed", "unchanged")}
            assert found == {**dict.fromkeys(found, ()), kind: ("x",)}
            assert [one.source for one in report.failed] == ["x"]
            assert report.failed[0].reason.endswith("give each row a different one")
            assert text() == indexed
        # Said again, in the same words.
        other = {"id": "x", "text": "The other."}
        for rows, kind in (((other, other), "changed"), ((other, other), "unchanged")):
            report = add(*rows)
            assert (getattr(report, kind), report.failed) == (("x",), ())


def with_store(run: Run, store: str, find: Callable[[], Any] = contextlib.nullcontext) -> Plan:
    """Ingest documents as if workers had another store; `find` is around what the driver does."""
    plan, catalog = Plan(), run.storage.catalog.documents
    rows = [p.document_row(catalog, one) for one in run.sources.documents.values()]
    packets = list(computed(rows, replace(job_of(run.storage), store=store)))
    with find():
        p.Collector(run, plan, False).collect(packets)
    return plan


def test_kv_that_a_worker_stored_elsewhere_is_not_committed(tmp_path: Path) -> None:
    elsewhere = partial(with_store, store=f"file:{tmp_path / 'elsewhere'}")
    head = "The same words begin both documents. " * 20
    with tiny_index(tmp_path) as index:
        index.add(Document("a", head))
        before = content(index)["chunks"]
        # The last time, the worker finds there what it stored before.
        for text in (f"{head} An old clock.", "Other words.", "Other words."):
            with pytest.raises(StoreError, match=r"KV for d, and .* not the same store on all"):
                index.add(Document("d", text), runner=elsewhere)
        assert content(index)["chunks"] == before


def test_of_tiers_workers_use_the_one_that_all_machines_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def store(machine: str) -> str:
        return f"tiered:file:{tmp_path / machine}|file:{tmp_path / 'home'}"

    @contextlib.contextmanager
    def without_store() -> Iterator[None]:
        def refuse(*_: object) -> bool:
            raise StoreUnreachableError("it does not answer")

        with monkeypatch.context() as patch:
            patch.setattr(FileStore, "contains", refuse)
            yield

    worker = partial(with_store, store=store("worker"))
    settings: Any = {"embedding": "hashing", "store": store("driver")}
    with Index.create(tmp_path / "index", model="kvrag-tiny", **settings) as index:
        assert index.add(Document("d", "An old clock."), runner=worker).ok
        with contextlib.closing(open_store(f"file:{tmp_path / 'home'}")) as home:
            assert set(home.keys()) == set(index.store.keys()) != set()
        with pytest.raises(StoreUnreachableError, match="it does not answer"):
            index.add(Document("d", "A new clock."), runner=partial(worker, find=without_store))
    assert not (tmp_path / "worker").exists()


@pytest.mark.parametrize(
    "wrong", [{"cpus": 0}, {"min_actors": 0}, {"max_actors": 0}, {"gpus": -1}, {"batch_tokens": 0}]
)
def test_options_that_cannot_be_used_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ParameterError):
        RayOptions(**wrong)


def rows_here(run: Run, rows: list[dict[str, Any]], is_one_block: bool) -> Plan:
    """Ingest the rows of a dataset of one or several blocks, in this process."""
    plan = Plan()
    job, known = job_of(run.storage), run.storage.catalog.documents.digests()
    blocks = [rows] if is_one_block else [[row] for row in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvrag.ingest.ray.packets._Planning.digests", lambda *_: known)
        packets = (packet for block in blocks for packet in computed(block, job))
        p.Collector(run, plan, True).collect(packets)
    return plan


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StoreError("redis does not answer"), "redis does not answer"),
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
        (KeyError(), "KeyError"),
    ],
)
def test_of_a_worker_that_fails_at_a_packet_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    exceptions = pytest.importorskip("ray.exceptions", reason="kvrag[ray] is not installed")
    try:  # as Ray Data does it
        try:
            raise error
        except Exception as cause:
            raise exceptions.UserCodeException("UDF failed.\nFailed after 1/1") from cause
    except exceptions.UserCodeException as wrapped:
        failed = exceptions.RayTaskError("map", traceback.format_exc(), wrapped)
    ray = SimpleNamespace(is_initialized=lambda: True, exceptions=exceptions)
    monkeypatch.setattr("kvrag.ingest.ray.driver.require", lambda *_: ray)
    with (
        pytest.raises(ClusterError, match=f"^a worker of Ray failed .{re.escape(reason)}.; "),
        connected(RayOptions()),
    ):
        raise failed.as_instanceof_cause()


def test_what_listens_and_is_no_cluster_of_ours_may_want_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exceptions = pytest.importorskip("ray.exceptions", reason="kvrag[ray] is not installed")

    def refuse(**_: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    ray = SimpleNamespace(
        is_initialized=lambda: False, exceptions=exceptions, init=refuse, shutdown=lambda: None
    )
    monkeypatch.setattr("kvrag.ingest.ray.driver.require", lambda *_: ray)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with (
            pytest.raises(ClusterError, match="RAY_AUTH_MODE=token"),
            connected(RayOptions(address)),
        ):
            pass


def test_an_error_here_ends_the_run_on_the_cluster_before_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_running = False

    class Rows:
        context = None

        def map_batches(self, *_: object, **__: object) -> Rows:
            return self

        def iter_batches(self, **_: object) -> Iterator[Any]:
            nonlocal is_running
            is_running = True
            try:
                while True:
                    yield p.pack(p.Packet(Plan([part("not stored", [3])])))
            finally:
                is_running = False

    @contextlib.contextmanager
    def cluster(_: RayOptions) -> Iterator[Any]:
        try:
            yield SimpleNamespace(cluster_resources=dict, nodes=list)
        finally:
            assert not is_running

    driver = "kvrag.ingest.ray.driver"
    monkeypatch.setattr(f"{driver}.connected", cluster)
    monkeypatch.setattr(f"{driver}.settings", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(RayRunner, "_computed", lambda _, __, packets, job: packets)
    with tiny_index(tmp_path) as index, pytest.raises(StoreError, match="not the same store"):
        index.add((), runner=RayRunner(dataset=Rows()))
