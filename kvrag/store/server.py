"""A store over HTTP/1.1: what ``kvrag serve-kv`` runs.

aiohttp reads requests and writes answers; asyncio accepts connections and encrypts. kvrag's part is
who may stay (`kvrag.store.server_admission`), what may be requested (`kvrag.store.server_requests`)
and what is answered (`kvrag.store.server_answers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kvrag.arguments import shown
from kvrag.errors import ParameterError
from kvrag.regularfile import require_regular
from kvrag.store.base import Store
from kvrag.store.extras import require

if TYPE_CHECKING:
    from kvrag.store.server_connections import Connections

DEFAULT_PORT = 8650
MAX_CONNECTIONS = 64

_BACKLOG = 512
_MAX_THREADS = 32


class RecordServer:
    """Serves a store's records to clients that know the token.

    Parameters
    ----------
    store
        The store. The caller closes it.
    host, port
        Where to listen; port 0 takes a free one.
    token
        Token that requests must send (``Authorization: Bearer``); "" admits everybody.
    is_writable
        Whether records may be written and deleted.
    tls
        Certificate and key, for HTTPS; None means plain HTTP.
    max_connections
        Most admitted connections at the same time. One more replaces the connection that has been
        idle longest; if none is idle, it is answered 503 and closed.

    Raises
    ------
    ParameterError
        When other machines could connect and no token is required, or when the extra ``serve`` is
        not installed.
    OSError
        When the server cannot listen on the address.
    """

    def __init__(
        self,
        store: Store,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        *,
        token: str = "",
        is_writable: bool = False,
        tls: ssl.SSLContext | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        require("aiohttp", "serve")
        from kvrag.store.server_answers import Answers
        from kvrag.store.server_requests import Gate, is_loopback

        if not token and not is_loopback(host):
            raise ParameterError(
                f"serving at {shown(host)} without a token would let everybody on the network read "
                "the store: give a token, or serve at 127.0.0.1"
            )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server(
            (host, port),
            family=family,
            backlog=_BACKLOG,
            dualstack_ipv6=family == socket.AF_INET6 and socket.has_dualstack_ipv6(),
        )
        self._listener.setblocking(False)
        self.server_address = self._listener.getsockname()[:2]
        self.is_writable = is_writable
        self._tls = tls
        self._max_connections = max_connections
        self._gate = Gate(token)
        self._threads = ThreadPoolExecutor(
            min(_MAX_THREADS, max_connections), thread_name_prefix="kvrag-serve"
        )
        self._answers = Answers(store, is_writable, self._threads)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: Connections | None = None
        self._lock = threading.Lock()
        self._grace_seconds: float | None = None
        self._stopping = asyncio.Event()
        self._has_ended = threading.Event()

    @property
    def server_port(self) -> int:
        """The port on which the server listens."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """URL for `kvrag.store.registry.open_store` on this machine."""
        host = str(self.server_address[0])
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        host = f"[{host}]" if ":" in host else host
        return f"{'https' if self._tls else 'http'}://{host}:{self.server_port}"

    def counts(self) -> Mapping[str, Any]:
        """Return the answers so far by status, and the bytes of records in them."""
        answers = self._answers
        return {"answers": dict(answers.statuses.copy()), "bytes_sent": answers.bytes_sent}

    def serve_forever(self) -> None:
        """Serve until `stop` is called."""
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._serve())
        finally:
            self._listener.close()
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._has_ended.set()

    def stop(self, grace_seconds: float = 10.0) -> None:
        """Accept no more requests, and wait up to `grace_seconds` for answers that have begun.

        Must not be called by the thread that runs `serve_forever`.
        """
        with self._lock:
            self._grace_seconds = grace_seconds
            if self._loop is None:
                # Not started yet: `serve_forever` will return at once.
                self._listener.close()
                return
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._stopping.set)
        self._has_ended.wait()

    async def _serve(self) -> None:
        from kvrag.store.server_connections import Connections

        with self._lock:
            if self._grace_seconds is not None:
                return
            self._loop = asyncio.get_running_loop()
        self._connections = Connections(self._gate, self._answers, self._tls, self._max_connections)
        await self._connections.run(self._listener, self._stopping)
        assert self._grace_seconds is not None
        await self._connections.finish(self._grace_seconds)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the factory of the faster event loop, if it is installed."""
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    return uvloop.new_event_loop


def tls_context(certificate: str, key: str | None) -> ssl.SSLContext:
    """Return a server's TLS context. Raises ParameterError if the files are unusable."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        for path in (certificate, *([] if key is None else [key])):
            require_regular(path)
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ParameterError(
            f"{certificate}{f' and {key}' if key else ''}: no certificate and key in PEM format "
            f"({getattr(error, 'strerror', None) or error})"
        ) from error
    return context
