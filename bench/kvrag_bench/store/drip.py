"""What clients of `kvrag serve-kv` get while others hold connections and send next to nothing.

The server runs in a separate process, as users start it. The dripping clients do too. Quiet and
disturbed spells alternate, so that a machine's drift affects both.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from kvrag.errors import StoreError
from kvrag.store.http import HttpStore
from kvrag.store.http_protocol import TOKEN_VARIABLE
from kvrag.store.registry import open_store
from kvrag_bench.store.reads import fill
from kvrag_bench.store.records import key_number

SPELL_SECONDS = 0.5
DRIP_SECONDS = 1.0
"""Pause between two bytes of a dripping client, or before a dropped client connects again."""

# For connections that come or go all at once.
_SETTLING_SECONDS = 0.2
_NUM_RECORDS = 8
_RECORDS_A_CONNECTION = 4
_TIMEOUT_SECONDS = 2.0
_HEAD = "GET /v1 HTTP/1.1\r\nHost: localhost\r\n"


@dataclass(frozen=True)
class _Case:
    name: str
    has_token: bool
    head: str
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class DripRow:
    """One kind of disturbance.

    Attributes
    ----------
    case
        What the disturbing clients do, and from where.
    num_clients
        How many there are.
    quiet_requests_per_second, requests_per_second
        Answered without and with them; medians of rounds. One thread reads records whole, over a
        new connection for every few.
    share
        The median over the rounds of the second rate over the first, of the quiet spells around it.
    num_failed
        Reads that failed, in all disturbed rounds together.
    """

    case: str
    num_clients: int
    quiet_requests_per_second: float
    requests_per_second: float
    share: float
    num_failed: int


def measure_drip(
    folder: Path,
    num_clients: int,
    rounds: int,
    say: Callable[[str], None],
    command: Sequence[str] = (sys.executable, "-m", "kvrag.cli", "serve-kv"),
) -> list[DripRow]:
    """Ask a server for records, undisturbed and disturbed in turn.

    Parameters
    ----------
    folder
        Folder of the store.
    num_clients
        Clients that disturb.
    rounds
        Rounds of each case.
    command
        Starts the server; options follow.
    """
    url = f"file:{folder / 'store'}"
    with contextlib.closing(open_store(url)) as store:
        fill(store, _NUM_RECORDS, 64)
    token = secrets.token_hex(16)
    rows = []
    for case in _cases(token):
        say(case.name)
        with (
            _serving([*command, "--store", url, "--port", "0"], token * case.has_token) as at,
            _dripping(at.port, num_clients, case) as disturb,
        ):
            num_failed = 0
            _ask(at.url)
            quiet, disturbed = [_ask(at.url)[0]], []
            for _ in range(rounds):
                with disturb():
                    rate, failed = _ask(at.url)
                disturbed.append(rate)
                num_failed += failed
                quiet.append(_ask(at.url)[0])
        rows.append(
            DripRow(
                case=case.name,
                num_clients=num_clients,
                quiet_requests_per_second=statistics.median(quiet),
                requests_per_second=statistics.median(disturbed),
                share=statistics.median(
                    2 * rate / (before + after)
                    for before, rate, after in zip(quiet, disturbed, quiet[1:], strict=False)
                ),
                num_failed=num_failed,
            )
        )
    return rows


def _cases(token: str) -> list[_Case]:
    bearer = f"Authorization: Bearer {token}\r\n"
    here, elsewhere = ("127.0.0.1",), tuple(f"127.0.0.{number}" for number in range(2, 10))
    return [
        _Case("silent, same address", True, "", here),
        _Case("silent, 8 other addresses", True, "", elsewhere),
        _Case("drip, same address", True, f"{_HEAD}X: ", here),
        _Case("drip, 8 other addresses", True, f"{_HEAD}X: ", elsewhere),
        _Case("drip with the token, same address", True, f"{_HEAD}{bearer}X: ", here),
        _Case("drip with the token, 8 other addresses", True, f"{_HEAD}{bearer}X: ", elsewhere),
        _Case("drip, same address, server without token", False, f"{_HEAD}X: ", here),
    ]


def _ask(url: str) -> tuple[float, int]:
    """Read records for a while; return requests answered a second, and reads that failed."""
    num_answered = num_failed = number = 0
    started = time.perf_counter()
    while time.perf_counter() - started < SPELL_SECONDS:
        try:
            with contextlib.closing(HttpStore(url, timeout_seconds=_TIMEOUT_SECONDS)) as store:
                num_answered += 1
                for _ in range(_RECORDS_A_CONNECTION):
                    number += 1
                    record = store.open(key_number(number % _NUM_RECORDS))
                    assert record is not None
                    record.read_into(0, memoryview(bytearray(record.size_bytes)))
                    num_answered += 2
        except StoreError:
            num_failed += 1
    return num_answered / (time.perf_counter() - started), num_failed


@dataclass(frozen=True)
class _At:
    url: str
    port: int


@contextlib.contextmanager
def _serving(command: Sequence[str], token: str) -> Iterator[_At]:
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    before = os.environ.pop(TOKEN_VARIABLE, None)
    if token:
        # The clients' as well.
        os.environ[TOKEN_VARIABLE] = environment[TOKEN_VARIABLE] = token
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split(" ")[0].strip()
            yield _At(url, int(url.rpartition(":")[2]))
        finally:
            server.terminate()
            os.environ.pop(TOKEN_VARIABLE, None)
            if before is not None:
                os.environ[TOKEN_VARIABLE] = before


@contextlib.contextmanager
def _dripping(
    port: int, num_clients: int, case: _Case
) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Yield what lets clients of another process disturb for the length of a block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_drip, args=(theirs, port, num_clients, case.head.encode(), case.addresses)
    )
    process.start()

    @contextlib.contextmanager
    def disturb() -> Iterator[None]:
        for said in (True, False):
            ours.send(said)
            ours.recv()
            time.sleep(_SETTLING_SECONDS)
            if said:
                yield

    try:
        yield disturb
    finally:
        ours.send(None)
        process.join()


def _drip(
    pipe: Connection, port: int, num_clients: int, head: bytes, addresses: tuple[str, ...]
) -> None:
    """Hold connections between True and False, until None comes."""
    while pipe.recv():
        with selectors.DefaultSelector() as selector:
            for number in range(num_clients):
                _connect(selector, port, head, addresses[number % len(addresses)])
            pipe.send(None)
            due = time.monotonic() + DRIP_SECONDS
            while not pipe.poll(max(0.0, due - time.monotonic())):
                due += DRIP_SECONDS
                gone = {key.fd for key, _ in selector.select(0)}
                for key in list(selector.get_map().values()):
                    line, address = key.fileobj, key.data
                    assert isinstance(line, socket.socket)
                    try:
                        if key.fd in gone and not line.recv(4096):
                            raise ConnectionResetError
                        if head:
                            line.send(b"x")
                    except BlockingIOError:
                        pass
                    except OSError:
                        selector.unregister(line)
                        line.close()
                        _connect(selector, port, head, address)
            for key in list(selector.get_map().values()):
                selector.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
        pipe.recv()
        pipe.send(None)


def _connect(selector: selectors.BaseSelector, port: int, head: bytes, address: str) -> None:
    try:
        line = socket.create_connection(
            ("127.0.0.1", port), timeout=1.0, source_address=(address, 0)
        )
    except OSError:
        return
    with contextlib.suppress(OSError):
        line.sendall(head)
    line.setblocking(False)
    selector.register(line, selectors.EVENT_READ, address)
