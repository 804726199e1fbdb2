"""Listening: the socket, uvicorn, a stop that lets answers finish, and the log."""

from __future__ import annotations

import functools
import json
import logging
import re
import socket
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from kvrag.arguments import shown
from kvrag.errors import ParameterError
from kvrag.server.access import is_loopback
from kvrag.server.connections import Connection, Connections, most_connections

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
            raise ParameterError(f"cannot listen at {host}, port {port}: {why}") from error
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Connections inherit it.
            self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
        self._grace_seconds = grace_seconds
        connections = Connections(most_connections())
        config = uvicorn.Config(
            app,
            # Over h11, which bounds a request's headers, and httptools does not.
            http=cast(Any, functools.partial(Connection, connections)),
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
