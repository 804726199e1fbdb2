"""A TCP proxy that disturbs its connections on command."""

import contextlib
import socket
import threading
import time
from typing import Self


class FaultyProxy:
    """Forwards bytes to a local port, and disturbs them according to its `mode`.

    Modes: ``good``; ``slow`` (each answer waits three seconds), ``silent`` (nothing is answered),
    ``dead`` (connections are refused), ``half-closed`` (the answer stops after 3,000 bytes and the
    connection is closed), ``throttled`` (1 MB/s), ``wrong`` (a bit of every 1,000th byte of large
    answers is flipped), ``narrow`` (requests pass at 2 MB/s).
    """

    def __init__(self, port: int) -> None:
        self.mode = "good"
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        # A small buffer, inherited by connections: who sends to a narrow line has to wait.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self.cut()

    def cut(self) -> None:
        """Close all connections."""
        while self._sockets:
            with contextlib.suppress(OSError):
                self._sockets.pop().close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.mode == "dead":
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, server]
            for source, sink, is_answer in ((client, server, False), (server, client, True)):
                threading.Thread(
                    target=self._pump, args=(source, sink, is_answer), daemon=True
                ).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        num_passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                mode = self.mode
                if mode == "narrow" and not is_answer:
                    time.sleep(len(data) / 2e6)
                if is_answer and mode not in ("good", "narrow"):
                    if mode == "dead":
                        break
                    if mode == "silent":
                        continue
                    if mode == "slow":
                        time.sleep(3.0)
                    if mode == "throttled":
                        time.sleep(len(data) / 1e6)
                    if mode == "wrong" and len(data) > 2000:
                        changed = bytearray(data)
                        for place in range(1000, len(data) - 200, 1000):
                            changed[place] ^= 0x20
                        data = bytes(changed)
                    if mode == "half-closed" and num_passed + len(data) > 3000:
                        sink.sendall(data[: max(3000 - num_passed, 0)])
                        break
                num_passed += len(data)
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
