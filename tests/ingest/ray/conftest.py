"""A cluster of two raylets on this machine, and what two indexes must have in common."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvrag.ingest.index import Index
from tests.ingest.conftest import stored_bytes

_ROOT = Path(__file__).parents[3]
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # On two cores that others use, workers at Ray's niceness of 15 would hardly run.
    "RAY_worker_niceness": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # No file of a folder above, and no warning of a missing one.
    "PYTHONPATH": str(_ROOT),
}
NODE = {
    "num_cpus": 2,
    "include_dashboard": False,
    "include_log_monitor": False,
    "object_store_memory": 100 << 20,
}
"""Processors are counted, not bound: two raylets have four, whatever this machine has."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Start two raylets, and stop them at the end."""
    pytest.importorskip("ray.data", reason="kvrag[ray] is not installed")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _SETTINGS.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        started = Cluster(initialize_head=True, head_node_args=NODE)
        try:
            add_node(started)
            yield started
        finally:
            started.shutdown()


def add_node(cluster: Any) -> None:
    """Start another raylet; on a busy machine the first try may take longer than Ray allows."""
    for is_last in (False, False, True):
        try:
            cluster.add_node(**NODE)
            return
        except Exception:
            if is_last:
                raise


def content(index: Index) -> dict[str, Any]:
    """Return all that an index holds, without what its random id and the clock decide."""
    with closing(sqlite3.connect(index.path / "catalog.sqlite")) as catalog:
        tables = {
            name: catalog.execute(f"SELECT {columns} FROM {name} ORDER BY {order}").fetchall()
            for name, columns, order in (
                ("documents", "source, file, digest, metadata, num_chunks", "source"),
                (
                    "chunks",
                    "row, chunk_id, source, ordinal, text, token_ids, token_starts, num_tokens, "
                    "metadata, contexts, kv_key, embedding",
                    "row",
                ),
                ("other_keys", "row, place, kv_key", "row, place"),
                ("files", "path, digest, size_bytes, mtime_ns, inode", "path"),
            )
        }
    return {"records": stored_bytes(index), **tables}
