"""The stages of an ingestion on Ray, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrag.ingest.index import Index
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.plan import Plan
from kvrag.ingest.ray.packets import Collector, Packet, unpack
from kvrag.ingest.ray.planning import document_row, file_row, plan_rows
from kvrag.ingest.ray.workers import Attempts, Encoder, Job
from kvrag.ingest.stages import Run
from kvrag.ingest.storage import Storage


def tiny_index(folder: Path) -> Index:
    settings: Any = {"embedding": "hashing", "chunk_tokens": 64, "codec": "raw"}
    return Index.create(folder / "index", model="kvrag-tiny", **settings)


def here(run: Run) -> Plan:
    """Carry out an ingestion as `RayRunner` does, but in this process."""
    plan = Plan()
    catalog, sources = run.storage.catalog.documents, run.sources
    rows = [file_row(catalog, path) for path in sources.files]
    rows += [document_row(catalog, one) for one in sources.documents.values()]
    job = replace(job_of(run.storage), dry_run=run.dry_run, limits=run.parser.limits)
    Collector(run, plan, False).collect(computed(rows, job))
    return plan


def computed(rows: list[dict[str, Any]], job: Job) -> Iterator[Packet]:
    """Yield the packets of some rows, with their vectors, and with their KV stored."""
    for packet in plan_rows(table(rows), job):
        if not job.dry_run:
            attempts = Attempts()
            packet = Encoder(job, attempts.begin, attempts.end)(packet)
        yield from unpack(packet)


def job_of(index: Index | Storage) -> Job:
    return Job(
        folder=str(index.path),
        config=index.config,
        model=index.config.model,
        device=None,
        store=f"file:{index.path / 'kv'}",
        codec="raw",
        profile=b"",
        limits=ParseLimits(),
        loaders=(),
        force=False,
        dry_run=False,
        batch_tokens=512,
        cpus=1.0,
    )


def table(rows: list[dict[str, Any]]) -> Any:
    import pyarrow as pa

    return pa.Table.from_pylist(rows)
