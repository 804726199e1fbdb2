"""The stages of an ingestion on Ray, in this process."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrag.chunk import Chunk, ChunkKey
from kvrag.ingest.companions import Companions
from kvrag.ingest.index import Index
from kvrag.ingest.limits import ParseLimits
from kvrag.ingest.plan import Plan
from kvrag.ingest.ray import packets as p
from kvrag.ingest.stages import Run
from kvrag.ingest.storage import Storage


def tiny_index(folder: Path, **more: Any) -> Index:
    settings: Any = {"embedding": "hashing", "chunk_tokens": 64, "codec": "raw", **more}
    return Index.create(folder / "index", model="kvrag-tiny", **settings)


def here(run: Run) -> Plan:
    """Carry out an ingestion as `RayRunner` does, but in this process."""
    plan = Plan()
    catalog, sources = run.storage.catalog.documents, run.sources
    rows = [p.file_row(catalog, path) for path in sources.files]
    rows += [p.document_row(catalog, one) for one in sources.documents.values()]
    job = replace(job_of(run.storage), dry_run=run.dry_run, limits=run.parser.limits)
    collector = p.Collector(run, plan, False)
    planned = list(p.plan_rows(table(rows), job))
    if job.is_similar and not job.dry_run:

        def encode(missing: list[tuple[ChunkKey, Chunk]]) -> dict[ChunkKey, str]:
            packets = [p.pack(one) for one in p.single_chunks(missing, job.batch_tokens)]
            return collector.encoded(encoded(packets, job))

        packets = [packet for one in planned for packet in p.unpack(one)]
        known = {one.source for packet in packets for one in packet.plan.documents}
        collector.collect(packets, Companions(run.storage, run.encoders, known, encode))
    else:
        collector.collect(encoded(planned, job))
    return plan


def computed(rows: list[dict[str, Any]], job: p.Job) -> Iterator[p.Packet]:
    """Yield the packets of some rows, with their vectors, and with their KV stored."""
    yield from encoded(p.plan_rows(table(rows), job), job)


def encoded(packets: Iterable[Any], job: p.Job) -> Iterator[p.Packet]:
    for packet in packets:
        if not job.dry_run:
            packet = p.Encoder(job, p.Attempts())(packet)
        yield from p.unpack(packet)


def job_of(index: Index | Storage) -> p.Job:
    return p.Job(
        folder=str(index.path),
        config=index.config,
        model=index.config.model,
        device=None,
        store=f"file:{index.path / 'kv'}",
        codec="raw",
        profile=b"",
        writer=b"",
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
