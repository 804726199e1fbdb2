"""The content of an index in numbers."""

from __future__ import annotations

from pathlib import Path

from kvrag.ingest import catalog as catalogs
from kvrag.ingest.config import VECTORS_NAME
from kvrag.ingest.kept import kept_keys
from kvrag.ingest.report import IndexStats
from kvrag.ingest.storage import Storage
from kvrag.ingest.vectorheader import ROW_BYTES, vector_stats


def stats_of(storage: Storage) -> IndexStats:
    """Return the content of an index in numbers; needs no model."""
    config = storage.config
    num_documents, num_chunks, num_tokens = storage.catalog.counts()
    needed = kept_keys(storage.path) | storage.catalog.keys()
    sizes = {
        key.digest: size
        for key, size in storage.store.sizes()
        # Other indexes' records in a shared store do not count.
        if not storage.is_store_shared or key.digest in needed
    }
    stored = sorted(sizes)
    size_bytes = sum(sizes.values())
    num_vectors = storage.catalog.num_vectors(config.embedding_dim)
    cached = vector_stats(storage.path)
    compared_bytes = num_vectors * (4 * config.embedding_dim + ROW_BYTES)
    # Identical chunks share one record.
    stored_tokens = sum(needed[digest] for digest in stored if digest in needed)
    return IndexStats(
        path=str(storage.path),
        store=storage.store.url,
        model=config.model,
        dtype=config.dtype,
        codec=config.codec,
        embedding=config.embedding,
        chunk_tokens=config.chunk_tokens,
        context=config.context,
        context_tokens=config.context_tokens,
        compression=config.compression,
        control_tokens=config.control_tokens,
        num_prefix_tokens=len(config.prefix_ids),
        num_documents=num_documents,
        num_chunks=num_chunks,
        num_tokens=num_tokens,
        num_records=len(stored),
        num_unreferenced_records=sum(digest not in needed for digest in stored),
        size_bytes=size_bytes,
        bytes_per_token=config.bytes_per_token,
        stored_bytes_per_token=size_bytes / stored_tokens if stored_tokens else 0.0,
        catalog_bytes=_size_of(storage.path / catalogs.FILE_NAME),
        vectors_bytes=_size_of(storage.path / VECTORS_NAME),
        num_vectors=num_vectors,
        vectors_memory_bytes=cached.memory_bytes if cached.is_graph else compared_bytes,
        has_graph=cached.is_graph,
        generation=storage.catalog.generation(),
    )


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
