"""Servers that commands run until a signal arrives."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from kvrag.cli import console


def until_told(serve: Callable[[], None], stop: Callable[[], None], said: str) -> None:
    """Serve until SIGTERM or SIGINT arrives, and finish the answers that have begun.

    Parameters
    ----------
    serve
        Serves until `stop` is called, in a thread.
    stop
        Returns after the last answer.
    said
        A line for stdout, once the server listens.
    """
    told = threading.Event()

    def run() -> None:
        try:
            serve()
        finally:
            told.set()

    before = {
        number: signal.signal(number, lambda *_: told.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    thread = threading.Thread(target=run, name="kvrag-serve")
    thread.start()
    try:
        console.write(f"{said}\n")
        told.wait()
    finally:
        stop()
        thread.join()
        for number, handler in before.items():
            signal.signal(number, handler)
