"""Which connections of ``kvrag serve-kv`` may stay, and for how long.

A connection is a guest until it has sent one whole request that the server admits. Guests have a
small, separate quota that empties fast. Each must complete its request within `HEAD_SECONDS`. When
there is one guest too many, the one that has waited longest goes, first among guests from the same
address. Members have shown that they may be there and never make room for guests.

All of it runs in the thread of the server's event loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable

HEAD_SECONDS = 10.0
"""Time from the connection to the end of its first request's header, TLS included."""

IDLE_SECONDS = 30.0
"""Time from an answer to the end of the next request's header."""

MAX_GUESTS = 512
MAX_GUESTS_OF_ADDRESS = 128
"""Below the first, so that one address cannot drive away the guests of others."""


class Connection:
    """A connection as admission sees it.

    Parameters
    ----------
    address
        The peer's address, as `address_of` returns it.
    drop
        Ends the connection at once, whatever it is doing.
    """

    def __init__(self, address: str, drop: Callable[[], None]) -> None:
        self.address = address
        self.drop = drop
        self._timer: asyncio.TimerHandle | None = None

    def drop_after(self, seconds: float) -> None:
        """Set the deadline, replacing an earlier one."""
        self.keep()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.drop)

    def keep(self) -> None:
        """Remove the deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Admission:
    """Guests, members that wait for their next request, and members that are being answered.

    Parameters
    ----------
    max_members
        Most members at the same time.
    """

    def __init__(self, max_members: int) -> None:
        self._max_members = max_members
        # Each in the order in which its connections began to wait.
        self._guests: dict[Connection, None] = {}
        self._idle: dict[Connection, None] = {}
        self._busy: set[Connection] = set()
        self._of_address: dict[str, int] = {}

    @property
    def num_busy(self) -> int:
        """Number of connections that are being answered."""
        return len(self._busy)

    def enter(self, connection: Connection) -> None:
        """Admit a new connection as a guest; the longest-waiting guest may have to go for it."""
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
        """Admit a connection's request; return False if too many are being answered already."""
        if connection in self._guests and len(self._idle) + len(self._busy) >= self._max_members:
            if not self._idle:
                return False
            # Clients open a new connection when an idle one is gone.
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
        """End the oldest guest's connection, if there is one."""
        if self._guests:
            self._drop(next(iter(self._guests)))

    def drop_waiting(self) -> None:
        """End all connections except those that are being answered."""
        for connection in [*self._guests, *self._idle]:
            self._drop(connection)

    def drop_all(self) -> None:
        """End all connections."""
        self.drop_waiting()
        for connection in list(self._busy):
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        # The connection ends only later, and must not be chosen twice.
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
    """Return the address that counts as one peer: an IPv4 address, or an IPv6 subscriber's /64.

    Text that is not an address counts as it is.
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
