"""Connections of ``kvrag serve-kv``, from acceptance to their end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from http import HTTPStatus

from aiohttp import web

from kvrag.store.server_admission import HEAD_SECONDS, Admission, Connection, address_of
from kvrag.store.server_answers import Answers, Session
from kvrag.store.server_requests import MAX_HEADERS, MAX_LINE_BYTES, Gate, RefusedError

_LINGERING_SECONDS = 2.0
# Pause after a connection could not be accepted because no descriptors were left.
_PAUSE_SECONDS = 0.05
_LAST_SECONDS = 5.0
_log = logging.getLogger(__name__)
# aiohttp writes a traceback for each malformed request: peers would fill the log.
_silent = logging.Logger("kvrag.silent", logging.CRITICAL + 1)


class Connections(web.Server):
    """Accepts connections, and answers those that admission admits.

    Create it in a running event loop, and call `run` once.

    Parameters
    ----------
    gate, answers
        Decides which requests are allowed, and answers them.
    tls
        Certificate and key; None means plain HTTP.
    max_connections
        Most members of `Admission`.
    """

    def __init__(
        self, gate: Gate, answers: Answers, tls: ssl.SSLContext | None, max_connections: int
    ) -> None:
        super().__init__(
            self._handle,
            logger=_silent,
            access_log=None,
            # Admission sets the deadlines.
            keepalive_timeout=1e6,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            lingering_time=_LINGERING_SECONDS,
            auto_decompress=False,
        )
        self._gate = gate
        self._answers = answers
        self._tls = tls
        self._admission = Admission(max_connections)
        self._known: dict[web.RequestHandler, tuple[Connection, Session, asyncio.Event]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._has_answered = asyncio.Event()

    async def run(self, listener: socket.socket, stopping: asyncio.Event) -> None:
        """Accept connections until `stopping` is set."""
        accepting = asyncio.create_task(self._accept(listener))
        await stopping.wait()
        accepting.cancel()
        self._is_stopping = True
        listener.close()

    async def finish(self, grace_seconds: float) -> None:
        """Wait up to `grace_seconds` for answers that have begun, then end all connections."""
        self._admission.drop_waiting()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                while self._admission.num_busy:
                    self._has_answered.clear()
                    await self._has_answered.wait()
        self._admission.drop_all()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LAST_SECONDS)

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        """Let the connection's task end."""
        super().connection_lost(handler, exc)
        if handler in self._known:
            self._known[handler][2].set()

    # -- private --------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listener)
            except OSError as error:
                _log.warning("a connection could not be accepted: %s", error)
                self._admission.drop_oldest_guest()
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            task = loop.create_task(self._serve(accepted, address_of(str(address[0]))))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, accepted: socket.socket, address: str) -> None:
        """Serve a connection to its end."""
        task = asyncio.current_task()
        assert task is not None
        handler = self()
        lost = asyncio.Event()

        def drop() -> None:
            if handler.transport is not None:
                handler.transport.abort()
            else:
                # The TLS handshake is still under way.
                task.cancel()

        connection = Connection(address, drop)
        session = Session(self._answers)
        self._known[handler] = connection, session, lost
        self._admission.enter(connection)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: handler,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else HEAD_SECONDS,
            )
            await lost.wait()
        except (OSError, asyncio.CancelledError):
            accepted.close()
        finally:
            self._admission.leave(connection)
            del self._known[handler]
            await session.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request whose header is complete."""
        if request.protocol not in self._known:
            # The connection ended while the request was on its way here.
            return web.Response()
        connection, session, _ = self._known[request.protocol]
        try:
            return await self._answer(request, connection, session)
        except (TimeoutError, ConnectionError):
            # The peer is too slow, or gone: nothing more can be sent.
            connection.drop()
            return web.Response()
        except Exception:
            _log.exception("%s %s failed", request.method, request.raw_path[:200])
            raise
        finally:
            self._admission.end(connection)
            self._has_answered.set()

    async def _answer(
        self, request: web.BaseRequest, connection: Connection, session: Session
    ) -> web.StreamResponse:
        try:
            self._gate.check(request)
            if self._is_stopping:
                raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping")
            if not self._admission.begin(connection):
                raise RefusedError(
                    HTTPStatus.SERVICE_UNAVAILABLE, "too many connections", {"Retry-After": "1"}
                )
            return await session.answer(request)
        except RefusedError as refused:
            return await session.send(
                request,
                refused.status,
                f"{refused.why}\n".encode(errors="backslashreplace"),
                refused.headers,
                ends=refused.ends,
            )
