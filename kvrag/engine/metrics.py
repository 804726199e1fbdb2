"""Metrics of an index's use, for Prometheus (extra ``metrics``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from kvrag.engine.shared import shared_index
from kvrag.errors import ParameterError
from kvrag.ingest.counting import METRICS
from kvrag.ingest.index import Index
from kvrag.plugins import require
from kvrag.store.prometheus import StoreCollector, families

DEFAULT_PORT = 9464


class IndexCollector:
    """Collects what this process has counted for an index, whenever Prometheus asks.

    In addition to the metrics of `StoreCollector`: ``kvrag_prompts_total``,
    ``kvrag_full_prefills_total``, ``kvrag_tokens_total`` (label ``kind``),
    ``kvrag_chunks_total`` (``outcome``: loaded, computed by decision, or made),
    ``kvrag_misses_total`` (``reason``), ``kvrag_hot_chunks_total`` and ``kvrag_hot_bytes_total``
    (``memory``: the card's, or page-locked), ``kvrag_host_decoded_total``,
    ``kvrag_seconds_total`` (``stage``), ``kvrag_stream_chunks_total`` (``level``) and
    ``kvrag_stream_deadlines_total`` (``outcome``).

    Parameters
    ----------
    index
        The index; the counts of its store are read again each time.

    Raises
    ------
    ParameterError
        If the library ``prometheus-client`` is not installed.
    """

    def __init__(self, index: Index) -> None:
        self._core = require("prometheus_client.core", "metrics")
        self._index = index

    def collect(self) -> Iterator[Any]:
        """Yield the current metrics; a Prometheus registry calls this."""
        yield from families(self._core, METRICS, self._index.counters.counts())
        yield from StoreCollector(self._index.store).collect()


class MetricsServer:
    """Answers Prometheus over HTTP until you close it.

    Attributes
    ----------
    port
        The port it listens on.
    """

    def __init__(self, server: Any, thread: Any) -> None:
        self._server = server
        self._thread = thread
        self.port: int = server.server_port

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_metrics(
    index: Index | str | Path, port: int = DEFAULT_PORT, host: str = "127.0.0.1"
) -> MetricsServer:
    """Serve this process's metrics to Prometheus, at ``http://HOST:PORT/metrics``.

    Parameters
    ----------
    index
        An opened index, or the folder that the process's language models and retrievers name.
    port
        The port to listen on; 0 chooses a free one.
    host
        The address to listen on. ``0.0.0.0`` serves other machines too: anyone who reaches the
        port can then read the counts.

    Raises
    ------
    ParameterError
        If the port is not available, or the library ``prometheus-client`` is not installed.

    Examples
    --------
    >>> kvrag.serve_metrics("my-index")                     # doctest: +SKIP
    """
    client = require("prometheus_client", "metrics")
    registry = client.CollectorRegistry()
    registry.register(IndexCollector(shared_index(index)))
    try:
        server, thread = client.start_http_server(port, addr=host, registry=registry)
    except (OSError, OverflowError) as error:
        raise ParameterError(
            f"metrics cannot be served at {host}:{port}: {error}; choose another port"
        ) from error
    return MetricsServer(server, thread)
