"""Real servers for the tests of stores, each on a free local port."""

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

PASSWORD = "p@ss/word 1"
_START_SECONDS = 60.0


# Each test process starts at another port and never returns a port twice. The ports are below
# those that systems assign, so that a killed server's port is still free when it restarts.
_ports = (10_000 + number % 20_000 for number in itertools.count(101 * os.getpid()))


def free_port() -> int:
    """Return a local port that nobody listens on."""
    for port in itertools.islice(_ports, 1000):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


def wait_for(is_ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    try:
        while not is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.05)
    except BaseException:
        process.kill()
        process.wait()
        raise


def accepts(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1.0)
        return client.connect_ex(("127.0.0.1", port)) == 0


class RedisServer:
    """A `redis-server` with a password that writes every command to disk at once."""

    def __init__(self, folder: Path, *options: str) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.skip("redis-server is not installed: apt-get install redis-server")
        self.port = free_port()
        self._log = folder / "redis.log"
        # The password is in a file, because every user can read a command line.
        config = folder / "redis.conf"
        config.write_text(
            f'port {self.port}\nbind 127.0.0.1\nrequirepass "{PASSWORD}"\ndir "{folder}"\n'
            'appendonly yes\nappendfsync always\nsave ""\n'
        )
        self._command = [binary, str(config), *options]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_for(self._answers, self._process, self._log)

    def _answers(self) -> bool:
        """Return whether it answers, which it does once it has read its stored data."""
        with socket.socket() as client:
            client.settimeout(1.0)
            if client.connect_ex(("127.0.0.1", self.port)):
                return False
            client.sendall(f'AUTH "{PASSWORD}"\r\nPING\r\n'.encode())
            said = b""
            while said.count(b"\r\n") < 2 and (more := client.recv(100)):
                said += more
            return b"PONG" in said

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Make it hang: the system accepts connections, but nothing answers them."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)


class S3Server:
    """moto's server: Amazon's protocol over HTTP, kept in memory."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._log = folder / "moto.log"
        command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-p", str(self.port)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "-H", "127.0.0.1"],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONWARNINGS": "ignore"},
            )
        wait_for(lambda: accepts(self.port), self._process, self._log)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def bucket(self, name: str) -> Iterator[Any]:
        """Yield a client of a bucket, which is empty afterwards."""
        import boto3  # most tests need none

        with contextlib.closing(boto3.client("s3", endpoint_url=self.endpoint)) as client:
            client.create_bucket(Bucket=name)
            yield client
            for found in client.list_objects_v2(Bucket=name).get("Contents", []):
                client.delete_object(Bucket=name, Key=found["Key"])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Yield the URL of a server that answers every GET as it is told."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.02], daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def reply(handler: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    """Answer a request; ``_`` in a header's name is ``-``."""
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)
