"""What stores count, as Prometheus metrics (extra ``metrics``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvrag.store.base import Store
from kvrag.store.extras import require

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class StoreCollector:
    """Gives the counts of a store to Prometheus whenever it asks.

    Metrics, each with the labels ``tier`` (0 is the fastest) and ``store`` (``file``, ``redis``):
    ``kvrag_store_hits_total``, ``kvrag_store_misses_total`` (with ``reason``),
    ``kvrag_store_read_bytes_total``, ``kvrag_store_written_bytes_total``,
    ``kvrag_store_evictions_total`` and ``kvrag_store_evicted_bytes_total``.

    Parameters
    ----------
    store
        Whose counts; `Index.store` of an index.

    Examples
    --------
    >>> StoreCollector(index.store).register()              # doctest: +SKIP
    >>> prometheus_client.start_http_server(9100)           # doctest: +SKIP
    """

    def __init__(self, store: Store) -> None:
        self._client = require("prometheus_client", "metrics")
        self._core = require("prometheus_client.core", "metrics")
        self._store = store

    def register(self, registry: CollectorRegistry | None = None) -> None:
        """Add the metrics to a registry; None means Prometheus' own.

        One store a registry: a second one would have the same names.
        """
        chosen = self._client.REGISTRY if registry is None else registry
        chosen.register(self)

    def unregister(self, registry: CollectorRegistry | None = None) -> None:
        """Take the metrics out of a registry."""
        chosen = self._client.REGISTRY if registry is None else registry
        chosen.unregister(self)

    def collect(self) -> Iterator[Any]:
        """Yield the metrics as they are now; called by the registry."""
        labels = ["tier", "store"]

        def counter(name: str, what: str, *more: str) -> Any:
            return self._core.CounterMetricFamily(
                f"kvrag_store_{name}", what, labels=[*labels, *more]
            )

        hits = counter("hits", "Records opened.")
        misses = counter("misses", "Records that could not be had or used.", "reason")
        read = counter("read_bytes", "Bytes of records read.")
        written = counter("written_bytes", "Bytes of records written.")
        evictions = counter("evictions", "Records removed to keep within a limit.")
        evicted = counter("evicted_bytes", "Bytes of records removed to keep within a limit.")
        for number, counts in enumerate(self._store.counts()):
            place = [str(number), counts.name]
            hits.add_metric(place, counts.hits)
            for reason, count in sorted(counts.misses.items()):
                misses.add_metric([*place, reason], count)
            read.add_metric(place, counts.bytes_read)
            written.add_metric(place, counts.bytes_written)
            evictions.add_metric(place, counts.evictions)
            evicted.add_metric(place, counts.bytes_evicted)
        yield from (hits, misses, read, written, evictions, evicted)
