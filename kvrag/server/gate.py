"""The way in and out of the server: who may enter, how long a body may take, and what is logged."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send

from kvrag.ingest.limits import ParseLimits
from kvrag.server.access import Account, Accounts, is_loopback
from kvrag.server.answering import Generation
from kvrag.server.metrics import ServerMetrics
from kvrag.server.problems import CLIENT_GONE, OLLAMA, BusyError, RequestError
from kvrag.server.queue import asking

BODY_SECONDS = 30.0
"""Time for a request's whole body."""

MAX_BODY_BYTES = 16 << 20
"""The longest body of a request for vectors or a ranking, which may have many texts."""

MAX_PROMPT_BYTES = 4 << 20
"""The longest body of any other request."""

UPLOAD_SECONDS = 600.0
"""Most time for the whole body of an uploaded document, which may take longer the more arrives."""

BYTES_PER_SECOND = 16 << 10
"""How fast a body must arrive, on average, after `BODY_SECONDS`."""

MAX_REQUESTS = 1024
"""Most requests in progress, of all kinds."""

PAGE = "/page/"
"""Where the page's files are; they need no key, and say nothing about the index."""

DOCUMENTS = "/v1/kvrag/documents"
"""Where documents are listed; below it, they are uploaded."""

# Also without a key.
_OPEN = ("/", "/healthz", "/readyz")
_OF_TEXTS = ("/v1/embeddings", "/v1/rerank", "/api/embed")
_READING = ("GET", "HEAD", "OPTIONS")
# A name, or an address of IPv6 in brackets, and perhaps a port.
_HOST = re.compile(r"(?:\[([\w:.%]+)\]|([^\s/?#@:\[\]\\]+))(?::[0-9]{0,5})?")


@dataclass
class Record:
    """What is known about one request; ``request.state.record``.

    Attributes
    ----------
    request_id
        Its id, also in the response's header ``x-request-id``.
    account
        Whose it is.
    generation
        The answers to it, if any were begun.
    num_answers
        How many answers count against the account's concurrency.
    user
        The request's field ``user``.
    status
        The response's status, or that of the error that ended a stream; 0 before there is one.
    """

    request_id: str
    account: Account
    generation: Generation | None = None
    num_answers: int = 1
    user: str | None = None
    status: int = 0
    started: float = field(default_factory=time.perf_counter)

    @property
    def outcome(self) -> int:
        """The status, or 499 if the client left."""
        left = self.generation is not None and not self.generation.is_done
        return CLIENT_GONE if left and self.status == 200 else self.status


