"""The server's metrics, beside those of its index, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvrag.engine.metrics import IndexCollector
from kvrag.ingest.index import Index
from kvrag.server.queue import AnswerQueue

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class ServerMetrics:
    """Counts of requests, tokens and times.

    Metrics: ``kvrag_server_requests_total`` (labels ``route``, ``status``, ``tenant``; status 499
    means that the client left), ``kvrag_server_tokens_total`` (``kind``, ``tenant``),
    ``kvrag_server_ttft_seconds``, ``kvrag_server_seconds`` (``route``),
    ``kvrag_server_answers_waiting`` and ``kvrag_server_answers_open``, and those of
    `kvrag.engine.metrics.IndexCollector`.

    Parameters
    ----------
    index, queue
        What else to count.
    """

    def __init__(self, index: Index, queue: AnswerQueue) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(IndexCollector(index))
        self.requests = Counter(
            "kvrag_server_requests",
            "Requests by their status; 499: the client left.",
            ("route", "status", "tenant"),
            registry=registry,
        )
        self.tokens = Counter(
            "kvrag_server_tokens",
            "Tokens of finished answers: prompt, cached (a part of those) or completion.",
            ("kind", "tenant"),
            registry=registry,
        )
        self.ttft = Histogram(
            "kvrag_server_ttft_seconds",
            "Time to the first token, the wait included.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.seconds = Histogram(
            "kvrag_server_seconds",
            "Time from the request to the end of its answer.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        for name, what, count in (
            ("waiting", "Answers that wait for their turn.", lambda: queue.num_waiting),
            ("open", "Answers that are being generated.", lambda: queue.num_open),
        ):
            Gauge(f"kvrag_server_answers_{name}", what, registry=registry).set_function(count)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)
