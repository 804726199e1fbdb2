"""What a client of `kvrag serve` gets while 200 others drip, or 400 say nothing.

``python -m tests.server.dripping`` starts a server that may open 256 files. Quiet and disturbed
spells alternate. It prints requests a second, and the server's processor time for each.
"""

import argparse
import contextlib
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx

from kvrag.chunk import Document
from tests.cli.test_serve_here import FEW_FILES, running
from tests.support.rag import PASSAGES, make_index

SPELL_SECONDS = 2.0
BODY = {"model": "model", "prompt": PASSAGES["ledger"], "max_tokens": 8}
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
CASES = {
    "200 dripping headers": (200, _HEAD + b"X: "),
    "200 dripping bodies": (
        200,
        _HEAD + b"Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n",
    ),
    "400 silent": (400, b""),
}


def disturb(port: int, number: int, head: bytes, begun: Event, ends: Event) -> None:
    """Hold connections, and send a byte a second on each; those that are closed come back."""
    held: list[socket.socket | None] = [None] * number
    while not ends.is_set():
        started = time.monotonic()
        for place, one in enumerate(held):
            try:
                if one is None:
                    one = held[place] = socket.create_connection(("127.0.0.1", port), 5)
                    one.setblocking(False)
                    one.sendall(head)
                elif head:
                    one.sendall(b"x")
                with contextlib.suppress(BlockingIOError):
                    if not one.recv(1000):
                        raise ConnectionError
            except OSError:
                if one is not None:
                    one.close()
                held[place] = None
        begun.set()
        ends.wait(max(0, 1 - (time.monotonic() - started)))


@contextlib.contextmanager
def disturbed(port: int, number: int, head: bytes) -> Iterator[None]:
    """Let another process disturb while the block runs."""
    context = multiprocessing.get_context("fork")
    begun, ends = context.Event(), context.Event()
    process = context.Process(target=disturb, args=(port, number, head, begun, ends))
    process.start()
    begun.wait()
    try:
        yield
    finally:
        ends.set()
        process.join()


def processor_seconds(process: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask(url: str, process: int) -> tuple[float, float]:
    """Ask for a while; return requests a second, and the server's milliseconds for each."""
    number, before = 0, processor_seconds(process)
    started = time.perf_counter()
    while (seconds := time.perf_counter() - started) < SPELL_SECONDS:
        # A new connection for every few.
        with httpx.Client(timeout=20) as client:
            for _ in range(5):
                client.post(f"{url}/completions", json=BODY).raise_for_status()
                number += 1
    return number / seconds, 1000 * (processor_seconds(process) - before) / number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with make_index(folder) as index:
            index.add([Document(source="ledger", text=PASSAGES["ledger"])])
        with running(folder / "index", before=FEW_FILES) as process:
            # Else the log fills the pipe, and the server waits.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            # It has replaced the shell, whose id it therefore has.
            url, port = process.url, httpx.URL(process.url).port
            ask(url, process.pid)
            for case, (number, head) in CASES.items():
                quiet, loud = [], []
                for _ in range(rounds):
                    quiet.append(ask(url, process.pid))
                    with disturbed(port, number, head):
                        loud.append(ask(url, process.pid))
                rates, costs = (
                    [statistics.median(one[which] for one in spells) for spells in (quiet, loud)]
                    for which in (0, 1)
                )
                print(
                    f"{case}: {rates[1]:.1f} requests/s, {rates[0]:.1f} undisturbed "
                    f"({rates[1] / rates[0]:.0%}); {costs[1]:.1f} ms of the processor a request, "
                    f"{costs[0]:.1f} undisturbed",
                    flush=True,
                )


if __name__ == "__main__":
    main()
