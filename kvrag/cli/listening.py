"""The end of `kvrag serve` of the socket over which commands ask (`kvrag.cli.through`)."""

from __future__ import annotations

import os
import secrets
import select
import socket
import socketserver
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from kvrag.cli import console
from kvrag.cli import options as o
from kvrag.cli.answering import Outcome, Say
from kvrag.cli.conversation import Asker
from kvrag.cli.through import StoppedAnswerError, Wire, described, place
from kvrag.engine.asking import Asking
from kvrag.engine.engine import KVEngine
from kvrag.engine.idle import Idle
from kvrag.engine.options import ENGINE_DEFAULTS, EngineOptions, everywhere
from kvrag.errors import KVRagError
from kvrag.server.metrics import ServerMetrics
from kvrag.server.problems import CLIENT_GONE, as_problem

_PING_SECONDS = 5.0
_CUT_SECONDS = 2.0  # from the end of the grace until an answer's connection is cut
# A client that reads nothing for so long is dropped.
_UNREAD_SECONDS = 60

_PAUSE_SECONDS = 0.1
# Room in memory changes no answer: the server's own counts.
_OF_SERVER = ("session_bytes", "session_store_bytes", "card_bytes", "pinned_bytes")


@dataclass
class _Answers:
    """Answers connections, each in its thread."""

    engine: KVEngine
    idle: Idle
    metrics: ServerMetrics
    same: dict[str, Any]
    is_ending: bool = False
    is_cut: bool = False

    def __post_init__(self) -> None:
        self.open: dict[socket.socket, threading.Thread] = {}

    def end(self, grace_seconds: float) -> None:
        """End the connections; answers that have begun may go on for a while."""
        self.is_ending = True
        due = time.monotonic() + grace_seconds
        for connection, thread in [*self.open.items()]:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
            thread.join(max(0.0, due - time.monotonic()))
        self.is_cut = True
        due = time.monotonic() + _CUT_SECONDS
        for connection, thread in [*self.open.items()]:
            thread.join(max(0.0, due - time.monotonic()))
            with suppress(OSError):  # it reads a long prompt, and nobody waits for that
                connection.shutdown(socket.SHUT_RDWR)

    def serve(self, connection: socket.socket) -> None:
        """Answer one connection until it ends."""
        self.open[connection] = threading.current_thread()
        limit = struct.pack("ll", _UNREAD_SECONDS, 0)
        with suppress(OSError, ValueError, EOFError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._converse(connection, Wire(connection))
        self.open.pop(connection, None)

    def _converse(self, connection: socket.socket, wire: Wire) -> None:
        hello = wire.receive()
        if (why := self._unfit(hello)) is not None:
            wire.send(no=why)
            return
        asking = Asking(hello["k"], hello["filter"], use_chat_template=not hello["no_chat"])
        try:
            asker = Asker(self.engine, asking, hello["history"], self.idle)
        except KVRagError as error:
            wire.send(error=str(error))
            return
        wire.send(ready=True)
        # It takes no KV of other conversations: a separate process would have none.
        given = {name: hello["same"][name] for name in ENGINE_DEFAULTS} | {
            "session": uuid.uuid4().hex
        }

        heard = select.poll()
        heard.register(connection, select.POLLIN)

        def say(kind: str, text: str) -> None:
            is_stopped = not self.is_ending and heard.poll(0)
            if is_stopped or self.is_cut:
                raise StoppedAnswerError
            wire.send(say=[kind, text])

        while True:
            line = wire.receive()
            if "forget" in line:
                asker.forget()
            elif "ask" in line:
                line["options"] = {**given, **line["options"]}
                self._answer(asker, line, say, wire)

    def _answer(self, asker: Asker, line: dict[str, Any], say: Say, wire: Wire) -> None:
        started, status, outcome = time.perf_counter(), CLIENT_GONE, None
        try:
            with _pinged(wire):
                outcome = asker.ask(line["ask"], say, line["options"], verifies=line["verifies"])
            wire.send(outcome=asdict(outcome))
            status = 200
        except StoppedAnswerError:
            wire.send(stopped=True)
        except KVRagError as error:
            status = as_problem(error).status
            wire.send(error=str(error))
        except OSError:
            raise
        except Exception as error:
            status = as_problem(error).status  # and the log says more
            wire.send(error=f"unexpected {type(error).__name__} in 'kvrag serve': {error}")
        finally:
            self._note(status, time.perf_counter() - started, outcome)

    def _note(self, status: int, seconds: float, outcome: Outcome | None) -> None:
        tokens, ttft_seconds = {}, None
        if outcome is not None:
            usage, ttft_seconds = asdict(outcome.answer.usage), outcome.answer.ttft_seconds
            tokens = {name.removesuffix("_tokens"): number for name, number in usage.items()}
        fields = {"route": "socket", "status": status, "seconds": seconds, "tenant": ""}
        self.metrics.note(fields, tokens, ttft_seconds)

    def _unfit(self, hello: dict[str, Any]) -> str | None:
        """Return why this server would not answer as the command by itself; None if it would."""
        asked, own = hello.get("same"), self.same
        if not isinstance(asked, dict) or asked.get("version") != own["version"]:
            return f"it is of version {own['version']}"
        if asked["index"] != own["index"]:
            return "its index was replaced"
        if hello["rerank"] is not None:
            return "it does not rerank for commands"
        usual = everywhere(EngineOptions)
        for name, value in asked.items():
            is_by_answer = name in ENGINE_DEFAULTS and value is not None
            is_of_server = name in _OF_SERVER and value == usual[name].default
            if value != own[name] and not (is_by_answer or is_of_server):
                option = name if name.isupper() else f"--{name.replace('_', '-')}"
                is_own, is_asked = (
                    "the default" if one is None else one for one in (own[name], value)
                )
                return f"its {option} is {is_own}, not {is_asked}"
        return None


@contextmanager
def _pinged(wire: Wire) -> Iterator[None]:
    """Tell the client now and then that the server lives."""
    ended = threading.Event()

    def ping() -> None:
        with suppress(OSError):
            while not ended.wait(_PING_SECONDS):
                wire.send(ping=True)

    thread = threading.Thread(target=ping, name="kvrag-ping", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def listening(
    engine: KVEngine,
    idle: Idle,
    metrics: ServerMetrics,
    opening: o.Opening,
    answering: o.Answering,
    grace_seconds: float,
) -> Iterator[None]:
    """Answer `kvrag query` and `kvrag chat` of the same index, until the block ends."""
    path = place(opening.index, makes=True)
    if path is None:
        yield
        return
    answers = _Answers(engine, idle, metrics, described(opening, answering))

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            answers.serve(self.request)

    class Listener(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 128

        def get_request(self) -> Any:
            try:
                return super().get_request()
            except OSError:  # too many open files: not for ever
                time.sleep(_PAUSE_SECONDS)
                raise

    own = path.with_suffix(f".{secrets.token_hex(2)}")  # another server may start now, too
    try:
        listener = Listener(os.fspath(own), Handler)
        own.chmod(0o600)
        number = own.stat().st_ino
        own.replace(path)  # commands ask the newest server of an index
    except OSError as error:
        own.unlink(missing_ok=True)
        console.note(f"'kvrag query' will not ask this server: {error}")
        yield
        return
    with listener:
        thread = threading.Thread(
            target=listener.serve_forever, args=[0.1], name="kvrag-commands", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            with suppress(OSError):
                if path.stat().st_ino == number:
                    path.unlink()
            listener.shutdown()
            thread.join()
            answers.end(grace_seconds)
