"""Which connections of ``kvrag serve-kv`` may stay, and for how long.

A connection is a guest until it has sent one whole request that the server lets in. Guests have a
room of their own, small and soon empty: each must come to its request within `HEAD_SECONDS`, and
the guest that has waited longest goes when one too many arrives, first among those of the same
address. Members, who have shown that they may be there, never make room for guests.

All of it runs in the thread of the server's event loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable

HEAD_SECONDS = 10.0
"""From the connection to the end of its first request's header, TLS included."""

IDLE_SECONDS = 30.0
"""From an answer to the end of the next request's header."""

MAX_GUESTS = 512
MAX_GUESTS_OF_ADDRESS = 128
"""Below the first, so that one address cannot drive away the guests of others."""


class Connection:
    """A connection as admission sees it.

    Parameters
    ----------
    address
        Of the peer, as `address_of` gives it.
    drop
        Ends the connection at once, whatever it is doing.
    """

    def __init__(self, address: str, drop: Callable[[], None]) -> None:
        self.address = address
        self.drop = drop
        self._timer: asyncio.TimerHandle | None = None

    def drop_after(self, seconds: float) -> None:
        """Set the deadline, in place of the one there was."""
        self.keep()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.drop)

    def keep(self) -> None:
        """Take the deadline away."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Admission:
    """Guests, members that wait for their next request, and members that are being answered.

    Parameters
    ----------
    max_members
        Members at the same time.
    """

    def __init__(self, max_members: int) -> None:
        self._max_members = max_members
        # Each in the order in which they began to wait.
        self._guests: dict[Connection, None] = {}
        self._idle: dict[Connection, None] = {}
        self._busy: set[Connection] = set()
        self._of_address: dict[str, int] = {}

    @property
    def num_busy(self) -> int:
        """Connections that are being answered."""
        return len(self._busy)

    def enter(self, connection: Connection) -> None:
        """Take a new connection in as a guest; who waits longest may have to go for it."""
        num_others = self._of_address.get(connection.address, 0)
        if num_others >= MAX_GUESTS_OF_ADDRESS:
            same = (one for one in self._guests if one.address == connection.address)
            self._drop(next(same))
        elif len(self._guests) >= MAX_GUESTS:
            self.drop_oldest_guest()
        self._guests[connection] = None
        self._of_address[connection.address] = self._of_address.get(connection.address, 0) + 1
        connection.drop_after(HEAD_SECONDS)

    def begin(self, connection: Connection) -> bool:
        """Let a connection's request be answered; False: so many are at it that it must not."""
        if connection in self._guests and len(self._idle) + len(self._busy) >= self._max_members:
            if not self._idle:
                return False
            # Clients open another when one that was idle is gone.
            self._drop(next(iter(self._idle)))
        self._forget(connection)
        self._busy.add(connection)
        connection.keep()
        return True

    def end(self, connection: Connection) -> None:
        """Note that a request has been answered."""
        if connection in self._busy:
            self._busy.remove(connection)
            self._idle[connection] = None
            connection.drop_after(IDLE_SECONDS)

    def leave(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        self._forget(connection)
        connection.keep()

    def drop_oldest_guest(self) -> None:
        """Make room, if there is a guest."""
        if self._guests:
            self._drop(next(iter(self._guests)))

    def drop_waiting(self) -> None:
        """End all connections but those that are being answered."""
        for connection in [*self._guests, *self._idle]:
            self._drop(connection)

    def drop_all(self) -> None:
        """End all connections."""
        self.drop_waiting()
        for connection in list(self._busy):
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        # Its end shows only later, and it must not be chosen twice.
        self._forget(connection)
        connection.drop()

    def _forget(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        self._busy.discard(connection)
        if connection in self._guests:
            del self._guests[connection]
            self._of_address[connection.address] -= 1
            if not self._of_address[connection.address]:
                del self._of_address[connection.address]


def address_of(host: str) -> str:
    """Return what counts as one peer: an IPv4 address, or the /64 that one subscriber of IPv6 has.

    Text that is no address counts as it is.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((address, 64), strict=False).network_address)
    return str(address)
