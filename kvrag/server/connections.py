"""How many connections there may be, from whom, and how long one may keep the server waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from kvrag.server.access import address_of

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
        # By address; those that wait are in the order in which they began to.
        self._open: dict[str, dict[Connection, None]] = {}
        self._num_open = 0

    def enter(self, connection: Connection) -> None:
        """Admit a new connection; another one, or else this one, is closed if it is too many."""
        own = self._open.setdefault(connection.address, {})
        is_too_many = len(own) >= self._most_of_address
        if is_too_many or self._num_open >= self._most:
            groups = [own] if is_too_many else sorted(self._open.values(), key=len, reverse=True)
            self._make_room(groups, connection)
        own = self._open.setdefault(connection.address, {})
        own[connection] = None
        self._num_open += 1

    def waits(self, connection: Connection) -> None:
        """Note that a connection begins to wait for its client."""
        own = self._open.get(connection.address, {})
        if connection in own:
            del own[connection]
            own[connection] = None

    def leave(self, connection: Connection) -> None:
        """Forget a connection."""
        own = self._open.get(connection.address, {})
        if connection in own:
            del own[connection]
            self._num_open -= 1
            if not own:
                del self._open[connection.address]

    def _make_room(self, groups: Iterable[Iterable[Connection]], newcomer: Connection) -> None:
        for group in groups:
            for connection in group:
                if connection.waits_for_client:
                    self.leave(connection)
                    connection.transport.abort()
                    return
        newcomer.transport.write(_BUSY)
        newcomer.transport.close()


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
