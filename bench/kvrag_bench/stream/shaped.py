"""A TCP connection at the speed of a trace, and a web server of records that it leads to.

Both run in a separate process, so that they take no time from the measured process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import threading
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from kvrag_bench.stream.trace import Trace, constant

# A piece is what the slowest link carries in some ten milliseconds.
_PIECE_BYTES = 2048
# Little waits in the kernel's buffers: what was broken off is not carried.
_BUFFER_BYTES = 16 << 10
_SLEEP_AT_LEAST = 0.0002
# What the bucket holds: a machine that has other work wakes a thread so much later.
_BURST_SECONDS = 0.02


class TokenBucket:
    """Lets bytes pass as fast as a trace says, those of all connections one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.start(constant(1e12))

    def start(self, trace: Trace) -> None:
        """Begin a trace now."""
        with self._lock:
            self._trace, self._started, self._free_at = trace, time.monotonic(), 0.0

    def carry(self, num_bytes: int) -> None:
        """Wait until `num_bytes` have been carried."""
        with self._lock:
            started = self._started
            begin = max(self._free_at, time.monotonic() - started - _BURST_SECONDS, 0.0)
            self._free_at = until = self._trace.finish(begin, num_bytes)
        left = until + started - time.monotonic()
        if left > _SLEEP_AT_LEAST:
            time.sleep(left)


class ShapedProxy:
    """Passes connections on to a port of this machine; what comes back passes a bucket."""

    def __init__(self, port: int, bucket: TokenBucket) -> None:
        self._target = port
        self._bucket = bucket
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="kvrag-shaped", daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            server = socket.create_connection(("127.0.0.1", self._target))
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink, bucket in ((client, server, None), (server, client, self._bucket)):
                threading.Thread(
                    target=_pump, args=(source, sink, bucket), name="kvrag-shaped-pump", daemon=True
                ).start()


def _pump(source: socket.socket, sink: socket.socket, bucket: TokenBucket | None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_PIECE_BYTES):
            if bucket is not None:
                bucket.carry(len(data))
            sink.sendall(data)
    for one in (source, sink):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


def _serve(folder: str, commands: Connection) -> None:
    from aiohttp import web

    application = web.Application()
    application.router.add_static("/", folder)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(
        target=web.run_app,
        args=(application,),
        kwargs={"sock": listener, "print": None, "handle_signals": False, "access_log": None},
        name="kvrag-serve",
        daemon=True,
    ).start()
    bucket = TokenBucket()
    commands.send(ShapedProxy(listener.getsockname()[1], bucket).port)
    with contextlib.suppress(EOFError):
        while True:
            bucket.start(commands.recv())
            commands.send(None)


class ShapedServer:
    """A server of the records in a folder, over a link that is shaped.

    Attributes
    ----------
    url
        Of the server, for `kvrag.store.registry.open_store`.
    """

    def __init__(self, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._commands, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(folder, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.url = f"http://127.0.0.1:{self._commands.recv()}"

    def start(self, trace: Trace) -> None:
        """Begin a trace now."""
        self._commands.send(trace)
        self._commands.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._commands.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
