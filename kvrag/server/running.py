"""Listening: the socket, uvicorn, a stop that lets answers finish, and the log."""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import logging
import re
import socket
import threading
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvrag.arguments import shown
from kvrag.errors import ParameterError
from kvrag.server.access import address_of, is_loopback

# How many connections there may be, from whom, and how long one may keep the server waiting.


HEAD_SECONDS = 10.0
"""Time for a request's header, from the connection or from the answer before."""

MAX_CONNECTIONS = 1024

_SPARE_DESCRIPTORS = 64
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)


def most_connections() -> int:
    """Return how many connections this process can hold, with descriptors left for its files."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MAX_CONNECTIONS
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    spare = max(_SPARE_DESCRIPTORS, limit // 4)
    return min(MAX_CONNECTIONS, max(limit // 4, limit - spare))


class Connections:
    """The open connections of a server; only the event loop's thread may use it.

    A connection that is being answered stays. One that waits for its client (for a header, for the
    rest of a body, or until it reads) is closed if there is one too many: the oldest, of the
    address that has most. Thus anyone who holds many idle connections loses them, and a newcomer
    is served.

    Parameters
    ----------
    most
        Most connections. One address may have three quarters of them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._most_of_address = max(1, 3 * most // 4)
        # Those that wait are in the order in which they began to.
        self._open: dict[Connection, None] = {}

    def enter(self, new: Connection) -> None:
        """Admit a new connection; another one, or else this one, is closed if it is too many."""
        numbers = Counter(one.address for one in self._open)
        is_too_many = numbers[new.address] >= self._most_of_address
        if is_too_many or len(self._open) >= self._most:
            waiting = [one for one in self._open if one.waits_for_client]
            if is_too_many:
                waiting = [one for one in waiting if one.address == new.address]
            if waiting:
                oldest = max(waiting, key=lambda one: numbers[one.address])  # the first of equals
                self.leave(oldest)
                oldest.transport.abort()
            else:
                new.transport.write(_BUSY)
                new.transport.close()
        self._open[new] = None

    def waits(self, connection: Connection) -> None:
        """Note that a connection begins to wait for its client."""
        if connection in self._open:
            self.leave(connection)
            self._open[connection] = None

    def leave(self, connection: Connection) -> None:
        """Forget a connection."""
        self._open.pop(connection, None)


class Connection(H11Protocol):
    """A connection, as uvicorn makes it, with a deadline for each header.

    Parameters
    ----------
    connections
        The others.
    given
        What uvicorn passes.
    """

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._connections = connections
        self._deadline: asyncio.TimerHandle | None = None
        self.address = ""
        self.waits_for_client = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first header."""
        super().connection_made(transport)
        self.address = address_of(self.client[0] if self.client else "")
        self._connections.enter(self)
        self._look()

    def data_received(self, data: bytes) -> None:
        """Take what the client has sent."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Wait for the next header."""
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        """Wait until the client reads."""
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        """Go on, since the client has read."""
        super().resume_writing()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        self._connections.leave(self)
        self._set_deadline(is_needed=False)

    def _look(self) -> None:
        """Note whether the client has to send or to read something before this server goes on."""
        has_no_head = self.cycle is None or self.cycle.response_complete
        self._set_deadline(is_needed=has_no_head)
        before = self.waits_for_client
        self.waits_for_client = has_no_head or self.cycle.more_body or self.flow.write_paused
        if self.waits_for_client and not before:
            self._connections.waits(self)

    def _set_deadline(self, *, is_needed: bool) -> None:
        if is_needed and self._deadline is None:
            # A header that arrives byte by byte does not put it off, nor does the rest of a body
            # after its answer.
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)
        elif not is_needed and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


DEFAULT_PORT = 8000
GRACE_SECONDS = 30.0

# A client that reads nothing for this time is dropped, in milliseconds.
_UNREAD_MS = 60_000
# Connections that are accepted at once, before any of them can be closed for another.
_BACKLOG = 32
# From the last event of a stream until its connection is cut.
_LAST_SECONDS = 5


class Server:
    """Serves an ASGI application until it is stopped.

    Parameters
    ----------
    app
        The application.
    host, port
        Where to listen; port 0 takes a free one.
    grace_seconds
        How long `stop` waits for answers that have begun. Then it calls what the application's
        lifespan has put into its state as ``end_answers``, if anything.

    Raises
    ------
    ParameterError
        When the address is not available.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        *,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or str(error)
            is_taken = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
            remedy = (
                "choose another --port, or 0 for a free one"
                if is_taken
                else "choose a --host of this machine"
            )
            raise ParameterError(
                f"cannot listen at {host}, port {port}: {why}; {remedy}"
            ) from error
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Connections inherit it.
            self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
        self._grace_seconds = grace_seconds
        connections = Connections(most_connections())
        config = uvicorn.Config(
            app,
            # Over h11, which bounds a request's headers, and httptools does not.
            http=cast("Any", functools.partial(Connection, connections)),
            backlog=_BACKLOG,
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            proxy_headers=False,
            timeout_graceful_shutdown=int(grace_seconds) + _LAST_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._has_ended = threading.Event()

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        """The server's address."""
        host = str(self._listener.getsockname()[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def serve_forever(self) -> None:
        """Serve until `stop` is called."""
        try:
            self._server.run([self._listener])
        finally:
            self._listener.close()
            self._has_ended.set()

    def stop(self) -> None:
        """Accept no more requests, and wait for the answers that have begun.

        Must not be called by the thread that runs `serve_forever`.
        """
        self._server.should_exit = True
        if not self._has_ended.wait(self._grace_seconds):
            self._server.lifespan.state.get("end_answers", lambda: None)()
            self._has_ended.wait()


def check_address(host: str, *, has_keys: bool, anyone: bool) -> None:
    """Raise ParameterError if other machines could connect and nothing keeps them out."""
    if has_keys or anyone or is_loopback(host):
        return
    raise ParameterError(
        f"serving at {shown(host)} without keys would let everybody on the network ask: give "
        "--keys FILE, serve at 127.0.0.1, or say --anyone"
    )


def check_origin(origin: str) -> str:
    """Return an origin as browsers send it. Raises ParameterError if none does."""
    if origin != "*" and not re.fullmatch("https?://[^/?#@\\s]+", origin.lower()):
        raise ParameterError(
            f"--allow-origin {shown(origin)}: expected an origin such as https://app.example, "
            "without a path, or '*' for all"
        )
    return origin.lower()


class JSONLines(logging.Formatter):
    """Formats a record as one JSON object; `extra={"fields": {...}}` adds fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        when = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        line.update(fields)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr() -> None:
    """Write kvrag's log to stderr as lines of JSON, and the warnings of all other libraries."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONLines())
    logging.captureWarnings(True)
    for name, level in (("kvrag", logging.INFO), ("", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