class Gate:
    """ASGI middleware around the whole application.

    Parameters
    ----------
    app
        The application.
    accounts
        Who may ask.
    metrics
        What is counted.
    checks_host
        Whether requests must name this machine as their host. Without keys, that stops a page of
        another site whose name was made to resolve to here (DNS rebinding).
    origins
        Other sites whose pages may write; ``"*"`` means all.
    """

    def __init__(
        self,
        app: Starlette,
        accounts: Accounts,
        metrics: ServerMetrics,
        checks_host: bool,
        origins: Collection[str] = (),
    ) -> None:
        self._app = app
        self._accounts = accounts
        self._metrics = metrics
        self._checks_host = checks_host
        self._origins = origins
        self._num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(f"req-{uuid.uuid4().hex}", Account())

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.request_id
                if scope["path"].startswith(("/v1/", OLLAMA)):
                    headers["Cache-Control"] = "no-store"
            await send(message)

        self._num_requests += 1
        has_entered = False
        try:
            try:
                record.account = self._admit(scope)
                record.account.enter(computes=scope["method"] in ("POST", "PUT"))
                has_entered = True
            except RequestError as problem:
                scope["route"] = _route(self._app, scope)
                await problem.response(scope["path"])(scope, receive, send_noted)
                return
            scope.setdefault("state", {})["record"] = record
            asking.set(record.account.tenant)
            await self._app(scope, _bounded(receive, *_limits(scope)), send_noted)
        except asyncio.CancelledError:
            if record.status:
                raise
            stopping = BusyError("the server is stopping", 2)
            await stopping.response(scope["path"])(scope, receive, send_noted)
        finally:
            self._num_requests -= 1
            if record.generation is not None:
                record.generation.cancel()
                record.account.charge(record.generation.tokens["completion"])
            if has_entered:
                record.account.leave(record.num_answers)
            self._note(scope, record)

    def _admit(self, scope: Scope) -> Account:
        """Return whose request it is. Raises RequestError."""
        headers = Headers(scope=scope)
        host = _host(headers.get("host", ""))
        if self._num_requests > MAX_REQUESTS:
            raise BusyError("the server has too many requests at the moment", 2)
        if self._checks_host and not is_loopback(host):
            raise RequestError(
                403,
                f"Host is {headers.get('host', '')[:200]!r}: a server without keys answers to "
                "localhost alone; start it with keys",
                code="wrong_host",
            )
        if scope["method"] not in _READING and not self._may_write(headers):
            raise RequestError(
                403,
                f"Origin is {headers['origin'][:200]!r}: pages of other sites may not ask this "
                "server; start it with --allow-origin for those that may",
                code="wrong_origin",
            )
        if scope["path"] in _OPEN or scope["path"].startswith(PAGE):
            return Account()
        return self._accounts.of(headers.get("authorization", ""))

    def _may_write(self, headers: Headers) -> bool:
        """Return whether a request is from no page, from this server's own, or from a known one.

        A browser sends a page's simple POST to any site, and asks only before the page reads.
        """
        origin = headers.get("origin")
        if origin is None or origin in self._origins or "*" in self._origins:
            return True
        # The scheme is left out: a proxy with TLS speaks plain HTTP to this server.
        return origin.partition("://")[2].lower() == headers.get("host", "").lower() != ""

    def _note(self, scope: Scope, record: Record) -> None:
        """Count and log a request that has ended."""
        generation = record.generation
        line: dict[str, Any] = {
            "request_id": record.request_id,
            "method": scope["method"],
            # Not the path, which may name documents.
            "route": getattr(scope.get("route"), "path", "other"),
            "status": record.outcome,
            "seconds": time.perf_counter() - record.started,
            "key": record.account.name,
            "tenant": record.account.tenant,
            **({} if record.user is None else {"user": record.user}),
        }
        if generation is None:
            self._metrics.note(line, {}, None)
        else:
            self._metrics.note(line, generation.tokens, generation.ttft_seconds)


def _route(app: Starlette, scope: Scope) -> BaseRoute | None:
    """Return the route of a request that does not reach it."""
    return next((one for one in app.routes if one.matches(scope)[0] is not Match.NONE), None)


def _limits(scope: Scope) -> tuple[int, float]:
    """Return the longest body of a request, in bytes, and the time for it."""
    if scope["path"].startswith(f"{DOCUMENTS}/"):
        return ParseLimits.max_file_bytes, UPLOAD_SECONDS
    is_batch = scope["path"] in _OF_TEXTS
    return MAX_BODY_BYTES if is_batch else MAX_PROMPT_BYTES, BODY_SECONDS


def _bounded(receive: Receive, max_bytes: int, max_seconds: float) -> Receive:
    """Return `receive`, which fails if a body is too long or takes too long."""
    started = asyncio.get_running_loop().time()
    num_bytes = 0
    is_complete = False

    async def receive_bounded() -> Message:
        nonlocal num_bytes, is_complete
        if is_complete:
            return await receive()
        seconds = min(max_seconds, BODY_SECONDS + num_bytes / BYTES_PER_SECOND)
        try:
            async with asyncio.timeout_at(started + seconds):
                message = await receive()
        except TimeoutError:
            raise HTTPException(
                408, f"{num_bytes:,} bytes of the body took over {seconds:.0f} seconds"
            ) from None
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise HTTPException(413, f"the body has over {max_bytes:,} bytes; send less")
        is_complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    return receive_bounded


def _host(header: str) -> str:
    """Return the name in a ``Host`` header, without its port. Raises RequestError."""
    found = _HOST.fullmatch(header)
    if header and found is None:
        raise RequestError(
            400,
            f"Host is {header[:200]!r}: expected a name, perhaps with ':' and a port",
            code="wrong_host",
        )
    return "" if found is None else found[1] or found[2]
