"""The server's metrics, beside those of its index, for Prometheus."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvrag.engine.answer import Verdict
from kvrag.engine.metrics import IndexCollector
from kvrag.ingest.index import Index
from kvrag.server.queue import AnswerQueue

requests_log = logging.getLogger("kvrag.server.requests")

_KL = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class ServerMetrics:
    """Counts of requests, tokens and times.

    Metrics: ``kvrag_server_requests_total`` (labels ``route``, ``status``, ``tenant``; status 499
    means that the client left, route ``socket`` that a command asked),
    ``kvrag_server_tokens_total`` (``kind``, ``tenant``), ``kvrag_server_ttft_seconds``,
    ``kvrag_server_seconds`` (``route``), ``kvrag_server_answers_waiting`` and
    ``kvrag_server_answers_open``, of verified answers ``kvrag_server_audited_total`` (``policy``,
    ``outcome``), ``kvrag_server_audited_tokens_total`` (``policy``, ``agrees``) and
    ``kvrag_server_audited_kl`` (``policy``), and those of `kvrag.engine.metrics.IndexCollector`.

    Parameters
    ----------
    index
        What else to count.
    """

    def __init__(self, index: Index) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(IndexCollector(index))
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests = counter(
            "kvrag_server_requests",
            "Requests by their status; 499: the client left.",
            ("route", "status", "tenant"),
        )
        self.tokens = counter(
            "kvrag_server_tokens",
            "Tokens of finished answers: prompt, cached (a part of those) or completion.",
            ("kind", "tenant"),
        )
        self.ttft = histogram(
            "kvrag_server_ttft_seconds",
            "Time to the first token, the wait included.",
            buckets=_SECONDS,
        )
        self.seconds = histogram(
            "kvrag_server_seconds",
            "Time from the request to the end of its answer.",
            ("route",),
            buckets=_SECONDS,
        )
        self.audited = counter(
            "kvrag_server_audited",
            "Answers beside full prefill: same, other, or dropped because others asked.",
            ("policy", "outcome"),
        )
        self.audited_tokens = counter(
            "kvrag_server_audited_tokens",
            "Tokens of verified answers, by whether full prefill's likeliest one is the same.",
            ("policy", "agrees"),
        )
        self.audited_kl = histogram(
            "kvrag_server_audited_kl",
            "KL(full prefill || reused KV) of a verified answer, a token, in nats.",
            ("policy",),
            buckets=_KL,
        )

    def watch(self, queue: AnswerQueue) -> None:
        """Count what waits in a queue, too."""
        for name, what, count in (
            ("waiting", "Answers that wait for their turn.", lambda: queue.num_waiting),
            ("open", "Answers that are being generated.", lambda: queue.num_open),
        ):
            gauge = Gauge(f"kvrag_server_answers_{name}", what, registry=self._registry)
            gauge.set_function(count)

    def note(
        self, line: dict[str, Any], tokens: Mapping[str, int], ttft_seconds: float | None
    ) -> None:
        """Count a request that has ended, and log its line.

        Parameters
        ----------
        line
            Its fields in the log, of which some are counted.
        tokens
            Its numbers of tokens, by their kind.
        ttft_seconds
            The time to its first token, if there was one.
        """
        route, tenant = line["route"], line["tenant"]
        self.requests.labels(route, str(line["status"]), tenant).inc()
        self.seconds.labels(route).observe(line["seconds"])
        for kind, count in tokens.items():
            self.tokens.labels(kind, tenant).inc(count)
            line[f"{kind}_tokens"] = count
        if ttft_seconds is not None:
            self.ttft.observe(ttft_seconds)
            line["ttft_seconds"] = round(ttft_seconds, 4)
        requests_log.info(
            "request", extra={"fields": line | {"seconds": round(line["seconds"], 4)}}
        )

    def note_verdict(self, verdict: Verdict | None) -> None:
        """Count a verdict; None: nobody found the time."""
        if verdict is None:
            self.audited.labels("", "dropped").inc()
            return
        policy, agreed = verdict.policy, verdict.num_agreed
        self.audited.labels(policy, "same" if verdict.is_same else "other").inc()
        self.audited_tokens.labels(policy, "yes").inc(agreed)
        self.audited_tokens.labels(policy, "no").inc(verdict.num_tokens - agreed)
        self.audited_kl.labels(policy).observe(verdict.kl)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)
