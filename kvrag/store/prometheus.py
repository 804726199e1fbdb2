"""Store counts as Prometheus metrics (extra ``metrics``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvrag.plugins import require
from kvrag.store.base import Store
from kvrag.store.metrics import METRICS, Counts, MetricsOf, labelled

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class StoreCollector:
    """Exports a store's counts to Prometheus.

    Metrics, each with the labels ``tier`` (0 is the fastest) and ``store`` (``file``, ``redis``):
    ``kvrag_store_hits_total``, ``kvrag_store_misses_total`` (with ``reason``),
    ``kvrag_store_read_bytes_total``, ``kvrag_store_written_bytes_total``,
    ``kvrag_store_seconds_total``, ``kvrag_store_evictions_total`` and
    ``kvrag_store_evicted_bytes_total``.

    Parameters
    ----------
    store
        The store to export; for an index, `Index.store`.

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

        Register one store in each registry: a second one would have the same names.
        """
        chosen = self._client.REGISTRY if registry is None else registry
        chosen.register(self)

    def unregister(self, registry: CollectorRegistry | None = None) -> None:
        """Remove the metrics from a registry."""
        chosen = self._client.REGISTRY if registry is None else registry
        chosen.unregister(self)

    def collect(self) -> Iterator[Any]:
        """Yield the current metrics; the registry calls this."""
        yield from families(self._core, METRICS, labelled(self._store.counts()))


def families(core: Any, metrics: MetricsOf, counts: Counts) -> Iterator[Any]:
    """Yield counts as Prometheus metric families.

    Parameters
    ----------
    core
        The module ``prometheus_client.core``.
    metrics
        Names and descriptions of the metrics; other counts are left out.
    """
    for name, (what, labels) in metrics.items():
        family = core.CounterMetricFamily(f"kvrag_{name}", what, labels=labels)
        for (counted, values), count in counts.items():
            if counted == name:
                family.add_metric([value for _, value in values], count)
        yield family
